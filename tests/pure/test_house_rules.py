"""The house rules of docs/contributing.md, enforced on the source text. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_edit"
COLLECTIVES = ("comm/collectives.py", "comm/staging.py")  # and an adapter below it
STREAMS = "comm/streams.py"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80

# From the bottom to the top: what stands on a line may import what stands on lines above it in this
# list (so: below it in the house), and its own package.
LAYERS = (
    ("constants.py", "errors.py", "launched.py", "whole_files.py"),
    ("saved_state.py", "versions.py", "method"),
    ("flags.py",),
    ("comm", "checkpoint"),
    ("engine", "config.py"),  # neither knows the other: host/settings.py stands between
    ("command_line.py", "observe"),
    ("host",),
    ("launcher.py", "tools"),
    ("__main__.py", "activation.py"),
)
# Entry points of the engine: what other packages may name of it.
FACE = "megatron_edit.engine"
MAX_ANY_IN_HOST = 120
# All that the engine may load of the package, with what that loads in turn. `flags` is there to
# spell a flag's name in what comm/ complains of: the engine itself does without.
BELOW_ENGINE = {"constants", "errors", "flags", "saved_state", "method", "comm", "engine"}
# Of what the engine shows, host/ may reach one step further into these alone.
SHOWN = {"clock", "settings", "status"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# How a docstring begins that sends its reader elsewhere: "See `X`.", "As torch's.", "As X has it."
REFERENCE = re.compile(r"see\b|(as|like) \S+('s[.;,]| has it\b)", re.IGNORECASE)

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
            known = first.value if isinstance(first, ast.Constant) else None
            yield node, known if isinstance(known, str) else "(computed)"


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


def _floor_of(part: str) -> int:
    return next(i for i, parts in enumerate(LAYERS) if part in parts)


def wrong_directions(source: Source) -> list[str]:
    """Imports that go up, or to the side, in `LAYERS`; relative ones."""
    if source.name == "__init__.py":
        return []
    complaints, floor = [], _floor_of(source.part)
    for node, module in imports_of(source):
        if module.startswith("."):
            complaints.append(source.at(node, "relative import; name the package"))
        if not module.startswith("megatron_edit."):
            continue
        inner = module.removeprefix("megatron_edit.").partition(".")[0]
        part = inner if (PACKAGE / inner).is_dir() else f"{inner}.py"
        if inner != "__version__" and part != source.part and _floor_of(part) >= floor:
            complaints.append(source.at(node, f"{source.part} must not import {part}"))
    return complaints


def behind_the_face(source: Source) -> list[str]:
    """Imports of the engine's inside from outside of it."""
    if source.part == "engine":
        return []
    complaints = []
    for node, module in imports_of(source):
        if not module.startswith(FACE + "."):
            continue
        inner = PACKAGE / "engine" / module.split(".")[2]
        if inner.exists() or inner.with_suffix(".py").exists():
            complaints.append(source.at(node, f"imports {module}; use what {FACE} shows"))
    return complaints


def reached_through(source: Source) -> list[str]:
    """`engine.<name>.<name>` in host/: what the engine keeps inside."""
    if source.part != "host":
        return []
    complaints = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
            continue
        owner = node.value.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in ("engine", "_engine") and node.value.attr not in SHOWN:
            complaints.append(source.at(node, f"reaches into engine.{node.value.attr}"))
    return complaints


def foreign_formats(source: Source) -> list[str]:
    """The engine knows neither the disk format nor the command line."""
    if source.part != "engine":
        return []
    known = ("checkpoint", "config", "command_line", "flags", "host", "observe")
    return [
        source.at(node, f"the engine must not import {module}")
        for node, module in imports_of(source)
        if module.removeprefix("megatron_edit.").partition(".")[0] in known
    ]


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


def raw_streams(source: Source) -> list[str]:
    """`torch.cuda` in comm/ and engine/, apart from the file that is there for it."""
    if source.part not in ("comm", "engine") or source.name == STREAMS:
        return []
    named = [(n, m) for n, m in imports_of(source) if is_in(m, "torch.cuda")]
    reached = [
        (n, ast.unparse(n))
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.cuda"
    ]
    return [source.at(n, f"{m}: streams are the business of {STREAMS}") for n, m in named + reached]


