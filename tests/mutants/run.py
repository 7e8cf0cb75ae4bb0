"""Insert mutants into a copy of the repository, one at a time, and run the test named for each.

    python -m tests.mutants.run [IDS ...] [--tier core|full] [--control] [--jobs N]
                                [--out FILE.json]

IDS are ids of mutants, or areas (method, comm, ...); by default all. `--tier full` runs the test of
the full tier for mutants that the core tier misses. `--control` runs the tests on the unchanged
copy, where none may fail. Exits with 1 where an outcome differs from the catalogue, or a test fails
without a mutant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import PACKAGE, Mutant, SnippetError

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, TIMEOUT, ERROR = "killed", "survived", "timeout", "error"
SECONDS = 600.0  # limit of one test
LEFT_OUT = ("benchmarks/results/", "docs/")  # large, and not read by the named tests
_SHOWN = 4000  # characters of a test's output in the outcome
_OURS = (PACKAGE, "tests", "scripts", "benchmarks")
# Tests run in forks of a process with the slow imports done: most take less than a second.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["pytest", "torch", "hypothesis.strategies"])


@dataclass(frozen=True)
class Outcome:
    """The outcome of the test of a mutant.

    Attributes:
        id: of the mutant.
        test: that was run.
        result: `killed`: the test failed. `survived`: it passed. `timeout`: it exceeded its limit.
            `error`: the snippet was not found, or no test was run.
        seconds: of the process; torch is imported already.
        test_seconds: of the tests themselves.
        detail: pytest's output, where the mutant was not killed.
    """

    id: str
    test: str
    result: str
    seconds: float = 0.0
    test_seconds: float = 0.0
    detail: str = ""


def copy_repository(target: Path) -> None:
    """Copy all tracked files of the working tree, except those that no test needs."""
    git = ["git", "-c", f"safe.directory={ROOT}"]  # else git refuses another user's clone
    names = subprocess.run(
        [*git, "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in names:
        source = ROOT / name
        if name and not name.startswith(LEFT_OUT) and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


@contextmanager
def applied(mutant: Mutant | None, copy: Path) -> Iterator[None]:
    """Context in which the copy has the mutant; None changes nothing.

    Raises:
        SnippetError: the snippet is not found exactly once.
    """
    if mutant is None:
        yield
        return
    path, text = copy / PACKAGE / mutant.file, mutant.text(copy)
    original = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")


def run_test(copy: Path, test: str, *, is_full: bool, timeout: float = SECONDS) -> Outcome:
    """Run one test in a copy.

    Args:
        copy: of the repository.
        test: node id from the folder `tests`.
        is_full: whether tests marked `full` run, too.
        timeout: seconds after which the process and its children are killed.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts="]
        argv = [*options, f"--junitxml={report}", *(["--full"] if is_full else []), f"tests/{test}"]
        process = _WARM.Process(target=_run_pytest, args=(str(copy), argv, str(log)))
        began = time.monotonic()
        process.start()
        process.join(timeout)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return Outcome("", test, TIMEOUT, timeout)
        seconds = time.monotonic() - began
        passed, failed, inside = _counts(report)
        result = KILLED if failed else SURVIVED if passed else ERROR
        text = log.read_text(encoding="utf-8", errors="replace")
    return Outcome("", test, result, seconds, inside, "" if failed else text[-_SHOWN:])


