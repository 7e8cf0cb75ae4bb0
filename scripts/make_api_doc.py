"""Writes docs/api.md, the reference of the public interface, from the docstrings.

    python scripts/make_api_doc.py           writes the file
    python scripts/make_api_doc.py --check   exits 1 where the file is not current

The source is read, not imported: neither torch nor Megatron is needed. Run it after a change of a
signature or docstring below; a test calls it with --check.
"""

# By `ast` alone: a parser of docstrings (griffe) would save some twenty lines here and be one more
# requirement of every test run.
from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from generated_page import REPOSITORY, write_or_check
from script_errors import exit_code_of

# What is public, in the page's order: a file, or a folder with all of its files, and the names to
# show; none shows all that do not begin with an underscore.
PUBLIC: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megatron_edit/activation.py", ("activate",)),
    ("megatron_edit/config.py", ("EditConfig",)),
    ("megatron_edit/errors.py", ()),
    ("megatron_edit/engine/engine.py", ("EditEngine",)),
    ("megatron_edit/engine/host.py", ()),
    ("megatron_edit/comm/collectives.py", ("Group",)),
    ("megatron_edit/method", ()),
)
TARGET = REPOSITORY / "docs" / "api.md"
HEAD = """\
# API reference

Made by `scripts/make_api_doc.py` from the docstrings: change those, not this file.

What users call is one line in a training script (`activate`). Everything else is set by flags: the
fields of `EditConfig`, with defaults and meanings in [flags.md](flags.md). The rest is for those
who change the method, bring another training framework (`Host`) or read the code: the engine's
face, its groups, and the mathematics. Names that are not on this page may change without notice.
Letters are those of [how-it-works.md](how-it-works.md).

| module | names |
|---|---|
"""
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
REMARK = re.compile(r"(Collective|Blocks|Mutates|Scratch): ")
ENTRY = re.compile(r"(\*{0,2}[\w.]+): (.*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function


@dataclass(frozen=True)
class Module:
    """A module with something to show."""

    name: str
    source: str
    doc: str
    definitions: list[Definition]


def page() -> str:
    """The whole text."""
    modules = list(_modules())
    table = "".join(
        f"| [{module.name}](#{_anchor(module.name)}) "
        f"| {', '.join(f'`{definition.name}`' for definition in module.definitions)} |\n"
        for module in modules
    )
    return HEAD + table + "\n" + "\n\n".join(b for m in modules for b in _module(m)) + "\n"


def _modules() -> Iterator[Module]:
    for place, names in PUBLIC:
        path = REPOSITORY / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
            shown = [d for d in _public(tree.body) if not names or d.name in names]
            missing = set(names) - {d.name for d in shown}
            assert not missing, f"{place} has no {', '.join(sorted(missing))}: see PUBLIC"
            if shown:
                name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
                yield Module(name, source, ast.get_docstring(tree) or "", shown)


def _public(body: Iterable[ast.stmt]) -> Iterator[Definition]:
    return (s for s in body if isinstance(s, Definition) and not s.name.startswith("_"))


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _module(module: Module) -> Iterator[str]:
    yield f"## {module.name}"
    yield from _prose(module.doc)
    for definition in module.definitions:
        yield f"### `{definition.name}`"
        yield from _definition(definition, module.source)


def _definition(node: Definition, source: str, owner: str = "") -> Iterator[str]:
    """Signature and docstring of a function or class, then a class's public methods."""
    code = _class(node, source) if isinstance(node, ast.ClassDef) else _function(node, source)
    yield f"```python\n{code}\n```"
    yield from _prose(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        for method in _public(node.body):
            yield f"#### `{owner}{node.name}.{method.name}`"
            yield from _definition(method, source, f"{owner}{node.name}.")


# ---- signatures


def _function(node: Function, source: str) -> str:
    """Decorators and signature as they are written, without the colon."""
    first = min(n.lineno for n in (node, *node.decorator_list))
    lines = source.splitlines()[first - 1 : node.body[0].lineno - 1]
    return textwrap.dedent("\n".join(lines)).rstrip(" :\n")


def _class(node: ast.ClassDef, source: str) -> str:
    """Decorators, bases, what its constructor takes, class attributes."""
    decorators = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    body = [line for statement in node.body if (line := _member(statement, source))]
    head = f"{decorators}class {node.name}{bases}"
    return head + ":\n" + "\n".join(f"    {line}" for line in body) if body else head


def _member(node: ast.stmt, source: str) -> str:
    """A public field as it is written; a default that is made by a call only says that it is one.

    Fields that the constructor does not take are left out: the docstring lists them.
    """
    if isinstance(node, Function) and node.name == "__init__":
        return _function(node, source).replace("\n", "\n    ")
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        return "" if name.startswith("_") else f"{name} = {ast.unparse(node.value)}"
    if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target).startswith("_"):
        return ""
    line = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    if node.value is None:
        return line
    if not isinstance(node.value, ast.Call):
        return f"{line} = {ast.unparse(node.value)}"
    is_given = any(k.arg == "init" and ast.unparse(k.value) == "False" for k in node.value.keywords)
    return "" if is_given else f"{line} = ..."


# ---- docstrings


def _prose(doc: str) -> Iterator[str]:
    """Blocks of Markdown: paragraphs as they are, sections as lists."""
    for block in _blocks(doc):
        section = SECTION.fullmatch(block[0])
        if section:
            yield f"**{section[1]}**\n\n" + _section(block[1:])
        else:
            yield REMARK.sub(r"*\1*: ", "\n".join(block), count=1)


def _blocks(doc: str) -> Iterator[list[str]]:
    """Lines up to an empty one, or to one that begins a section or remark."""
    block: list[str] = []
    for line in [*doc.splitlines(), ""]:
        if block and (not line or SECTION.fullmatch(line) or REMARK.match(line)):
            yield block
            block = []
        if line:
            block.append(line)


def _section(lines: list[str]) -> str:
    """The body of a section: `name: text` becomes an entry, any other line goes on."""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    text = []
    for line in (line[indent:] for line in lines):
        entry = ENTRY.fullmatch(line)
        text.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"  {line.strip()}")
    return "\n".join(text) if text[0].startswith("- ") else "\n".join(x.strip() for x in text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script."""
    return write_or_check(argv, Path(__file__).stem, __doc__ or "", TARGET, page)


if __name__ == "__main__":
    sys.exit(exit_code_of("make_api_doc", main))
