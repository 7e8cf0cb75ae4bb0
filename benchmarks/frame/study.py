"""A study: its command line, repeated runs, stored measurements and JSON file of results.

Each measurement is stored at once in a file of its own, in a folder next to OUTPUT that git
ignores; with `--resume` the study continues from it. OUTPUT itself is small: settings, versions and
summaries.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.tools.cli.words import OneLineParser
from megatron_edit.tools.compare.plan import configuration_hash

from .launch import REPOSITORY, RunFailedError
from .page import ALL

PACKAGES = ("megatron-edit", "megatron-core", "torch", "numpy")
DIGITS = 5  # significant digits of numbers in OUTPUT
# Flags that do not affect the numbers.
FILE_FLAGS = ("output", "resume")
_SPREAD = ": min, median, max"  # suffix of the name of a column of spreads
_LINE_DEPTH = 4  # depth in OUTPUT from which on each value is on one line


# By name, without dashes: the default, whose type is that of the flag, and the help text.
type Flags = dict[str, tuple[str | int | float, str]]


# ---- command line


def study_parser(
    name: str, doc: str | None, flags: Flags, *, repeats: int, time_limit: float, quick: str
) -> OneLineParser:
    """Return a parser with the flags common to all studies and those of a benchmark.

    Args:
        name: of the benchmark.
        doc: its docstring; the first line is the description.
        flags: of the benchmark.
        repeats: default of `--repeats`.
        time_limit: default of `--time-limit`.
        quick: what `--quick` does, for its help text.
    """
    parser = OneLineParser(prog=name, description=(doc or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of the summary; the folder of all "
        "runs is written next to it")  # fmt: skip
    add("--resume", action="store_true", help="continue an interrupted study")
    add("--quick", action="store_true", help=f"a smoke test: {quick}")
    common: Flags = {
        "repeats": (repeats, "repeats of all runs"),
        "time-limit": (time_limit, "seconds for one run"),
    }
    for flag, (default, text) in (common | flags).items():
        shown = f"{default:g}" if isinstance(default, float) else default
        add(f"--{flag}", type=type(default), default=default, help=f"{text} (default: {shown})")
    return parser


def parse_quick(
    parser: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse the command line; `--quick` changes defaults, which other flags override."""
    if "--quick" in argv:
        parser.set_defaults(**quick)
    return parser.parse_args(argv)


def result_settings(args: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """Return the settings that affect the numbers: all but files and `left_out`."""
    return {name: value for name, value in vars(args).items()
            if name not in (*FILE_FLAGS, *left_out)}  # fmt: skip


def split_commas(text: str) -> list[str]:
    """Split a text at commas; an empty text gives an empty list."""
    return [word for word in text.split(",") if word]


def parse_links(text: str) -> list[float | None]:
    """Parse the rates of links in bits per second, separated by commas; `none` is no limit."""
    return [None if word == "none" else float(word) for word in split_commas(text)]


# ---- repeats


def alternate_order[T](cases: Sequence[T], repeat: int) -> list[T]:
    """Return the cases in order, reversed in every other repeat, to average out drift."""
    return list(cases if repeat % 2 == 0 else reversed(cases))


def say(text: str) -> None:
    """Print a line of progress on standard error; standard output is for tables."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Study[M]:
    """The repeated measurements of a benchmark; subclasses define runs and their summary.

    Args:
        name: of the benchmark.
        args: its command line, parsed by `study_parser`.
        settings: everything that affects the measurements.
        versions: of components besides `PACKAGES`.

    Attributes:
        args: the parsed command line.
        found: measurements.
        failures: failed runs, one line each.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        settings: Mapping[str, Any],
        versions: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args
        self.found: list[M] = []
        self.failures: list[str] = []
        self._name, self._output = name, args.output
        self._head = {
            "versions": describe_environment() | dict(versions or {}),
            "configuration": settings,
        }
        self._identity = {"study": name, "settings": configuration_hash(to_json(settings))}
        if not args.resume:
            shutil.rmtree(runs_folder(args.output), ignore_errors=True)

    # ---- for subclasses

    def summary(self) -> dict[str, Any]:
        """Return the results for OUTPUT, besides settings and versions."""
        return {}

    def describe(self, run: M) -> str:
        """Return the text to print for a finished run."""
        return f"{run}"

    # ---- runs

    def run_repeat(
        self, repeat: int, place: str, kinds: Sequence[str], make: Callable[[str], M]
    ) -> None:
        """Run all kinds once, reversed in every other repeat; failed runs do not stop the others.

        Args:
            repeat: from 0.
            place: what they have in common; unique in the study.
            kinds: in order.
            make: runs a kind.
        """
        for kind in alternate_order(kinds, repeat):
            found = self.measure(f"repeat {repeat + 1}, {place}, {kind}", partial(make, kind))
            if found is not None:
                self.found.append(found)
            self.write()

    def once[T](self, key: str, make: Callable[[], T]) -> T:
        """Return the stored result of a key, which is unique in the study, or make and store it."""
        path = self._path(key)
        if path.exists():
            kept: T = pickle.loads(path.read_bytes())
            return kept
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, pickle.dumps(found))
        return found

    def is_stored(self, key: str) -> bool:
        """Whether `once` would return the stored result of a key."""
        return self._path(key).exists()

    def _path(self, key: str) -> Path:
        name = configuration_hash(self._identity | {"key": key})
        return runs_folder(self._output) / f"{name}.pickle"

    def measure(self, key: str, make: Callable[[], M]) -> M | None:
        """Return the stored or new measurement of a key; record a failed run and return None."""
        try:
            found = self.once(key, make)
        except RunFailedError as error:
            say(f"{self._name}: {key}: {error}")
            lines = f"{key}: {error}".strip().splitlines()
            self.failures.append(" ".join([lines[0], *lines[1:][-1:]]))
            return None
        say(f"{key}: {self.describe(found)}")
        return found

    # ---- results

    def write(self) -> None:
        """Write OUTPUT."""
        results = self._head | self.summary() | {"failures": self.failures}
        write_results(self._output, self._name, results)


