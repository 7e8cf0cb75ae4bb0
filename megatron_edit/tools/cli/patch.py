"""Enable EDiT in a clone of Megatron-LM without the launcher: a line in each pretrain_*.py."""

from __future__ import annotations

import argparse
import ast
import codecs
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from megatron_edit.atomic_files import write_atomic
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import refuse_rest
from megatron_edit.versions import Release, release_of

NOT_PATCHED = 1


def configure(parser: argparse.ArgumentParser) -> None:
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
    if options.revert:  # for any version of the clone
        return _change(folder, remove, "not patched", "reverted")
    release = release_of_clone(folder)
    scripts = training_scripts(folder)
    if options.check:
        return _check(scripts)
    if options.diff:
        for name, source in scripts.items():
            sys.stdout.write(diff(remove(source, name), name))
        return 0
    sys.stdout.write(f"Megatron-LM {release} ({release.tag})\n")
    return _change(folder, insert, "patched already", "patched")


def _check(scripts: Mapping[str, bytes]) -> int:
    is_patched = {n: line_number(source, n) is not None for n, source in scripts.items()}
    for name, yes in is_patched.items():
        sys.stdout.write(f"{name}: {'patched' if yes else 'not patched'}\n")
    return 0 if all(is_patched.values()) else NOT_PATCHED


def _change(folder: Path, change: Callable[[bytes, str], bytes], before: str, after: str) -> int:
    """Change all scripts; none if one of them cannot be changed."""
    scripts = training_scripts(folder)
    changed = {name: change(source, name) for name, source in scripts.items()}
    for name, source in scripts.items():
        if changed[name] != source:
            write(folder / name, changed[name])
        sys.stdout.write(f"{name}: {before if changed[name] == source else after}\n")
    return 0


# ---- The activating line in the training scripts of a clone of Megatron-LM (megatron-edit patch)
#
# Scripts are handled as bytes: all other lines stay unchanged, with any line ends or encoding.


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
_REVERT = "remove the line by hand"


def release_of_clone(folder: Path) -> Release:
    """Return the release that a clone belongs to.

    Raises:
        UsageError: `folder` is no clone of Megatron-LM.
        HostVersionError: the clone's version is not supported.
    """
    return release_of(version_of_clone(folder))


def version_of_clone(folder: Path) -> str:
    """Return the version of megatron-core in a clone; it is read, not imported.

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
    """Return name and content of the top-level scripts of a clone that call ``pretrain``.

    Scripts that only call another one need no line.

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


def trains(source: bytes, name: str) -> bool:
    """Return whether a script calls Megatron's ``pretrain``.

    Args:
        name: of the script, for the error.

    Raises:
        UsageError: it is not valid Python.
    """
    return bool(_calls(_parse(source, name)))


def line_number(source: bytes, name: str) -> int | None:
    """Return the number of the activating line, from 1; None where there is none.

    Raises:
        UsageError: the script is not valid Python, or the line was changed by hand.
    """
    ours = [node.lineno for node in _parse(source, name).body if _names_module(node)]
    if not ours:
        return None
    text = _without_end(_lines(source)[1][ours[0] - 1])
    if len(ours) > 1 or text not in (LINE.encode(), _OLD_LINE.encode()):
        raise UsageError(f"{name}:{ours[0]}", "the activating line was changed", _REVERT)
    return ours[0]


def insert(source: bytes, name: str) -> bytes:
    """Return the script with the activating line, after docstring and future imports.

    Raises:
        UsageError: no line can be inserted before the call of ``pretrain``.
    """
    number = line_number(source, name)
    if number is not None:
        if _without_end(_lines(source)[1][number - 1]) == LINE.encode():
            return source
        source = remove(source, name)
    mark, lines = _lines(source)
    place = _place(_parse(source, name))
    neighbour = lines[place - 1 if place else 0]
    end = neighbour[len(_without_end(neighbour)) :]
    patched = mark + b"".join([*lines[:place], LINE.encode() + end, *lines[place:]])
    if not end or not _is_otherwise_unchanged(source, patched, name):
        raise UsageError(name, "has no place for a line before it trains", "start it with a line")
    return patched


def remove(source: bytes, name: str) -> bytes:
    """Return the script without the activating line.

    Raises:
        UsageError: the line was changed by hand.
    """
    number = line_number(source, name)
    if number is None:
        return source
    mark, lines = _lines(source)
    return mark + b"".join(lines[: number - 1] + lines[number:])


def diff(source: bytes, name: str) -> str:
    """Return the change of `insert` as a patch for ``git apply --unidiff-zero``.

    Args:
        source: of the script, without the line.
        name: path of the script, from the top of the clone.
    """
    number = line_number(insert(source, name), name)
    assert number is not None
    return (
        f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n"
        f"@@ -{number - 1},0 +{number} @@\n+{LINE}\n"
    )


def _place(tree: ast.Module) -> int:
    """Return the number of lines before the activating one: docstring and future imports."""
    head = [*takewhile(_comes_first, tree.body)]
    place = head[-1].end_lineno or 0 if head else _first_line(tree.body[0]) - 1
    for statement in tree.body:
        if statement.lineno <= place < (statement.end_lineno or 0):
            place = statement.end_lineno or 0
    return place


def _comes_first(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _first_line(statement: ast.stmt) -> int:
    """Return the first line of a statement, including its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


def _names_module(statement: ast.stmt) -> bool:
    """Return whether it imports the module of the activating line."""
    return any(
        node.module == MODULE if isinstance(node, ast.ImportFrom)
        else isinstance(node, ast.Constant) and node.value == MODULE
        for node in ast.walk(statement)
    )  # fmt: skip


def _is_otherwise_unchanged(source: bytes, patched: bytes, name: str) -> bool:
    """Return whether only the line was added, and before any call of `pretrain`."""
    try:
        before, after = _parse(source, name), _parse(patched, name)
        number = line_number(patched, name)
    except UsageError:
        return False
    rest = [node for node in after.body if node.lineno != number]
    is_first = all(call.lineno > (number or 0) for call in _calls(after))
    return is_first and ast.dump(ast.Module(rest, [])) == ast.dump(ast.Module(before.body, []))


def _calls(tree: ast.Module) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", "")) == "pretrain"]


def _parse(source: bytes, name: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        rule = f"is not valid Python ({error})"
        raise UsageError(name, rule, "give an unmodified clone") from None


def _lines(source: bytes) -> tuple[bytes, list[bytes]]:
    """Return the byte order mark, if there is one, and the lines with their ends."""
    mark = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    return mark, source[len(mark) :].splitlines(keepends=True)


def _without_end(line: bytes) -> bytes:
    return line.rstrip(b"\r\n")
