"""A study: its command line, its turns, what it has measured so far, and the JSON file of it.

Everything that is measured is kept as soon as it is there, a small file each, in a folder beside
OUTPUT that git ignores; with `--resume` the study goes on from these files. OUTPUT itself is small:
settings, versions and summaries, of as many series as were measured into it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from netlab import Lab

from megatron_edit.tools.cli.common import OneLineParser
from megatron_edit.tools.compare.finished import configuration_hash, find, keep
from megatron_edit.tools.compare.follow import Bar, progress_bar

from .against import Compared, add_against, comparison_table, earlier_package
from .gpt import Link, link_name
from .launch import REPOSITORY, RunFailedError, measure_link
from .page import ALL

PACKAGES = ("megatron-edit", "megatron-core", "torch", "numpy")
DIGITS = 5  # of numbers in OUTPUT
# Flags that say nothing about the numbers.
ABOUT_FILES = ("output", "series", "resume")
_SPREAD = ": min, median, max"  # behind the name of a column of spreads
_PART = 4  # depth of what has no lines of its own in OUTPUT, but for rows


# By name, without dashes: the default, whose type is that of the flag, and what to say of it.
type Flags = dict[str, tuple[str | int | float, str]]


# ---- command line


def study_parser(
    name: str, doc: str | None, flags: Flags, *, repeats: int, time_limit: float, quick: str,
    pairs: bool = True,
) -> OneLineParser:  # fmt: skip
    """A parser with the flags of all studies, and further ones.

    Args:
        name: of the benchmark.
        doc: its docstring, whose first line is the description.
        flags: further ones.
        repeats: default of `--repeats`.
        time_limit: default of `--time-limit`.
        quick: what `--quick` does.
        pairs: whether there is `--against`.
    """
    parser = OneLineParser(prog=name, description=(doc or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of the summary; a picture and a "
        "folder of all runs lie beside it")  # fmt: skip
    add("--resume", action="store_true", help="go on where this study was broken off")
    add("--quick", action="store_true", help=f"a smoke test: {quick}")
    common: Flags = {
        "series": ("all", "name of what is measured, in a file that holds several"),
        "repeats": (repeats, "turns of all runs"),
        "time-limit": (time_limit, "seconds for one run"),
    }
    for flag, (default, text) in (common | flags).items():
        shown = f"{default:g}" if isinstance(default, float) else default
        add(f"--{flag}", type=type(default), default=default, help=f"{text} (default: {shown})")
    if pairs:
        add_against(parser)
    return parser


def parse_quick(
    parser: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse; `--quick` changes defaults, so that other flags still count."""
    if "--quick" in argv:
        parser.set_defaults(**quick)
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """What a command line says about the numbers: all but files and `left_out`."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in (*ABOUT_FILES, *left_out) and not (name == "against" and value is None)
    }


def parts_of(text: str) -> list[str]:
    """What is separated by commas; nothing of an empty text."""
    return [word for word in text.split(",") if word]


def rates_of(text: str) -> list[float | None]:
    """Links: bits per second, separated by commas; `none` is no limit."""
    return [None if word == "none" else float(word) for word in parts_of(text)]


# ---- turns


def there_and_back[T](cases: Sequence[T], repeat: int) -> list[T]:
    """The cases of a turn: a steady drift of the machine then hits all of them alike."""
    return list(cases if repeat % 2 == 0 else reversed(cases))


def say(text: str) -> None:
    """A line of progress on the error stream; the standard output is for tables."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr)
    sys.stderr.flush()


