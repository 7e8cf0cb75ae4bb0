"""The house rules of docs/dev/contributing.md that no linter knows, and the contracts of imports.

Which module may import which is in pyproject.toml (import-linter); docstrings, lengths, prints and
globals are checked by ruff.
"""

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
COLLECTIVES = ("comm/collectives.py", "comm/staging.py")  # and an adapter below it
# Collectives of torch.distributed and of raw process groups, used only in COLLECTIVES.
RAW_COLLECTIVES = {
    "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "batch_isend_irecv", "broadcast_object_list", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "scatter_object_list", "send", "_allgather_base",
    "_reduce_scatter_base",
}  # fmt: skip
# Names that `Group` has, too. A raw process group takes a list of tensors.
SHARED_NAMES = {"all_gather", "all_gather_json", "all_reduce", "broadcast"}
MODULES = ("dist", "torch.distributed")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the package: its name from the package's folder, and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The sub-package, or the file at the top level."""
        return self.name.partition("/")[0]

    def at(self, node: ast.AST, what: str) -> str:
        """A complaint with file and line."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


def source_of(code: str, name: str = "engine/made_up.py") -> Source:
    """A made-up file, to test the rules themselves."""
    return Source(name, ast.parse(code))


SOURCES = [
    source_of(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())
    for path in sorted(PACKAGE.rglob("*.py"))
]


def test_imports_keep_the_contracts() -> None:
    """Would catch: an import of a higher layer, of Megatron outside of host/ and bridge/, of the
    engine's internals, or a cycle."""
    code = "from importlinter.cli import lint_imports; exit(lint_imports(no_cache=True))"
    argv = [sys.executable, "-c", code]
    checked = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout


IMPORTS = {
    "changes nothing": ("megatron_edit, megatron_edit.config, megatron_edit.errors",
                        {"torch", "megatron", "numpy", "logging"}),
    "of the hub": ("megatron_edit.elastic.server", {"torch", "megatron"}),
    "of the commands": ("megatron_edit.tools.cli", {"torch", "megatron", "matplotlib", "rich"}),
    "of the engine": ("megatron_edit.engine",
                      {"megatron", "megatron_edit.config", "megatron_edit.checkpoint"}),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS)
def test_imports_are_light(case: str) -> None:
    """Would catch slow imports of one subcommand that delay all others, a hub that needs torch, an
    engine that loads the command line; and an import that changes environment or path."""
    modules, heavy = IMPORTS[case]
    code = (
        f"import os, sys; before = dict(os.environ), list(sys.path); import {modules};"
        f"assert {case == 'of the engine'} or (dict(os.environ), list(sys.path)) == before;"
        f"found = {heavy!r} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def raw_collectives(source: Source) -> list[str]:
    """Collectives that are not those of a `Group`, and process groups taken out of one."""
    if source.name in COLLECTIVES or source.part == "elastic":  # which sends over its own sockets
        return []
    complaints = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            names = {alias.name for alias in node.names} & (RAW_COLLECTIVES | SHARED_NAMES)
            complaints += [source.at(node, f"imports {name}") for name in names]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        takes_list = bool(node.args) and isinstance(node.args[0], ast.List)
        is_raw = owner in MODULES or owner.endswith("process_group") or takes_list
        if name in RAW_COLLECTIVES or (name in SHARED_NAMES and is_raw):
            complaints.append(source.at(node, f"calls {ast.unparse(node.func)}"))
    return complaints


def test_collectives_are_issued_in_one_module() -> None:
    """Would catch `dist.all_reduce(...)` or a method of a raw process group anywhere else."""
    assert [complaint for source in SOURCES for complaint in raw_collectives(source)] == []


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
def test_collectives_rule_finds_violations(code: str) -> None:
    """Each of these is a violation; a method of a `Group` is none."""
    assert raw_collectives(source_of(code))
    assert not raw_collectives(source_of("def f(groups, t):\n    groups.sync.all_reduce(t)"))


def fields_of(tree: ast.Module) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Fields of all classes of a file: class, statement, name."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield owner.name, node, node.target.id


def parameters_of(function: FUNCTIONS) -> Iterator[str]:
    """The parameters of a function that have a default."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    yield from (arg.arg for arg in places[len(places) - len(given.defaults) :])
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    yield from (arg.arg for arg, default in pairs if default is not None)


def defaults_of_settings(sources: list[Source]) -> list[str]:
    """Defaults of settings in layers that receive them as values."""
    fields = next(source for source in sources if source.name == "method/settings.py")
    settings = {name for owner, _, name in fields_of(fields.tree) if owner == "Settings"}
    assert settings
    settings -= {"settings"}  # elsewhere a name for all of them
    complaints = []
    for source in sources:
        if source.part not in ("method", "comm", "engine", "checkpoint") or source is fields:
            continue
        for owner, node, name in fields_of(source.tree):
            if node.value is not None and name in settings:
                complaints.append(source.at(node, f"{owner}.{name} has a default"))
        for function in (n for n in ast.walk(source.tree) if isinstance(n, FUNCTIONS)):
            again = settings & set(parameters_of(function))
            complaints += [source.at(function, f"{function.name}({name}=...)") for name in again]
    return complaints


def test_setting_defaults_are_defined_once() -> None:
    """Would catch `EngineSettings.prefetch_units = 2`, which may differ from the flag's default."""
    assert defaults_of_settings(SOURCES) == []


@pytest.mark.parametrize(
    "code",
    [
        "class Made:\n    clip: float = 10.0",
        "def f(a, *, clip=10.0): ...",
        "def f(a, clip=10.0): ...",
    ],
)
def test_default_rule_finds_violations(code: str) -> None:
    """Each made-up pair of files is a violation."""
    settings = source_of("class Settings:\n    clip: float = 10.0", "method/settings.py")
    assert defaults_of_settings([settings, source_of(code)])
    assert not defaults_of_settings([settings])