RULES = [
    host_imports,
    wrong_directions,
    distributed_in_method,
    behind_the_face,
    reached_through,
    foreign_formats,
    raw_streams,
]


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: object) -> None:
    """Would catch: `import megatron` in the engine, torch.distributed in the mathematics."""
    assert callable(rule)
    assert [c for source in SOURCES for c in rule(source)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ndef f(d):\n    return torch.cuda.Stream(d)",
        "from torch import cuda",
        "from torch.cuda import Event",
        "import torch\ndef f(x: torch.cuda.Stream): ...",
    ],
)
def test_the_rule_for_streams_sees(code: str) -> None:
    """The rule itself: each of these is a breach in the engine, and none where streams are made."""
    assert raw_streams(source_of(code))
    assert not raw_streams(source_of(code, STREAMS))


def _edges(sources: list[Source]) -> dict[str, set[str]]:
    """Which file imports which, by module name; `__init__` files that define nothing left out."""
    defining = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign, ast.AnnAssign)
    modules = {}
    for source in sources:
        if source.name.endswith("__init__.py") and not any(
            isinstance(node, defining) for node in source.tree.body
        ):
            continue
        path = source.name.removesuffix(".py").removesuffix("/__init__")
        modules["megatron_edit." + path.replace("/", ".")] = source
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, source in modules.items():
        for _, module in imports_of(source):
            target = module if module in modules else module.rpartition(".")[0]
            if target in modules and target != name:
                edges[name].add(target)
    return edges


def _floors(edges: dict[str, set[str]]) -> dict[str, int]:
    """Files on the longest chain of imports from each file down.

    Raises:
        AssertionError: there is a cycle.
    """
    floors: dict[str, int] = {}

    def climb(name: str, above: tuple[str, ...]) -> int:
        assert name not in above, f"a cycle of imports: {' -> '.join((*above, name))}"
        if name not in floors:
            below = [climb(target, (*above, name)) for target in edges[name]]
            floors[name] = 1 + max(below, default=0)
        return floors[name]

    for name in edges:
        climb(name, ())
    return floors