# ---- files


def runs_folder(output: Path) -> Path:
    """Return the folder of the stored measurements of a study."""
    return output.with_suffix(".runs")


def seeds_parser(prog: str, doc: str | None, corpus: Path) -> OneLineParser:
    """Return a parser with the arguments of a study that trains in pairs of seeds.

    Args:
        doc: docstring of the script; its first line is shown.
        corpus: default of `--corpus`.
    """
    parser = OneLineParser(prog=prog, description=(doc or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file; a folder is made next to it")
    add("--seeds", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 3],
        help="separated by commas (default: 1,2,3)")  # fmt: skip
    add("--samples", type=int, default=8, help="of a replica's step (default: %(default)s)")
    add("--iterations", type=int, default=960, help="(default: %(default)s)")
    add("--tau", type=int, default=16, help="steps of a round (default: %(default)s)")
    add("--corpus", type=Path, default=corpus, help="prepared if there is none")
    return parser


def parse_new(parser: OneLineParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a study whose folder must not exist yet."""
    args = parser.parse_args(argv)
    if runs_folder(args.output).exists():
        parser.error(f"--output {args.output}: {runs_folder(args.output)} must not exist yet")
    return args


def read_series(output: Path) -> dict[str, dict[str, Any]]:
    """Return all series of an OUTPUT, by name."""
    series: dict[str, dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["series"]
    return {name: {part: _from_table(each) for part, each in own.items()}
            for name, own in series.items()}  # fmt: skip


def read_one(output: Path, series: str = "all") -> dict[str, Any]:
    """Return one series of an OUTPUT."""
    return read_series(output)[series]


def write_results(output: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write an OUTPUT with one series and rounded numbers."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = _format_json({"study": name, "series": {"all": to_json(results)}})
    output.write_text(text + "\n", encoding="utf-8")


def _from_table(table: Any) -> Any:
    """Convert a table of columns and rows, which older files have, to objects."""
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


def to_json(value: Any) -> Any:
    """Convert to JSON types: dataclasses and mappings to objects, paths to strings; floats are
    rounded to `DIGITS` significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return str(value) if isinstance(value, Path) else value


def _format_json(value: Any, depth: int = 0) -> str:
    """Return JSON text with a line for each part of the results and each object of a list."""
    is_list = isinstance(value, list) and isinstance((value or [0])[0], dict)
    if not value or depth >= _LINE_DEPTH or not (isinstance(value, dict) or is_list):
        return json.dumps(value, ensure_ascii=False)
    parts = [_format_json(each, depth + 1) for each in (value if is_list else value.values())]
    if not is_list:
        parts = [f"{json.dumps(name)}: {part}" for name, part in zip(value, parts, strict=True)]
    begin, end = "[]" if is_list else "{}"
    return f"{begin}\n" + ",\n".join(parts) + f"\n{end}"


def common_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the common prefix of the flags of several runs, and the rest of each."""
    columns = zip(*flags.values(), strict=False)
    common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    rest = {name: " ".join(words[len(common) :]) for name, words in flags.items()}
    return {"common": " ".join(common)} | rest


# ---- environment


def describe_environment() -> dict[str, Any]:
    """Return versions and a description of the machine."""
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
