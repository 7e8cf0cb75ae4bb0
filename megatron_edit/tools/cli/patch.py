"""Enable EDiT in a clone of Megatron-LM without the launcher: a line in each pretrain_*.py."""

from __future__ import annotations

import ast
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from megatron_edit.atomic_files import write_atomic
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import refuse_rest
from megatron_edit.versions import release_of

NOT_PATCHED = 1
PACKAGE_INFO = Path("megatron", "core", "package_info.py")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
MODULE = "megatron_edit.activation"
# It also works without this package: with --use-edit it exits with 2 and says what to install;
# without the flag the script is stock Megatron.
LINE = (
    "import importlib.util, sys; "
    f'importlib.import_module("{MODULE}").activate(__name__, __file__) '
    'if importlib.util.find_spec("megatron_edit") else '
    '"--use-edit" in sys.argv and sys.exit(sys.stderr.write('
    '"megatron_edit: --use-edit: needs the package megatron_edit, which this Python does not have; '
    'pip install -e PATH_TO_MEGATRON_EDIT, or drop --use-edit\\n") and 2)  # megatron-edit patch'
)
_OLD_LINE = f"from {MODULE} import activate; activate(__name__, __file__)  # megatron-edit patch"


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("folder", metavar="DIR", help="a clone of Megatron-LM")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--revert", action="store_true", help="remove the lines")
    what.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where a line is missing"
    )
    what.add_argument(
        "--diff", action="store_true", help="change nothing; print a patch for git apply"
    )


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Patch a clone, or report its state.

    Raises:
        UsageError: not a clone, an unsupported version, or a script without a place for the line.
    """
    refuse_rest("patch", rest)
    folder = Path(options.folder)
    if not options.revert:  # which works with any version
        release = release_of(version_of_clone(folder))
    scripts = training_scripts(folder)
    plain = {name: remove(source, name) for name, source in scripts.items()}
    if options.diff:
        sys.stdout.write("".join(diff(source, name) for name, source in plain.items()))
        return 0
    if options.check:
        before, after, changed = "not patched", "patched", plain
    elif options.revert:
        before, after, changed = "not patched", "reverted", plain
    else:
        sys.stdout.write(f"Megatron-LM {release} ({release.tag})\n")
        before, after = "patched already", "patched"
        changed = {name: insert(source, name) for name, source in plain.items()}
    same = {name: changed[name] == source for name, source in scripts.items()}
    for name in scripts:  # all of them could be changed
        if not options.check and not same[name]:
            _write(folder / name, changed[name])
        sys.stdout.write(f"{name}: {before if same[name] else after}\n")
    return NOT_PATCHED if options.check and any(same.values()) else 0


def version_of_clone(folder: Path) -> str:
    """Return the version of megatron-core in a clone; it is read, not imported.

    Raises:
        UsageError: `folder` is no clone of Megatron-LM.
    """
    try:
        text = (folder / PACKAGE_INFO).read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    parts = dict(re.findall(r"^(\w+) = ['\"]?(\w*)", text, re.MULTILINE))
    if not parts.keys() >= set(_PARTS):
        rule = f"is no clone of Megatron-LM: {PACKAGE_INFO} says no version"
        raise UsageError(str(folder), rule, "give the folder of a clone")
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts)


def training_scripts(folder: Path) -> dict[str, bytes]:
    """Return name and content of the top-level scripts of a clone that call ``pretrain``.

    Scripts that only call another one need no line.

    Raises:
        UsageError: there are none, or one is not valid Python.
    """
    paths = (path for path in sorted(folder.glob("pretrain_*.py")) if path.is_file())
    found = {path.name: path.read_bytes() for path in paths}
    scripts = {name: source for name, source in found.items() if _calls(_parse(source, name))}
    if not scripts:
        rule = "has no pretrain_*.py that calls pretrain()"
        raise UsageError(str(folder), rule, "give the folder of a clone")
    return scripts


def insert(source: bytes, name: str) -> bytes:
    """Return a script without the activating line with it, after docstring and future imports.

    Raises:
        UsageError: no line can be inserted before the call of ``pretrain``.
    """
    lines, body = source.splitlines(keepends=True), _parse(source, name).body
    head = [*takewhile(_comes_first, body)]
    place = (head[-1].end_lineno or 0) if head else body[0].lineno - 1
    end = b"\r\n" if b"\r\n" in source else b"\n"
    patched = b"".join([*lines[:place], LINE.encode() + end, *lines[place:]])
    try:
        tree = ast.parse(patched)
        is_first = any(node.lineno == place + 1 for node in tree.body)  # else inside of a string
        is_first &= all(call.lineno > place + 1 for call in _calls(tree))
    except SyntaxError:
        is_first = False
    if not is_first:
        raise UsageError(name, "has no place for a line before it trains", "start it with a line")
    return patched


def remove(source: bytes, name: str) -> bytes:
    """Return the script without the activating line.

    Raises:
        UsageError: the line was changed by hand.
    """
    ours = (LINE.encode(), _OLD_LINE.encode())
    lines = source.splitlines(keepends=True)
    plain = b"".join(line for line in lines if line.rstrip(b"\r\n") not in ours)
    begins, mark = f"from {MODULE}".encode(), b"# megatron-edit patch"
    rest = (line for line in plain.splitlines() if MODULE.encode() in line)
    if any(line.startswith(begins) or mark in line for line in rest):
        raise UsageError(name, "the activating line was changed", "remove the line by hand")
    return plain


def diff(source: bytes, name: str) -> str:
    """Return the change of `insert` as a patch for ``git apply --unidiff-zero``.

    Args:
        source: of the script, without the line.
        name: path of the script, from the top of the clone.
    """
    before = insert(source, name).partition(LINE.encode())[0]
    number = len(before.splitlines()) + 1
    return (
        f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n"
        f"@@ -{number - 1},0 +{number} @@\n+{LINE}\n"
    )


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, keeping its mode and symbolic links to it.

    Raises:
        UsageError: it cannot be written.
    """
    path = path.resolve()
    try:
        write_atomic(path, content, keeps_mode=True)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise UsageError(str(path), rule, "use a clone that you may write to") from None


def _comes_first(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _calls(tree: ast.Module) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", "")) == "pretrain"]


def _parse(source: bytes, name: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        rule = f"is not valid Python ({error})"
        raise UsageError(name, rule, "give an unmodified clone") from None