def _folders(edges: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """Which folder of a package imports which; its own files count as folders of one file."""
    folders: dict[str, set[str]] = {}
    for name, targets in edges.items():
        if is_in(name, package):
            here = _folder_of(name, package)
            inside = {_folder_of(t, package) for t in targets if is_in(t, package)}
            folders.setdefault(here, set()).update(inside - {here})
    return folders


def _folder_of(module: str, package: str) -> str:
    return ".".join(module.split(".")[: package.count(".") + 2])


@pytest.mark.parametrize("package", ["engine", "host", "tools"])
def test_no_mutual_import(package: str) -> None:
    """Neither between files of the whole package, nor between folders. Imports inside functions
    count."""
    edges = _edges(SOURCES)
    _floors(edges)
    _floors(_folders(edges, f"megatron_edit.{package}"))


def test_the_rule_for_mutual_imports_sees() -> None:
    """The rule itself: files that do not import each other, in folders that do."""
    edges = {
        "megatron_edit.engine.sync.queue": {"megatron_edit.engine.rounds.plan"},
        "megatron_edit.engine.rounds.plan": set(),
        "megatron_edit.engine.rounds.meeting": {"megatron_edit.engine.sync.units"},
        "megatron_edit.engine.sync.units": set(),
    }
    _floors(edges)
    with pytest.raises(AssertionError, match="a cycle of imports"):
        _floors(_folders(edges, "megatron_edit.engine"))


def reached_from(start: str, edges: dict[str, set[str]]) -> set[str]:
    """The modules that a file or a package imports, and what these import, and so on."""
    reached: set[str] = set()
    ahead = [name for name in edges if is_in(name, start)]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += edges[name]
    return reached


def beyond_the_engine(sources: list[Source]) -> list[str]:
    """What the engine reaches through others: settings, the command line, the disk format."""
    reached = reached_from(FACE, _edges(sources))
    complaints = [
        f"the engine reaches {name}"
        for name in sorted(reached)
        if name.split(".")[1] not in BELOW_ENGINE
    ]
    for source in sources:
        if "megatron_edit." + source.name.removesuffix(".py").replace("/", ".") in reached:
            complaints += [
                source.at(node, "argparse, and the engine reaches it")
                for node, module in imports_of(source)
                if is_in(module, "argparse")
            ]
    return complaints


def test_the_engine_reaches_no_settings() -> None:
    """Would catch: a constant of `config` that comm/ imports, and with it argparse."""
    assert beyond_the_engine(SOURCES) == []


def test_the_rule_for_reach_sees() -> None:
    """The rule itself, on files that are not there: through two others, also inside a function."""
    chain = [
        source_of("from megatron_edit.comm.near import x\ny = x", "engine/made_up.py"),
        source_of("def x():\n    from megatron_edit.comm import far", "comm/near.py"),
        source_of("import argparse\nfrom megatron_edit.config import y\nx = y", "comm/far.py"),
        source_of("y = 1", "config.py"),
    ]
    assert len(beyond_the_engine(chain)) == 2
    assert beyond_the_engine(chain[:2]) == []


def test_importing_the_engine_loads_no_settings() -> None:
    """The same, as the interpreter sees it."""
    code = (
        "import sys, megatron_edit.engine;"
        "own = {m.split('.')[1] for m in sys.modules if m.startswith('megatron_edit.')};"
        f"assert own <= {BELOW_ENGINE!r}, own"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_engine_offers_what_is_used() -> None:
    """Would catch: a public method or property of the engine that neither the host nor a test of
    behaviour uses."""
    texts = [source.text for source in SOURCES if source.part == "host"]
    texts += [
        path.read_text(encoding="utf-8")
        for folder in ("distributed", "harness", "host")
        for path in sorted((ROOT / "tests" / folder).glob("*.py"))
    ]
    used = set(re.findall(r"(?<=engine\.|status\.)(\w+)", "\n".join(texts)))
    offered = {
        node.name
        for source in SOURCES
        if source.name in ("engine/engine.py", "engine/status.py")
        for node in ast.walk(source.tree)
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_")
    }
    inside = {"round", "activity"}  # of the status: the engine asks
    assert offered - used - inside == set()


def test_host_knows_its_types() -> None:
    """Would catch: `Any` again for what `host/seams/megatron.py` has a protocol for."""
    found = {
        source.name: number
        for source in SOURCES
        if source.part == "host"
        and (
            number := sum(
                isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(source.tree)
            )
        )
    }
    assert sum(found.values()) <= MAX_ANY_IN_HOST, found


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
            if isinstance(function, ast.Attribute) and function.attr == "get":
                return self.is_mapping(function.value)
            return ast.unparse(function) in ("Group.of", "stand_alone_group")
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

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if _is_group(node.annotation) and isinstance(node.target, ast.Name):
            self.names.add(node.target.id)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        target = node.target
        function = node.iter.func if isinstance(node.iter, ast.Call) else None
        if isinstance(function, ast.Attribute) and self.is_mapping(function.value):
            last = target.elts[-1] if isinstance(target, ast.Tuple) else target
            if function.attr in ("items", "values") and isinstance(last, ast.Name):
                self.names.add(last.id)
        self.generic_visit(node)


def _is_group(annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    return text in ("Group", "Group | None")


@functools.cache
def _declared() -> tuple[set[str], set[str]]:
    """Attributes declared as a group, and as a mapping to groups, in any class.

    A name that another class gives to what may be a raw process group is not trusted.
    """
    groups, mappings, doubtful = set(), set(), set()
    for source in SOURCES:
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


def foreign_collectives(source: Source) -> list[str]:
    """Collectives that do not go through a `Group`."""
    if source.name in COLLECTIVES:
        return []
    fields, mappings = _declared()
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
    assert [c for source in SOURCES for c in foreign_collectives(source)] == []


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
    assert foreign_collectives(source_of(code))


def test_the_rule_for_collectives_accepts_our_groups() -> None:
    """Calls through `Group` are what the rule is there to allow."""
    code = (
        "def f(groups, t, one: Group):\n    one.broadcast(t)\n    groups.sync.all_reduce(t)\n"
        "    other = groups.stage\n    other.all_gather(t)\n"
        "    for _, tie in groups.ties.items():\n        tie.broadcast(t)\n"
    )
    assert foreign_collectives(source_of(code)) == []


# ---- what is written once

FLAG_BEGINNINGS = {"--use-edit", "--edit-", "--use_edit", "--edit_"}


def values_of(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, object]]:
    """Names that a file gives a number, a text or a list of these, at its top."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs.append((target, node.value))
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts, strict=True)
        for target, value in pairs:
            if isinstance(target, ast.Name):
                try:
                    yield node, target.id, ast.literal_eval(value)
                except ValueError:
                    continue  # computed, or other names


def _are_similar(one: str, other: str, value: object) -> bool:
    """Whether two names may well stand for one thing: numbers are alike by chance more often."""
    if isinstance(value, int | float):
        return one.strip("_") == other.strip("_")
    words = [set(name.strip("_").split("_")) for name in (one, other)]
    return words[0] <= words[1] or words[1] <= words[0]


def constants_again(sources: list[Source]) -> list[str]:
    """Constants of one value and of one name, or nearly, in two files."""
    found = [(source, *entry) for source in sources for entry in values_of(source.tree)]
    return [
        later.at(node, f"{name} is {other} of {earlier.name}")
        for (earlier, _, other, value), (later, node, name, same) in itertools.combinations(
            found, 2
        )
        if later is not earlier
        and type(same) is type(value)
        and same == value
        and _are_similar(other, name, value)
    ]


def lists_again(sources: list[Source]) -> list[str]:
    """The same texts, two or more, listed in two files."""
    complaints, seen = [], dict[frozenset[str], Source]()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                texts = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                words = frozenset(text for text in texts if isinstance(text, str))
                if len(words) < 2 or len(words) < len(node.elts):
                    continue
                if (first := seen.setdefault(words, source)) is not source:
                    complaints.append(source.at(node, f"{sorted(words)}, as in {first.name}"))
    return complaints


def beginnings_again(sources: list[Source]) -> list[str]:
    """How flags of ours begin, outside of the file that says so."""
    return [
        source.at(node, f"{node.value!r}; flags.py has it")
        for source in sources
        if source.name != "flags.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value in FLAG_BEGINNINGS
    ]


@pytest.mark.parametrize("rule", [constants_again, lists_again, beginnings_again])
def test_what_is_decided_is_written_once(rule: object) -> None:
    """Would catch: a wait, a list of choices or a flag's beginning that two files write down."""
    assert callable(rule)
    assert rule(SOURCES) == []


@pytest.mark.parametrize(
    ("rule", "one", "other"),
    [
        (constants_again, "GRACE_SECONDS = 5.0", "_GRACE_SECONDS: float = 5.0"),
        (constants_again, "A, FINAL = 1, 'final'", "FINAL = 'final'"),
        (constants_again, "OPTIMIZERS = ('adam',)", "SUPPORTED_OPTIMIZERS = ('adam',)"),
        (lists_again, "X = ('a', 'b')", "def f(x):\n    return x in {'b', 'a'}"),
        (beginnings_again, "", "def f(x):\n    return f'--edit-{x}'"),
    ],
)
def test_the_rules_for_once_see(rule: object, one: str, other: str) -> None:
    """The rules themselves, on files that are not there."""
    assert callable(rule)
    first, second = source_of(one, "comm/one.py"), source_of(other, "tools/other.py")
    assert rule([first, second]) and not rule([first])


def fields_of(tree: ast.Module) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Fields of all classes of a file: class, statement, name."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield owner.name, node, node.target.id


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The parameters of a function that have a default."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    yield from (arg.arg for arg in places[len(places) - len(given.defaults) :])
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    yield from (arg.arg for arg, default in pairs if default is not None)


def defaults_of_settings(sources: list[Source]) -> list[str]:
    """A default, below or beside `config.py`, of what has one there already."""
    config = next(source for source in sources if source.name == "config.py")
    settings = {name for owner, _, name in fields_of(config.tree) if owner == "EditConfig"}
    complaints = []
    for source in sources:
        if source.part not in ("method", "comm", "engine", "checkpoint"):
            continue
        for owner, node, name in fields_of(source.tree):
            if node.value is not None and name in settings:
                complaints.append(source.at(node, f"{owner}.{name} has a default"))
        for function in ast.walk(source.tree):
            if isinstance(function, FUNCTIONS):
                again = settings & set(parameters_of(function))
                complaints += [
                    source.at(function, f"{function.name}({name}=...)") for name in again
                ]
    return complaints


def defaults_of_what_is_made(sources: list[Source]) -> list[str]:
    """Defaults, under whatever name, in the classes that host/settings.py makes of the settings."""
    maker = next(source for source in sources if source.name == "host/settings.py")
    made = {_called(node) for node in ast.walk(maker.tree) if isinstance(node, ast.Call)}
    return [
        source.at(node, f"{owner}.{name} has a default; settings give it a value")
        for source in sources
        for owner, node, name in fields_of(source.tree)
        if owner in made and node.value is not None
    ]


@pytest.mark.parametrize("rule", [defaults_of_settings, defaults_of_what_is_made])
def test_a_default_of_a_setting_is_there_once(rule: object) -> None:
    """Would catch: `EngineSettings.prefetch_units = 2`, when the default of the flag changes."""
    assert callable(rule)
    assert rule(SOURCES) == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (defaults_of_settings, "class Made:\n    clip: float = 10.0"),
        (defaults_of_settings, "def f(a, *, clip=10.0): ..."),
        (defaults_of_settings, "def f(a, clip=10.0): ..."),
        (defaults_of_what_is_made, "class Made:\n    max_norm: float = 10.0"),
    ],
)
def test_the_rules_for_defaults_see(rule: object, code: str) -> None:
    """The rules themselves, on files that are not there."""
    assert callable(rule)
    config = source_of("class EditConfig:\n    clip: float = _setting(10.0, '')", "config.py")
    settings = source_of("def made_of(config):\n    return Made(config.clip)", "host/settings.py")
    assert rule([config, settings, source_of(code)])
    assert not rule([config, settings])