class Study[M]:
    """What a benchmark measures, in turns; a subclass says what a run is and how it is summarized.

    Args:
        name: of the benchmark.
        args: its command line, by `study_parser`.
        form: type of a run: a dataclass, or what JSON has.
        settings: all that decides what is measured.
        versions: of what takes part besides `PACKAGES`.

    Attributes:
        args: as given.
        found: runs with the package of this checkout.
        failures: of runs, one line each.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        form: type[M],
        settings: Mapping[str, Any],
        versions: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args
        self.found: list[M] = []
        self.failures: list[str] = []
        self._name, self._output, self._series, self._form = name, args.output, args.series, form
        self._against: str | None = getattr(args, "against", None)
        self._packages = [REPOSITORY]
        self._pairs: dict[str, dict[int, list[M | None]]] = {}  # by name and turn
        self._head = {"versions": environment() | dict(versions or {}), "configuration": settings}
        self._identity = {"study": name, "series": args.series,
                          "settings": configuration_hash(to_json(settings))}  # fmt: skip
        self._bar: Bar | None = None
        if not args.resume:
            self._forget()

    # ---- for subclasses

    def summary(self) -> dict[str, Any]:
        """What OUTPUT has to say of this series, besides settings and versions."""
        return {}

    def describe(self, run: M) -> str:
        """What to say of a run that is over."""
        return f"{run}"

    def numbers(self, run: M) -> dict[str, float | None]:
        """What of a run is compared with that of an earlier package, by name."""
        return {}

    # ---- runs

    @contextmanager
    def progress(self, total: int, *, more: int = 0) -> Iterator[None]:
        """Show a bar inside the `with` block, have the earlier package, and leave on signals.

        Args:
            total: runs that are measured with each package.
            more: runs that are measured with that of this checkout alone.
        """
        with earlier_package(self._against) as earlier:
            self._packages = [REPOSITORY, *([earlier] if earlier else [])]
            total = total * len(self._packages) + more
            with progress_bar(self._name, total=total, unit="run") as bar:
                self._bar = bar
                yield

    def turn[C](
        self, turn: int, cases: Sequence[C], name: Callable[[C], str], make: Callable[[C, Path], M]
    ) -> None:
        """Run cases once, backwards in every other turn; one that fails does not end the rest.

        Args:
            turn: from 0.
            cases: in order.
            name: of a case; no two of a turn share one.
            make: runs a case with the package in a folder.
        """
        runs = [(case, package) for case in cases for package in self._packages]
        for case, package in there_and_back(runs, turn):
            is_earlier = package != REPOSITORY
            key = f"turn {turn + 1}, {name(case)}"
            key += f", at {package.name}" if is_earlier else ""
            found = self.measure(key, partial(make, case, package))
            pair = self._pairs.setdefault(name(case), {}).setdefault(turn, [None, None])
            pair[is_earlier] = found
            if found is not None and not is_earlier:
                self.found.append(found)
            self.write()

    def once[T](self, key: str, form: type[T], make: Callable[[], T]) -> T:
        """What was found under a name before the study was broken off, or what is found now.

        Args:
            key: the name; no two things of a series share one.
            form: its type.
            make: finds it.
        """
        configuration = self._identity | {"key": key}
        path = runs_folder(self._output) / f"{configuration_hash(configuration)}.json"
        if (kept := find(path, configuration)) is not None:
            return typing.cast(T, from_json(form, kept["found"]))
        found = make()
        keep(path, configuration, {"found": to_json(found)})
        return found

    def measure(self, key: str, make: Callable[[], M]) -> M | None:
        """A run, as `once` has it. One that fails is noted and does not end the rest: None."""
        try:
            found = self.once(key, self._form, make)
        except RunFailedError as error:
            say(f"{self._name}: {key}: {error}")
            lines = f"{key}: {error}".strip().splitlines()
            self.failures.append(" ".join([lines[0], *lines[1:][-1:]]))
            return None
        else:
            say(f"{key}: {self.describe(found)}")
            return found
        finally:
            if self._bar is not None:
                self._bar.update()

    def links[C](
        self, lab: Lab, cases: Sequence[C], make: Callable[[float | None, int, C, Path], M]
    ) -> Iterator[Link]:
        """Run cases on all links, `args.links`, in `args.repeats` turns; gives each link.

        Args:
            lab: of the links.
            cases: of a turn on a link, named by their text.
            make: runs a case on a link of a rate in a repeat, with the package in a folder.
        """
        for repeat in range(self.args.repeats):
            for rate in self.args.links:
                place, link = link_name(rate), partial(measure_link, lab, rate, repeat)
                yield self.once(f"turn {repeat + 1}, {place}, link", Link, link)
                names = partial("{}, {}".format, place)
                self.turn(repeat, cases, names, partial(make, rate, repeat))

    # ---- results

    def compared(self) -> list[Compared]:
        """The numbers of both packages for each case, turn by turn."""
        rows = []
        for name, turns in self._pairs.items():
            pairs = [
                (self.numbers(here), self.numbers(earlier))
                for here, earlier in turns.values()
                if here is not None and earlier is not None
            ]
            for of in pairs[0][0] if pairs else ():
                numbers = [(here[of], earlier[of]) for here, earlier in pairs]
                known = [(a, b) for a, b in numbers if a is not None and b]
                rows += [Compared.of_pairs(name, of, known)] if known else []
        return rows

    def write(self) -> None:
        """Write OUTPUT: this series anew, and other ones as they are."""
        others = read_series(self._output) if self._output.exists() else {}
        comparison = {} if self._against is None else {"against": self.compared()}
        own = self._head | self.summary() | comparison | {"failures": self.failures}
        series = others | {self._series: own}
        write_series(self._output, self._name, series)

    def report(self, page: str) -> int:
        """Print a page, and the comparison with the earlier package; gives the exit code."""
        print(page)
        if self._against is not None:
            print(f"\n{comparison_table(self._against, self.compared())}")
        return 1 if self.failures else 0

    def _forget(self) -> None:
        """Runs of this series that were kept before."""
        for path, record in _kept(self._output):
            if record["configuration"].get("series") == self._series:
                path.unlink()


# ---- files


def runs_folder(output: Path) -> Path:
    """Where all runs of a study are kept."""
    return output.with_suffix(".runs")


def read_runs(output: Path, form: type[Any]) -> list[dict[str, Any]]:
    """All runs that were kept, as JSON has them: those whose fields are those of a dataclass."""
    names = {spec.name for spec in fields(form)}
    found = [record["result"]["found"] for _, record in _kept(output)]
    return [each for each in found if isinstance(each, dict) and each.keys() == names]


def _kept(output: Path) -> list[tuple[Path, dict[str, Any]]]:
    paths = sorted(runs_folder(output).glob("*.json"))
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def read_series(output: Path) -> dict[str, dict[str, Any]]:
    """All series of an OUTPUT, by name."""
    series: dict[str, dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["series"]
    return {name: {part: _rows_of(each) for part, each in own.items()}
            for name, own in series.items()}  # fmt: skip


def read_one(output: Path, series: str = "all") -> dict[str, Any]:
    """One series of an OUTPUT."""
    return read_series(output)[series]


def write_series(
    output: Path, name: str, series: Mapping[str, Mapping[str, Any]], *, digits: int = DIGITS
) -> None:
    """Write an OUTPUT, with lists of objects as tables and no digits that nobody needs."""
    output.parent.mkdir(parents=True, exist_ok=True)
    tables = {name: {part: _table_of(_short(each, digits)) for part, each in own.items()}
              for name, own in to_json(series).items()}  # fmt: skip
    text = _lines({"study": name, "series": tables})
    output.write_text(text + "\n", encoding="utf-8")


def _table_of(rows: Any) -> Any:
    """Objects of the same keys as their keys and rows of values; all else as it is."""
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        return rows
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        return rows
    spreads = [all(row[name] is None or _is_spread(row[name]) for row in rows) for name in names]
    columns = [name + _SPREAD * it for name, it in zip(names, spreads, strict=True)]
    values = [[list(row[name].values()) if _is_spread(row[name]) else row[name] for name in names]
              for row in rows]  # fmt: skip
    return {"columns": columns, "rows": values}


def _rows_of(table: Any) -> Any:
    """The way back."""
    if not (isinstance(table, dict) and table.keys() == {"columns", "rows"}):
        return table
    return [
        {
            name.removesuffix(_SPREAD): dict(zip(ALL, value, strict=True))
            if name.endswith(_SPREAD) and value is not None
            else value
            for name, value in zip(table["columns"], row, strict=True)
        }
        for row in table["rows"]
    ]


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and tuple(value) == ALL


def to_json(value: Any) -> Any:
    """As JSON has it: dataclasses and mappings as objects, paths as texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def from_json(form: Any, value: Any) -> Any:
    """The way back, by the types of a dataclass's fields."""
    origin, of = typing.get_origin(form), typing.get_args(form)
    if value is None or form is Any:
        return value
    if is_dataclass(form) and isinstance(form, type):
        hints = typing.get_type_hints(form)
        return form(**{spec.name: from_json(hints[spec.name], value[spec.name])
                       for spec in fields(form)})  # fmt: skip
    if origin in (typing.Union, types.UnionType):
        return from_json(next(each for each in of if each is not type(None)), value)
    if origin is list:
        return [from_json(of[0], each) for each in value]
    if origin is tuple:
        forms = of[:1] * len(value) if of[-1] is Ellipsis else of
        return tuple(map(from_json, forms, value))
    if origin is dict:
        return {name: from_json(of[1], each) for name, each in value.items()}
    return float(value) if form is float else value


