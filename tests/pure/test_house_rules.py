"""The house rules of docs/contributing.md, enforced on the source text. Nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_edit"
COLLECTIVES = "comm/collectives.py"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80

# Package -> what it may import of this project, from the bottom to the top. What is not listed (the
# launcher and what it starts) sees everything.
MAY_IMPORT = {
    "errors.py": (),
    "whole_files.py": (),
    "versions.py": ("errors",),
    "method": ("method",),
    "flags.py": ("errors", "method"),
    "config_checks.py": ("errors", "flags", "method", "config"),  # `config` for its type alone
    "config.py": ("errors", "flags", "config_checks", "method"),
    "comm": ("errors", "flags", "config", "method", "comm"),
    "engine": ("errors", "config", "checkpoint", "method", "comm", "engine"),
    "checkpoint": ("errors", "method", "engine", "checkpoint"),
    "observe": ("errors", "config", "method", "comm", "engine", "observe", "whole_files"),
    "tools": (
        "errors", "config", "config_checks", "flags", "command_line", "versions", "whole_files",
        "method", "comm", "engine", "checkpoint", "host", "observe", "tools", "__main__",
    ),
}  # fmt: skip
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

# `Group`'s own methods; `broadcast` is a raw process group's, too, so the receiver decides.
OURS = {"all_reduce", "broadcast", "all_gather", "all_gather_objects"}
# Collectives of torch.distributed and of raw process groups: never outside of COLLECTIVES.
RAW = {
    "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "batch_isend_irecv", "broadcast_object_list", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "scatter_object_list", "send", "_allgather_base",
    "_reduce_scatter_base",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    name: str  # from the package's folder
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The sub-package, or the file at the top."""
        return self.name.partition("/")[0]

    def at(self, node: ast.AST, what: str) -> str:
        """A complaint with its place."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(PACKAGE).as_posix(), text, ast.parse(text))


SOURCES = [_read(path) for path in sorted(PACKAGE.rglob("*.py"))]


def source_of(code: str, name: str = "engine/made_up.py") -> Source:
    """A file that is not there, to test the rules themselves."""
    return Source(name, code, ast.parse(code))


def imports_of(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a file imports anywhere, also lazily or by `import_module`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:  # `from torch import distributed` imports a module, too
                yield node, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            is_known = isinstance(first, ast.Constant) and isinstance(first.value, str)
            yield node, first.value if is_known else "(computed)"


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_in(module: str, package: str) -> bool:
    """Whether `module` is `package` or lies in it."""
    return module == package or module.startswith(package + ".")


# ---- who may import what


def host_imports(source: Source) -> list[str]:
    """Imports of Megatron outside of host/; a computed name could be one."""
    if source.part == "host":
        return []
    return [
        source.at(node, f"imports {module}; only megatron_edit/host may import Megatron")
        for node, module in imports_of(source)
        if is_in(module, "megatron") or module == "(computed)"
    ]


def wrong_directions(source: Source) -> list[str]:
    """Imports against the direction host -> engine -> comm -> method."""
    allowed = MAY_IMPORT.get(source.part)
    if allowed is None:
        return []
    complaints = []
    for node, module in imports_of(source):
        if module.startswith("."):
            complaints.append(source.at(node, "relative import; name the package"))
        inner = module.removeprefix("megatron_edit.").partition(".")[0]
        if module.startswith("megatron_edit.") and inner not in (*allowed, "__version__"):
            complaints.append(source.at(node, f"{source.part} must not import {inner}"))
    return complaints


def distributed_in_method(source: Source) -> list[str]:
    """Distributed code in method/, whether imported or reached through `torch`."""
    if source.part != "method":
        return []
    named = [(n, m) for n, m in imports_of(source) if "distributed" in m]
    reached = [
        (n, n.attr)
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Attribute) and n.attr == "distributed"
    ]
    return [source.at(n, f"{m}: method/ knows no distributed code") for n, m in named + reached]


@pytest.mark.parametrize("rule", [host_imports, wrong_directions, distributed_in_method])
def test_imports(rule: object) -> None:
    """Would catch: `import megatron` in the engine, torch.distributed in the mathematics."""
    assert callable(rule)
    assert [c for source in SOURCES for c in rule(source)] == []


def test_importing_the_package_changes_nothing() -> None:
    """Neither torch nor Megatron is imported, nor does the environment or the path change."""
    code = (
        "import os, sys; before = dict(os.environ), list(sys.path);"
        "import megatron_edit, megatron_edit.config, megatron_edit.errors;"
        "assert (dict(os.environ), list(sys.path)) == before;"
        "heavy = {'torch', 'megatron', 'numpy', 'logging'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_the_command_line_starts_without_torch() -> None:
    """Would catch: a subcommand whose imports all the others wait for, before they say a word."""
    code = (
        "import sys, megatron_edit.tools.cli;"
        "heavy = {'torch', 'megatron', 'matplotlib', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


# ---- collectives in one module


class _Groups(ast.NodeVisitor):
    """Names in one function that certainly hold a `Group` of ours.

    These are: parameters annotated `Group`; what `Group.of` or `stand_alone_group` returns;
    attributes declared `name: Group` in some class of the package; members of a mapping declared
    `name: Mapping[str, Group]`; and names assigned from any of these.
    """

    def __init__(self, fields: set[str], mappings: set[str]) -> None:
        self.fields, self.mappings = fields, mappings
        self.names: set[str] = set()

    def holds_group(self, node: ast.expr) -> bool:
        """Whether an expression is a `Group`."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            return node.attr in self.fields
        if isinstance(node, ast.Subscript):
            return self.is_mapping(node.value)
        if isinstance(node, ast.Call):
            function = node.func
            is_lookup = isinstance(function, ast.Attribute) and function.attr == "get"
            is_made = ast.unparse(function) in ("Group.of", "stand_alone_group")
            return is_made or (is_lookup and self.is_mapping(function.value))
        return False

    def is_mapping(self, node: ast.expr) -> bool:
        """Whether an expression maps to groups."""
        return isinstance(node, ast.Attribute) and node.attr in self.mappings

    def visit_arg(self, node: ast.arg) -> None:
        if _is_group(node.annotation):
            self.names.add(node.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.holds_group(node.value):
            self.names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        call, target = node.iter, node.target
        is_items = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if is_items and self.is_mapping(call.func.value):
            last = target.elts[-1] if isinstance(target, ast.Tuple) else target
            if call.func.attr in ("items", "values") and isinstance(last, ast.Name):
                self.names.add(last.id)
        self.generic_visit(node)


def _is_group(annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    return text in ("Group", "Group | None")


def _declared(sources: list[Source]) -> tuple[set[str], set[str]]:
    """Attributes declared as a group, and as a mapping to groups, in any class.

    A name that another class gives to what may be a raw process group is not trusted.
    """
    groups, mappings, doubtful = set(), set(), set()
    for source in sources:
        for owner in (n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)):
            for field in owner.body:
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                annotation, name = ast.unparse(field.annotation), field.target.id
                if _is_group(field.annotation):
                    groups.add(name)
                elif annotation == "Mapping[str, Group]":
                    mappings.add(name)
                elif any(word in annotation for word in ("Any", "object", "ProcessGroup")):
                    doubtful.add(name)
    return groups - doubtful, mappings - doubtful


def foreign_collectives(source: Source, known: list[Source]) -> list[str]:
    """Collectives that do not go through a `Group`."""
    if source.name == COLLECTIVES:
        return []
    fields, mappings = _declared(known)
    functions = [n for n in ast.walk(source.tree) if isinstance(n, FUNCTIONS)]
    inside: dict[ast.AST, ast.AST] = {}
    for function in functions:  # outer before inner: the innermost wins
        inside.update({node: function for node in ast.walk(function)})
    complaints = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and is_in(node.module or "", "torch.distributed"):
            taken = {alias.name for alias in node.names} & (RAW | OURS)
            complaints += [source.at(node, f"imports the collective {name}") for name in taken]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in RAW:
            complaints.append(source.at(node, f"calls {ast.unparse(node.func)}"))
        elif node.func.attr in OURS:
            groups = _Groups(fields, mappings)
            groups.visit(inside.get(node, source.tree))
            if not groups.holds_group(node.func.value):
                complaints.append(source.at(node, f"{ast.unparse(node.func)} of no known Group"))
    return complaints


def test_collectives_are_issued_in_one_module() -> None:
    """Would catch: `dist.all_reduce(...)` or a raw process group's method anywhere else."""
    assert [c for source in SOURCES for c in foreign_collectives(source, SOURCES)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndef f(t):\n    dist.all_reduce(t)",
        "import torch\ndef f(t):\n    torch.distributed.broadcast(t, 0)",
        "from torch.distributed import all_gather",
        "def f(group, t):\n    group.allreduce([t], None)",
        "def f(group: ProcessGroup, t):\n    group.broadcast([t])",
        "def f(groups, t):\n    groups.sync.process_group.broadcast([t])",
        "import torch.distributed as dist\ndef f():\n    dist.barrier()",
    ],
)
def test_the_rule_for_collectives_sees(code: str) -> None:
    """The rule itself: each of these is a breach."""
    assert foreign_collectives(source_of(code), SOURCES)