# ---- shape and habits


def repeated_classes(sources: list[Source]) -> list[str]:
    """Public classes of one name, nested ones too: whoever reads it cannot know which it is."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.at(node, node.name))
    return [place for same in places.values() if len(same) > 1 for place in same]


def test_class_names_are_told_apart() -> None:
    """Every public class name is there once in the package."""
    assert repeated_classes(SOURCES) == []


def test_the_rule_for_class_names_sees() -> None:
    """Twice at the top, or in a class; a private one is its file's own."""
    twice = [source_of("class Run: ...", name) for name in ("engine/one.py", "host/two.py")]
    assert repeated_classes(twice) == ["engine/one.py:1: Run", "host/two.py:1: Run"]
    nested = [source_of("class Outer:\n    class Run: ..."), twice[0]]
    assert len(repeated_classes(nested)) == 2
    assert repeated_classes([source_of("class _Run: ...")] * 2 + twice[:1]) == []


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
                found.append(source.at(node, "print; use observe.console"))
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


def references(source: Source) -> list[str]:
    """Docstrings that send their reader elsewhere instead of saying what the thing does."""
    return [
        source.at(node, getattr(node, "name", "module"))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS)
        and REFERENCE.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_are_no_references() -> None:
    """Would catch: an implementation of a protocol that says "See `Protocol`." and no more."""
    assert [place for source in SOURCES for place in references(source)] == []


@pytest.mark.parametrize(
    ("docstring", "is_reference"),
    [
        ("See `Streams`.", True),
        ("See above.", True),
        ("See `Losses`. A mean holds all of them.", True),
        ("As torch's.", True),
        ("As torch's; the host waits.", True),
        ("As `wire.Exchange` has it.", True),
        ("The current stream. See `Streams`.", False),
        ("As JSON.", False),
        ("Like `clip_factors`: norms of the averages.", False),
        ("Seeds of all ranks.", False),
    ],
)
def test_the_rule_for_references_sees(docstring: str, is_reference: bool) -> None:
    """The rule itself, on classes and on functions that nobody else calls."""
    for code in (f'class A:\n    """{docstring}"""', f'def _f():\n    """{docstring}"""'):
        assert bool(references(source_of(code))) == is_reference