def _short(value: Any, digits: int) -> Any:
    """Floats with so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_short(each, digits) for each in value]
    if isinstance(value, dict):
        return {name: _short(each, digits) for name, each in value.items()}
    return value


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each part of a series, and for each row of a table."""
    is_table = depth == _PART and isinstance(value, list) and isinstance((value or [0])[0], list)
    if not value or depth > _PART or not (isinstance(value, dict) or is_table):
        return json.dumps(value, ensure_ascii=False)
    parts = [_lines(each, depth + 1) for each in (value if is_table else value.values())]
    if not is_table:
        parts = [f"{json.dumps(name)}: {part}" for name, part in zip(value, parts, strict=True)]
    pad = "\n" + " " * depth
    begin, end = "[]" if is_table else "{}"
    return f"{begin}{pad} " + f",{pad} ".join(parts) + f"{pad}{end}"


def common_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Flags of several runs, in few bytes: what all of them begin with, and the rest of each."""
    columns = zip(*flags.values(), strict=False)
    common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    rest = {name: " ".join(words[len(common) :]) for name, words in flags.items()}
    return {"common": " ".join(common)} | rest


# ---- what it ran on


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None  # run from a checkout
    git = ("git", "-C", str(REPOSITORY))
    return versions | {
        "commit": _output(*git, "rev-parse", "HEAD"),
        "changed_files": len(_output(*git, "status", "--porcelain").splitlines()),
        "iproute2": _output("ip", "-V"),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