def test_the_rule_for_collectives_accepts_our_groups() -> None:
    """Calls through `Group` are what the rule is there to allow."""
    code = (
        "def f(groups, t, one: Group):\n    one.broadcast(t)\n    groups.sync.all_reduce(t)\n"
        "    other = groups.stage\n    other.all_gather(t)\n"
        "    for _, tie in groups.ties.items():\n        tie.broadcast(t)\n"
    )
    assert foreign_collectives(source_of(code), SOURCES) == []


# ---- shape and habits


def test_size() -> None:
    """Files and functions that fit in a head."""
    long = [
        f"{source.name}: {count} lines, at most {MAX_FILE_LINES}"
        for source in SOURCES
        if (count := len(source.text.splitlines())) > MAX_FILE_LINES
    ]
    for source in SOURCES:
        for node in (n for n in ast.walk(source.tree) if isinstance(n, FUNCTIONS)):
            count = (node.end_lineno or 0) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                long.append(source.at(node, f"{node.name} has {count} lines"))
    assert long == []


def test_habits() -> None:
    """No `global`, no bare `except`, no `print`."""
    found = []
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                found.append(source.at(node, "global statement"))
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(source.at(node, "bare except"))
            elif isinstance(node, ast.Name) and node.id == "print":
                found.append(source.at(node, "print; use report.console"))
    assert found == []


def _public(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public classes, functions and methods; what lies in a function is nobody's interface."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | FUNCTIONS) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def test_docstrings() -> None:
    """Every public module, class, function and method says what it is."""
    missing = [s.at(s.tree, "module") for s in SOURCES if not ast.get_docstring(s.tree)]
    for source in SOURCES:
        missing += [source.at(n, n.name) for n in _public(source.tree) if not ast.get_docstring(n)]
    assert missing == []