def _run_pytest(copy: str, argv: list[str], log: str) -> NoReturn:
    """Run pytest in a process of its own, with torch but nothing of this project imported."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]  # these are of the repository, not of the copy
    sys.path[:] = [copy, *(path for path in sys.path if path and Path(path) != ROOT)]
    # Also for ranks: the copy comes before an editable install; bytecode could be that of another
    # mutant whose text has the same length and second.
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    os.chdir(copy)
    code = int(pytest.main(argv))
    sys.stdout.flush()
    os._exit(code)


def _counts(report: Path) -> tuple[int, int, float]:
    """Count tests that passed and failed, and sum their seconds; without collection errors."""
    passed, failed, seconds = 0, 0, 0.0
    if report.is_file():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            ends = {child.tag for child in case}
            is_run = bool(case.get("classname"))  # a file that cannot be imported has none
            failed += is_run and not ends.isdisjoint(("failure", "error"))
            passed += is_run and ends.isdisjoint(("failure", "error", "skipped"))
            seconds += float(case.get("time") or 0.0)
    return passed, failed, seconds


def outcome_of(
    mutant: Mutant, copy: Path, tier: str = "core", *, is_control: bool = False
) -> Outcome:
    """Apply a mutant to a copy, run its test of the tier, and restore the copy.

    Args:
        mutant: the mutant.
        copy: of the repository.
        tier: `core` or `full`.
        is_control: whether the copy stays unchanged.
    """
    test = mutant.test if tier == "core" else mutant.full
    try:
        with applied(None if is_control else mutant, copy):
            outcome = run_test(copy, test, is_full=tier == "full")
    except SnippetError as error:
        outcome = Outcome("", test, ERROR, detail=str(error))
    return dataclasses.replace(outcome, id=mutant.id)


def chosen(words: Sequence[str], tier: str) -> list[Mutant]:
    """Mutants by id or area; for the full tier, those that only it kills.

    Raises:
        SystemExit: a word is no id or area.
    """
    known = {word for mutant in MUTANTS for word in (mutant.id, mutant.area)}
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"no such mutant or area: {', '.join(unknown)}")
    named = [m for m in MUTANTS if not words or m.id in words or m.area in words]
    return [mutant for mutant in named if tier == "core" or mutant.full]


def run_all(
    mutants: Sequence[Mutant], tier: str, jobs: int, *, is_control: bool = False
) -> list[Outcome]:
    """Run mutants, `jobs` at a time in separate copies; outcomes are in the order of `mutants`."""
    expected = SURVIVED if is_control else KILLED
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy = Path(folder) / f"copy{number}"
            copy_repository(copy)
            copies.put(copy)

        def run(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return outcome_of(mutant, copy, tier, is_control=is_control)
            finally:
                copies.put(copy)

        found = {}
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(run, mutant) for mutant in mutants]
            with tqdm(total=len(futures), unit="mutant", dynamic_ncols=True) as bar:
                for future in as_completed(futures):
                    outcome = future.result()
                    found[outcome.id] = outcome
                    if outcome.result != expected:
                        bar.write(f"{outcome.result}: {outcome.id} ({outcome.test})")
                    bar.update()
    return [found[mutant.id] for mutant in mutants]


def table(mutants: Iterable[Mutant], outcomes: Iterable[Outcome]) -> str:
    """Format outcomes as a table with a line for each mutant."""
    rows = [("result", "seconds", "mutant", "test", "bug")]
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        seconds = f"{outcome.seconds:.1f}"
        rows.append((outcome.result, seconds, mutant.id, outcome.test, mutant.bug))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 where every mutant ended as the catalogue says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="IDS", help="ids or areas; all without")
    parser.add_argument("--tier", choices=("core", "full"), default="core")
    parser.add_argument("--control", action="store_true", help="run the tests without mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON file of the outcomes")
    options = parser.parse_args(argv)
    mutants, tier = chosen(options.ids, options.tier), options.tier
    if options.control:  # each test once
        mutants = list({m.test if tier == "core" else m.full: m for m in mutants}.values())
    outcomes = run_all(mutants, tier, max(1, options.jobs), is_control=options.control)
    if options.out is not None:
        body = [dataclasses.asdict(outcome) for outcome in outcomes]
        options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(table(mutants, outcomes))
    failed = sum(outcome.result == KILLED for outcome in outcomes)
    if options.control:
        print(f"{len(outcomes) - failed} of {len(outcomes)} tests pass without a mutant")
        return int(any(outcome.result != SURVIVED for outcome in outcomes))
    print(f"{failed} of {len(outcomes)} mutants killed by the {tier} tier")
    missed = {mutant.id for mutant in mutants if tier == "core" and mutant.full}
    return int(any((o.result != KILLED) is not (o.id in missed) for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
