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

# From bottom to top: a line may import what is listed on earlier lines, and its own package.
LAYERS = (
    ("constants.py", "errors.py", "launched.py", "atomic_files.py"),
    ("saved_state.py", "versions.py", "method"),
    ("flags.py",),
    ("comm", "checkpoint", "elastic", "config_fields.py"),
    ("engine", "config.py"),  # independent of each other; host/settings.py connects them
    ("command_line.py", "observe"),
    ("host",),
    ("launcher.py", "tools"),
    ("bridge",),  # to Megatron-Bridge what `host` and the launcher are to Megatron-LM
    ("__main__.py", "activation.py"),
)
# The public interface of the engine: other packages import nothing else of it.
ENGINE = "megatron_edit.engine"
MAX_ANY_IN_HOST = 120
# All modules of the package that the engine may import, directly or indirectly. `flags` is needed
# for flag names in error messages of comm/; the engine itself does not use it.
BELOW_ENGINE = {
    "constants", "errors", "flags", "saved_state", "method", "comm", "elastic", "engine"
}  # fmt: skip
# Attributes of the engine whose own attributes host/ may use.
EXPOSED = {"clock", "elastic", "settings", "status"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Beginnings of docstrings that only refer elsewhere: "See `X`.", "As torch's.", "As X has it."
REFERENCE = re.compile(r"see\b|(as|like) \S+('s[.;,]| has it\b)", re.IGNORECASE)

# Methods of `Group`. Raw process groups have `broadcast`, too, so the receiver decides.
GROUP_METHODS = {"all_reduce", "broadcast", "all_gather", "all_gather_json"}
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


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    name: str  # from the package's folder
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The sub-package, or the file at the top level."""
        return self.name.partition("/")[0]

    def at(self, node: ast.AST, what: str) -> str:
        """Return a complaint with file and line."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(PACKAGE).as_posix(), text, ast.parse(text))


SOURCES = [_read(path) for path in sorted(PACKAGE.rglob("*.py"))]


def source_of(code: str, name: str = "engine/made_up.py") -> Source:
    """Return a made-up file, to test the rules themselves."""
    return Source(name, code, ast.parse(code))


def imports_of(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module that a file imports, also inside functions or by `import_module`."""
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
    """Return whether `module` is `package` or lies in it."""
    return module == package or module.startswith(package + ".")


# ---- imports


def megatron_imports(source: Source) -> list[str]:
    """Return imports of Megatron outside of host/ and bridge/; computed names count, too."""
    if source.part in ("host", "bridge"):
        return []
    return [
        source.at(node, f"imports {module}; only host/ and bridge/ may import Megatron")
        for node, module in imports_of(source)
        if is_in(module, "megatron") or module == "(computed)"
    ]


def _layer_of(part: str) -> int:
    return next(i for i, parts in enumerate(LAYERS) if part in parts)


def upward_imports(source: Source) -> list[str]:
    """Return imports of the same or a higher layer of `LAYERS`, and relative imports."""
    if source.name == "__init__.py":
        return []
    complaints, layer = [], _layer_of(source.part)
    for node, module in imports_of(source):
        if module.startswith("."):
            complaints.append(source.at(node, "relative import; name the package"))
        if not module.startswith("megatron_edit."):
            continue
        inner = module.removeprefix("megatron_edit.").partition(".")[0]
        part = inner if (PACKAGE / inner).is_dir() else f"{inner}.py"
        if inner != "__version__" and part != source.part and _layer_of(part) >= layer:
            complaints.append(source.at(node, f"{source.part} must not import {part}"))
    return complaints


def internal_engine_imports(source: Source) -> list[str]:
    """Return imports of internal modules of the engine by other packages."""
    if source.part == "engine":
        return []
    complaints = []
    for node, module in imports_of(source):
        if not module.startswith(ENGINE + "."):
            continue
        inner = PACKAGE / "engine" / module.split(".")[2]
        if inner.exists() or inner.with_suffix(".py").exists():
            complaints.append(source.at(node, f"imports {module}; use what {ENGINE} exports"))
    return complaints


def internal_engine_attributes(source: Source) -> list[str]:
    """Return uses of `engine.<name>.<name>` in host/ and bridge/: internals of the engine."""
    if source.part not in ("host", "bridge"):
        return []
    complaints = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
            continue
        owner = node.value.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in ("engine", "_engine") and node.value.attr not in EXPOSED:
            complaints.append(source.at(node, f"reaches into engine.{node.value.attr}"))
    return complaints


def forbidden_engine_imports(source: Source) -> list[str]:
    """Return imports of the disk format or the command line by the engine."""
    if source.part != "engine":
        return []
    known = ("checkpoint", "config", "command_line", "flags", "host", "observe")
    return [
        source.at(node, f"the engine must not import {module}")
        for node, module in imports_of(source)
        if module.removeprefix("megatron_edit.").partition(".")[0] in known
    ]


def distributed_in_method(source: Source) -> list[str]:
    """Return uses of distributed code in method/, imported or reached through `torch`."""
    if source.part != "method":
        return []
    named = [(n, m) for n, m in imports_of(source) if "distributed" in m]
    reached = [
        (n, n.attr)
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Attribute) and n.attr == "distributed"
    ]
    return [source.at(n, f"{m}: method/ must not use distributed code") for n, m in named + reached]


def raw_streams(source: Source) -> list[str]:
    """Return uses of `torch.cuda` in comm/ and engine/ outside of `STREAMS`."""
    if source.part not in ("comm", "engine") or source.name == STREAMS:
        return []
    named = [(n, m) for n, m in imports_of(source) if is_in(m, "torch.cuda")]
    reached = [
        (n, ast.unparse(n))
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.cuda"
    ]
    return [source.at(n, f"{m}: use {STREAMS} for streams") for n, m in named + reached]


RULES = [
    megatron_imports,
    upward_imports,
    distributed_in_method,
    internal_engine_imports,
    internal_engine_attributes,
    forbidden_engine_imports,
    raw_streams,
]


@pytest.mark.parametrize("rule", RULES)
def test_imports_follow_layer_rules(rule: object) -> None:
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
def test_stream_rule_finds_violations(code: str) -> None:
    """Each of these is a violation in the engine, but not in the file for streams."""
    assert raw_streams(source_of(code))
    assert not raw_streams(source_of(code, STREAMS))


def _edges(sources: list[Source]) -> dict[str, set[str]]:
    """Return the imports of each module, without `__init__` files that define nothing."""
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


def _chain_lengths(edges: dict[str, set[str]]) -> dict[str, int]:
    """Return the length of the longest chain of imports that starts at each file.

    Raises:
        AssertionError: there is a cycle.
    """
    lengths: dict[str, int] = {}

    def length_of(name: str, above: tuple[str, ...]) -> int:
        assert name not in above, f"a cycle of imports: {' -> '.join((*above, name))}"
        if name not in lengths:
            below = [length_of(target, (*above, name)) for target in edges[name]]
            lengths[name] = 1 + max(below, default=0)
        return lengths[name]

    for name in edges:
        length_of(name, ())
    return lengths


def _folders(edges: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """Return the imports between folders of a package; its own files count as folders."""
    folders: dict[str, set[str]] = {}
    for name, targets in edges.items():
        if is_in(name, package):
            here = _folder_of(name, package)
            inside = {_folder_of(t, package) for t in targets if is_in(t, package)}
            folders.setdefault(here, set()).update(inside - {here})
    return folders


def _folder_of(module: str, package: str) -> str:
    return ".".join(module.split(".")[: package.count(".") + 2])


@pytest.mark.parametrize("package", ["engine", "host", "tools", "bridge"])
def test_files_and_folders_have_no_import_cycles(package: str) -> None:
    """Imports inside functions count, too."""
    edges = _edges(SOURCES)
    _chain_lengths(edges)
    _chain_lengths(_folders(edges, f"megatron_edit.{package}"))


def test_cycle_rule_finds_violations() -> None:
    """Files without a cycle, in folders with a cycle."""
    edges = {
        "megatron_edit.engine.sync.queue": {"megatron_edit.engine.rounds.plan"},
        "megatron_edit.engine.rounds.plan": set(),
        "megatron_edit.engine.rounds.meeting": {"megatron_edit.engine.sync.units"},
        "megatron_edit.engine.sync.units": set(),
    }
    _chain_lengths(edges)
    with pytest.raises(AssertionError, match="a cycle of imports"):
        _chain_lengths(_folders(edges, "megatron_edit.engine"))


def reached_from(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Return all modules that a file or a package imports directly or indirectly."""
    reached: set[str] = set()
    ahead = [name for name in edges if is_in(name, start)]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += edges[name]
    return reached


def indirect_engine_imports(sources: list[Source]) -> list[str]:
    """Return modules that the engine imports indirectly and must not depend on."""
    reached = reached_from(ENGINE, _edges(sources))
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


def test_engine_does_not_depend_on_settings() -> None:
    """Would catch a constant of `config`, and with it argparse, imported by comm/."""
    assert indirect_engine_imports(SOURCES) == []


def test_dependency_rule_finds_violations() -> None:
    """On made-up files: an import through two others, one of them inside a function."""
    chain = [
        source_of("from megatron_edit.comm.near import x\ny = x", "engine/made_up.py"),
        source_of("def x():\n    from megatron_edit.comm import far", "comm/near.py"),
        source_of("import argparse\nfrom megatron_edit.config import y\nx = y", "comm/far.py"),
        source_of("y = 1", "config.py"),
    ]
    assert len(indirect_engine_imports(chain)) == 2
    assert indirect_engine_imports(chain[:2]) == []


def test_importing_the_engine_loads_no_settings() -> None:
    """Check the same in the interpreter."""
    code = (
        "import sys, megatron_edit.engine;"
        "own = {m.split('.')[1] for m in sys.modules if m.startswith('megatron_edit.')};"
        f"assert own <= {BELOW_ENGINE!r}, own"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_public_engine_names_are_used() -> None:
    """Would catch a public method or property that neither the host nor a test uses."""
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
    inside = {"round", "activity"}  # of the status, used by the engine itself
    assert offered - used - inside == set()


def test_host_uses_any_sparingly() -> None:
    """Would catch `Any` in place of a protocol of `host/seams/megatron.py`."""
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
    """Neither torch nor Megatron is imported; environment and path do not change."""
    code = (
        "import os, sys; before = dict(os.environ), list(sys.path);"
        "import megatron_edit, megatron_edit.config, megatron_edit.errors;"
        "assert (dict(os.environ), list(sys.path)) == before;"
        "heavy = {'torch', 'megatron', 'numpy', 'logging'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_the_command_line_starts_without_torch() -> None:
    """Would catch slow imports of one subcommand that delay all others."""
    code = (
        "import sys, megatron_edit.tools.cli;"
        "heavy = {'torch', 'megatron', 'matplotlib', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


# ---- collectives in one module


class _Groups(ast.NodeVisitor):
    """Names in one function that certainly refer to our `Group`.

    These are: parameters annotated `Group`; what `Group.of` or `stand_alone_group` returns;
    attributes declared `name: Group` in some class of the package; members of a mapping declared
    `name: Mapping[str, Group]`; and names assigned from any of these.
    """

    def __init__(self, fields: set[str], mappings: set[str]) -> None:
        self.fields, self.mappings = fields, mappings
        self.names: set[str] = set()

    def is_group(self, node: ast.expr) -> bool:
        """Return whether an expression is a `Group`."""
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
        """Return whether an expression is a mapping to groups."""
        return isinstance(node, ast.Attribute) and node.attr in self.mappings

    def visit_arg(self, node: ast.arg) -> None:
        if _is_group(node.annotation):
            self.names.add(node.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.is_group(node.value):
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
    """Return the attributes declared as a group, and as a mapping to groups, in any class.

    A name that another class uses for what may be a raw process group is excluded.
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


def raw_collective_calls(source: Source) -> list[str]:
    """Return collectives that are not called on a `Group`."""
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
            taken = {alias.name for alias in node.names} & (RAW_COLLECTIVES | GROUP_METHODS)
            complaints += [source.at(node, f"imports the collective {name}") for name in taken]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in RAW_COLLECTIVES:
            complaints.append(source.at(node, f"calls {ast.unparse(node.func)}"))
        elif node.func.attr in GROUP_METHODS:
            groups = _Groups(fields, mappings)
            groups.visit(inside.get(node, source.tree))
            if not groups.is_group(node.func.value):
                complaints.append(source.at(node, f"{ast.unparse(node.func)} of no known Group"))
    return complaints


def test_collectives_are_issued_in_one_module() -> None:
    """Would catch `dist.all_reduce(...)` or a method of a raw process group anywhere else.

    `elastic/` knows no torch; `send` and `recv` are those of its sockets.
    """
    sources = [source for source in SOURCES if source.part != "elastic"]
    assert [c for source in sources for c in raw_collective_calls(source)] == []


def test_hub_does_not_import_torch() -> None:
    """A hub starts quickly, and runs on a machine without torch."""
    uses = [s.at(node, name) for s in SOURCES if s.part == "elastic" for node, name in imports_of(s)
            if is_in(name, "torch")]  # fmt: skip
    assert uses == []


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
    """Each of these is a violation."""
    assert raw_collective_calls(source_of(code))


def test_collectives_rule_accepts_own_groups() -> None:
    """Calls of `Group` methods are allowed."""
    code = (
        "def f(groups, t, one: Group):\n    one.broadcast(t)\n    groups.sync.all_reduce(t)\n"
        "    other = groups.stage\n    other.all_gather(t)\n"
        "    for _, tie in groups.ties.items():\n        tie.broadcast(t)\n"
    )
    assert raw_collective_calls(source_of(code)) == []


# ---- definitions in one place

FLAG_PREFIXES = {"--use-edit", "--edit-", "--use_edit", "--edit_"}


def values_of(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, object]]:
    """Yield module-level names whose value is a number, a text or a list of these."""
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
                    continue  # computed


def _are_similar(one: str, other: str, value: object) -> bool:
    """Return whether two names may mean the same; equal numbers are often a coincidence."""
    if isinstance(value, int | float):
        return one.strip("_") == other.strip("_")
    words = [set(name.strip("_").split("_")) for name in (one, other)]
    return words[0] <= words[1] or words[1] <= words[0]


def duplicate_constants(sources: list[Source]) -> list[str]:
    """Return constants of equal value and similar name in two files."""
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


def duplicate_lists(sources: list[Source]) -> list[str]:
    """Return lists of two or more texts that appear in two files."""
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


def duplicate_prefixes(sources: list[Source]) -> list[str]:
    """Return prefixes of our flags outside of flags.py."""
    return [
        source.at(node, f"{node.value!r}; flags.py has it")
        for source in sources
        if source.name != "flags.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value in FLAG_PREFIXES
    ]


@pytest.mark.parametrize("rule", [duplicate_constants, duplicate_lists, duplicate_prefixes])
def test_constants_lists_and_prefixes_are_defined_once(rule: object) -> None:
    """Would catch a time limit, a list of choices or a flag prefix defined in two files."""
    assert callable(rule)
    assert rule(SOURCES) == []


@pytest.mark.parametrize(
    ("rule", "one", "other"),
    [
        (duplicate_constants, "GRACE_SECONDS = 5.0", "_GRACE_SECONDS: float = 5.0"),
        (duplicate_constants, "A, FINAL = 1, 'final'", "FINAL = 'final'"),
        (duplicate_constants, "OPTIMIZERS = ('adam',)", "SUPPORTED_OPTIMIZERS = ('adam',)"),
        (duplicate_lists, "X = ('a', 'b')", "def f(x):\n    return x in {'b', 'a'}"),
        (duplicate_prefixes, "", "def f(x):\n    return f'--edit-{x}'"),
    ],
)
def test_duplicate_rules_find_violations(rule: object, one: str, other: str) -> None:
    """Each made-up pair of files is a violation."""
    assert callable(rule)
    first, second = source_of(one, "comm/one.py"), source_of(other, "tools/other.py")
    assert rule([first, second]) and not rule([first])


def fields_of(tree: ast.Module) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Yield fields of all classes of a file: class, statement, name."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield owner.name, node, node.target.id


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the parameters of a function that have a default."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    yield from (arg.arg for arg in places[len(places) - len(given.defaults) :])
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    yield from (arg.arg for arg, default in pairs if default is not None)


def defaults_of_settings(sources: list[Source]) -> list[str]:
    """Return defaults of settings in layers that receive them as values."""
    fields = next(source for source in sources if source.name == "config_fields.py")
    settings = {name for owner, _, name in fields_of(fields.tree) if owner == "SettingFields"}
    assert settings
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


def defaults_of_built_settings(sources: list[Source]) -> list[str]:
    """Return defaults of fields in the classes that host/settings.py builds from settings."""
    maker = next(source for source in sources if source.name == "host/settings.py")
    made = {_called(node) for node in ast.walk(maker.tree) if isinstance(node, ast.Call)}
    return [
        source.at(node, f"{owner}.{name} has a default; settings give it a value")
        for source in sources
        for owner, node, name in fields_of(source.tree)
        if owner in made and node.value is not None
    ]


@pytest.mark.parametrize("rule", [defaults_of_settings, defaults_of_built_settings])
def test_setting_defaults_are_defined_once(rule: object) -> None:
    """Would catch `EngineSettings.prefetch_units = 2`, which may differ from the flag's default."""
    assert callable(rule)
    assert rule(SOURCES) == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (defaults_of_settings, "class Made:\n    clip: float = 10.0"),
        (defaults_of_settings, "def f(a, *, clip=10.0): ..."),
        (defaults_of_settings, "def f(a, clip=10.0): ..."),
        (defaults_of_built_settings, "class Made:\n    max_norm: float = 10.0"),
    ],
)
def test_default_rules_find_violations(rule: object, code: str) -> None:
    """Each made-up pair of files is a violation."""
    assert callable(rule)
    config = source_of(
        "class SettingFields:\n    clip: float = _setting(10.0, '')", "config_fields.py"
    )
    settings = source_of("def made_of(config):\n    return Made(config.clip)", "host/settings.py")
    assert rule([config, settings, source_of(code)])
    assert not rule([config, settings])


# ---- style


def repeated_classes(sources: list[Source]) -> list[str]:
    """Return public classes, also nested ones, that share a name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.at(node, node.name))
    return [place for same in places.values() if len(same) > 1 for place in same]


def test_public_class_names_are_unique() -> None:
    """Every public class name occurs once in the package."""
    assert repeated_classes(SOURCES) == []


def test_class_name_rule_finds_violations() -> None:
    """Two classes at module level, or one nested; private classes may share a name."""
    twice = [source_of("class Run: ...", name) for name in ("engine/one.py", "host/two.py")]
    assert repeated_classes(twice) == ["engine/one.py:1: Run", "host/two.py:1: Run"]
    nested = [source_of("class Outer:\n    class Run: ..."), twice[0]]
    assert len(repeated_classes(nested)) == 2
    assert repeated_classes([source_of("class _Run: ...")] * 2 + twice[:1]) == []


def test_files_and_functions_are_short() -> None:
    """Files and functions have a maximum length."""
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


def test_no_global_bare_except_or_print() -> None:
    """Output goes through observe.console."""
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
    """Yield public classes, functions and methods, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | FUNCTIONS) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def test_public_names_have_docstrings() -> None:
    """Public modules, classes, functions and methods."""
    missing = [s.at(s.tree, "module") for s in SOURCES if not ast.get_docstring(s.tree)]
    for source in SOURCES:
        missing += [source.at(n, n.name) for n in _public(source.tree) if not ast.get_docstring(n)]
    assert missing == []


def references(source: Source) -> list[str]:
    """Return docstrings that only refer to another place."""
    return [
        source.at(node, getattr(node, "name", "module"))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS)
        and REFERENCE.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_do_not_refer_elsewhere() -> None:
    """Would catch an implementation of a protocol with only "See `Protocol`."."""
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
def test_reference_rule_finds_violations(docstring: str, is_reference: bool) -> None:
    """On classes and private functions."""
    for code in (f'class A:\n    """{docstring}"""', f'def _f():\n    """{docstring}"""'):
        assert bool(references(source_of(code))) == is_reference
