"""A clone of Megatron-LM: its version, its training scripts, and writing them."""

from __future__ import annotations

import ast
import os
import shutil
import tempfile
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.tools.patch.line import trains
from megatron_edit.versions import Release, release_of

PACKAGE_INFO = Path("megatron", "core", "package_info.py")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


def release_of_clone(folder: Path) -> Release:
    """The release that a clone belongs to.

    Raises:
        UsageError: `folder` is no clone of Megatron-LM.
        HostVersionError: the clone's version is not supported.
    """
    return release_of(version_of_clone(folder))


def version_of_clone(folder: Path) -> str:
    """Version of megatron-core in a clone; read, not imported.

    Raises:
        UsageError: `folder` is no clone of Megatron-LM.
    """
    rule = f"is no clone of Megatron-LM: {PACKAGE_INFO} says no version"
    try:
        tree = ast.parse((folder / PACKAGE_INFO).read_bytes())
    except (OSError, SyntaxError, ValueError):
        raise UsageError(str(folder), rule, "give the folder of a clone") from None
    values: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                values[getattr(target, "id", "")] = node.value.value
    if any(part not in values for part in _PARTS):
        raise UsageError(str(folder), rule, "give the folder of a clone")
    major, minor, patch, pre_release = (values[part] for part in _PARTS)
    return f"{major}.{minor}.{patch}{pre_release}"


def training_scripts(folder: Path) -> dict[str, bytes]:
    """Name and content of the scripts at the top of a clone that call ``pretrain``.

    Those that only pass on to another need nothing.

    Raises:
        UsageError: there are none, or one cannot be read.
    """
    scripts = {}
    for path in sorted(folder.glob("pretrain_*.py")):
        try:
            source = path.read_bytes()
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            raise UsageError(str(path), rule, "give a folder of yours") from None
        if trains(source, str(path)):
            scripts[path.name] = source
    if not scripts:
        rule = "has no pretrain_*.py that calls pretrain()"
        raise UsageError(str(folder), rule, "give the folder of a clone")
    return scripts


def write(path: Path, content: bytes) -> None:
    """Replace a file at once, keeping its mode; a link goes on leading to it.

    Raises:
        UsageError: it cannot be written.
    """
    path = path.resolve()
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary or path.with_name(".none")).unlink(missing_ok=True)
        rule = f"cannot be written ({error.strerror})"
        raise UsageError(str(path), rule, "use a clone that you may write to") from None
