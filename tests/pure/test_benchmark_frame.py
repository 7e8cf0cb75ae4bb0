"""benchmarks/frame, the common base of all benchmarks, tested without a training.

Would catch: a study that repeats finished runs, or reuses runs of other settings; a failed run that
ends the others; numbers changed by a file; a crash after training that fails a run, and one before
its end that does not; raw data among the results; an earlier package that is not the one measured,
or is not removed; ratios across repeats.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import stragglers
from frame.against import (
    CommitError,
    Comparison,
    comparison_table,
    earlier_package,
    resolve_commit,
)
from frame.gpt import Model, Window, edit_flags
from frame.launch import DONE, REPOSITORY, RunFailedError, Training, free_ports
from frame.page import ALL, Column, Spread, table, table_of, target_line
from frame.readings import Console, read_console
from frame.study import (
    Study,
    alternate_order,
    common_flags,
    from_json,
    read_one,
    read_runs,
    read_series,
    runs_folder,
    to_json,
    write_series,
)

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
MAX_RESULT_BYTES = 31_000


@dataclass(frozen=True)
class Part:
    """One part of a run."""

    first: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run as benchmarks record it: nested, with tuples and optional values."""

    name: str
    rate: float | None
    parts: list[Part]
    lines: list[tuple[int, float]]
    factors: tuple[float, ...]
    words: dict[str, float]
    spread: Spread | None = None


RUN = Run("a", None, [Part(1, 2.5)], [(10, 1.0), (20, 2.0)], (1.0, 4.0), {"x": 1.5},
          Spread(1.0, 2.0, 3.0))  # fmt: skip


class Numbers(Study[float]):
    """A study with one number per run and a fixed summary."""

    def summary(self) -> dict[str, Any]:
        """Return one row."""
        return {"rows": [{"tau": self.args.tau, "x": None}]}

    def numbers(self, run: float) -> dict[str, float | None]:
        """Return the measured speed and an unknown number."""
        return {"speed": run, "unknown": None}


def study(
    folder: Path, *, series: str = "all", resume: bool = False, tau: int = 4,
    against: str | None = None,
) -> Numbers:  # fmt: skip
    """Return a study that writes study.json in a folder."""
    output = folder / "study.json"
    args = argparse.Namespace(output=output, series=series, resume=resume, tau=tau, against=against)
    return Numbers("study", args, float, {"tau": tau})


# ---- a study


def test_study_resumes_without_repeating_finished_runs(tmp_path: Path) -> None:
    """With `resume` no run is repeated; without it, or with other settings, all runs are."""
    made: list[str] = []

    def run(each: Study[float], key: str) -> Run:
        def make() -> Run:
            made.append(key)
            return RUN

        return each.once(key, Run, make)

    first = study(tmp_path)
    assert [run(first, key) for key in "ab"] == [RUN, RUN] and made == ["a", "b"]
    resumed = study(tmp_path, resume=True)
    assert [run(resumed, key) for key in "abc"] == [RUN] * 3 and made == ["a", "b", "c"]
    other = study(tmp_path, resume=True, tau=8)
    assert run(other, "a") == RUN and made == [*"abc", "a"]
    assert len(read_runs(tmp_path / "study.json", Run)) == 4

    series = study(tmp_path, series="again")  # keeps the runs of the other series
    run(series, "a")
    assert made == [*"abca", "a"] and len(read_runs(tmp_path / "study.json", Run)) == 5
    run(study(tmp_path), "a")
    assert made == [*"abcaa", "a"] and len(read_runs(tmp_path / "study.json", Run)) == 2


def test_failed_run_does_not_end_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is recorded in one line, printed in full, and repeated when the study is resumed."""

    def fail() -> float:
        raise RunFailedError("rank 0 exited with 1; it said last:\nno room")

    each = study(tmp_path)
    with each.progress(2):
        assert each.measure("repeat 1", fail) is None
        assert each.measure("repeat 2", lambda: 2.0) == 2.0
    each.write()
    assert each.failures == ["repeat 1: rank 0 exited with 1; it said last: no room"]
    assert "no room" in capsys.readouterr().err
    assert read_one(tmp_path / "study.json")["failures"] == each.failures
    again = study(tmp_path, resume=True)
    assert again.once("repeat 1", float, lambda: 1.0) == 1.0


def test_series_are_written_independently_into_one_file(tmp_path: Path) -> None:
    """Each series is rewritten without changing the others; None values are kept."""
    output = tmp_path / "study.json"
    study(tmp_path).write()
    study(tmp_path, series="again", tau=8).write()
    study(tmp_path, tau=16).write()
    found = read_series(output)
    assert {name: each["configuration"] for name, each in found.items()} == {
        "all": {"tau": 16}, "again": {"tau": 8}
    }  # fmt: skip
    assert found["again"]["rows"] == [{"tau": 8, "x": None}]
    assert found["all"]["versions"]["cores"] >= 1
    assert not runs_folder(output).exists()


def test_series_file_is_compact_and_round_trips(tmp_path: Path) -> None:
    """Tables contain their column names once, and numbers the requested digits."""
    rows = [to_json(RUN) | {"rate": 100e6 / 3}, to_json(RUN) | {"spread": None}]
    path = tmp_path / "x.json"
    write_series(path, "x", {"all": {"rows": rows, "odd": [{"a": 1}, {"b": 2}]}}, digits=3)
    found = read_one(path)
    assert found["rows"] == [rows[0] | {"rate": 33_300_000.0}, rows[1]]
    assert found["odd"] == [{"a": 1}, {"b": 2}]
    assert path.read_text().count('"factors"') == 1
    assert json.loads(path.read_text())["study"] == "x"


def test_dataclasses_round_trip_through_json() -> None:
    """Values keep their types."""
    assert from_json(Run, json.loads(json.dumps(to_json(RUN)))) == RUN
    assert isinstance(from_json(float, 1), float) and from_json(int, 1) == 1


def test_repeats_alternate_order_and_common_flags_are_split_off() -> None:
    """Every other repeat is in reverse order; common flags are listed once."""
    assert [alternate_order("abc", repeat) for repeat in range(3)] == [[*"abc"], [*"cba"], [*"abc"]]
    flags = {"x": ["--a", "1", "--b"], "y": ["--a", "1"], "z": ["--a", "1", "--c", "--b"]}
    assert common_flags(flags) == {"common": "--a 1", "x": "--b", "y": "", "z": "--c --b"}


# ---- comparison with an earlier package


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a git checkout with two commits; the first has no package."""
    root = tmp_path / "repository"
    package = root / "megatron_edit" / "__init__.py"
    git(tmp_path, "init", "--quiet", str(root))
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    git(root, *identity, "commit", "--quiet", "--allow-empty", "-m", "first")
    package.parent.mkdir()
    package.write_text("VERSION = 'earlier'\n")
    git(root, "add", ".")
    git(root, *identity, "commit", "--quiet", "-m", "second")
    package.write_text("VERSION = 'here'\n")
    return root


def git(folder: Path, *words: str) -> str:
    """Run git and return its output."""
    argv = ["git", "-C", str(folder), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_earlier_package_is_checked_out_and_removed(repository: Path) -> None:
    """It is checked out as committed, and removed even if the measurement fails."""
    commit = resolve_commit("HEAD", repository)
    assert commit == git(repository, "rev-parse", "HEAD")
    with pytest.raises(RunFailedError), earlier_package(commit, repository) as folder:
        assert folder is not None
        assert "earlier" in (folder / "megatron_edit" / "__init__.py").read_text()
        raise RunFailedError
    assert folder is not None and not folder.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    with earlier_package(None, repository) as nothing:
        assert nothing is None


def test_unusable_commits_are_refused(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value, the rule and the remedy on one line; the command line exits with 2."""
    with pytest.raises(CommitError, match=r"nope: must name one commit of .*; see git log"):
        resolve_commit("nope", repository)
    with pytest.raises(CommitError, match=r"HEAD~: must have megatron_edit/.*; name a later"):
        resolve_commit("HEAD~", repository)
    with pytest.raises(CommitError, match=r"HEAD: must be .* git checkout, and .*; clone"):
        resolve_commit("HEAD", tmp_path)
    with pytest.raises(SystemExit) as error:
        stragglers.parse(["--output", str(tmp_path / "x.json"), "--against", "nope"])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stragglers: argument --against: nope: must ")


def test_ranks_import_the_package_of_the_commit(repository: Path) -> None:
    """Also if the package of this checkout was imported before; child processes as well."""
    code = (
        "import megatron_edit.flags, subprocess, sys\n"
        "from pathlib import Path\n"
        "from frame.launch import import_package_from\n"
        f"import_package_from(Path({str(repository)!r}))\n"
        "import megatron_edit\n"
        "print(megatron_edit.VERSION, flush=True)\n"
        "child = 'import megatron_edit; print(megatron_edit.VERSION)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True, cwd='/')\n"
    )
    env = {"PYTHONPATH": f"{ROOT}:{BENCHMARKS}", "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/")
    assert done.stdout.splitlines() == ["here", "here"], done.stderr


def test_current_and_earlier_package_are_compared_in_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other repeat is in reverse order; pairs with a failed run are dropped."""
    commit = git(ROOT, "rev-parse", "HEAD")
    each, made = study(tmp_path, against=commit), list[tuple[str, bool]]()
    speeds = {True: iter((10.0, 20.0, 40.0)), False: iter((20.0, 10.0, 80.0))}

    def make(case: str, package: Path) -> float:
        assert (package / "megatron_edit" / "__init__.py").exists()
        made.append((case, package == REPOSITORY))
        if case == "b" and package != REPOSITORY:
            raise RunFailedError("unknown flag")
        return next(speeds[package == REPOSITORY]) if case == "a" else 1.0

    with each.progress(6):
        for repeat in range(3):
            each.run_repeat(repeat, ("a", "b"), str, make)
    here_first = [("a", True), ("a", False), ("b", True), ("b", False)]
    assert made == [*here_first, *reversed(here_first), *here_first]
    assert each.found == [10.0, 1.0, 1.0, 20.0, 40.0, 1.0] and len(each.failures) == 3
    (row,) = each.compare_packages()
    here, earlier, ratios = (
        Spread(10.0, 20.0, 40.0), Spread(10.0, 20.0, 80.0), Spread(0.5, 0.5, 2.0)
    )  # fmt: skip
    assert row == Comparison("a", "speed", 3, here, earlier, ratios)
    assert each.report("the page") == 1
    output = capsys.readouterr().out
    assert output == f"the page\n\n{comparison_table(commit, [row])}\n"
    assert (
        "| a | speed | 3 | 10 | 20 | 40 | 150.0 | 10 | 20 | 80 | 350.0 | 0.500 | 0.500 |" in output
    )
    (kept,) = read_one(tmp_path / "study.json")["against"]
    assert kept == to_json(row)
    assert "against" not in write_and_read(study(tmp_path))


def write_and_read(each: Numbers) -> dict[str, Any]:
    """Write a study and read its file."""
    each.write()
    return read_one(each.args.output)


# ---- a training


class FakeTraining:
    """A training whose ranks exit after a number of polls, each with an exit code."""

    def __init__(self, folder: Path, *ranks: tuple[int, int]) -> None:
        self.polls = 0
        self.all_but_first_ended = False
        self.training = Training("it", folder, self._others_are_done)
        for number, (after, code) in enumerate(ranks):
            self.training.add(number, lambda a=after, c=code: c if self.polls >= a else None)  # type: ignore[misc]

    def poll_once(self) -> None:
        """Count one poll."""
        self.polls += 1

    def _others_are_done(self) -> None:
        self.all_but_first_ended = True


def test_crash_fails_training_unless_it_was_done(tmp_path: Path) -> None:
    """A crash of any rank, with its last output; the first rank learns that the others are done."""
    good = FakeTraining(tmp_path, (3, 0), (2, 0))
    assert good.training.to_end(good.poll_once, limit=9, poll=0) == [0, 0]
    assert good.all_but_first_ended
    late = FakeTraining(tmp_path, (3, 0), (2, -11))
    late.training.log(1).write_text(f"x\n{DONE} y\n")
    assert late.training.to_end(late.poll_once, limit=9, poll=0) == [0, -11]
    early = FakeTraining(tmp_path, (9, 0), (2, 1))
    early.training.log(1).write_text("no room\n")
    with pytest.raises(RunFailedError, match=r"(?s)it: rank 1 exited with 1.*no room"):
        early.training.to_end(early.poll_once, limit=9, poll=0)
    never = FakeTraining(tmp_path, (9, 0))
    with pytest.raises(RunFailedError, match="not done after 0 s"):
        never.training.to_end(lambda: None, limit=0, poll=0)


def test_training_runs_until_condition_or_rank_exit(tmp_path: Path) -> None:
    """Also if a rank exits successfully before the condition holds."""
    each = FakeTraining(tmp_path, (9, 0))
    found: Iterator[Any] = iter([None, None, "it"])
    assert each.training.until(lambda: next(found), limit=9, poll=0) == "it"
    each.polls = 9
    with pytest.raises(RunFailedError, match="rank 0 exited with 0"):
        each.training.until(lambda: None, limit=9, poll=0)


def test_free_ports_are_not_reused_at_once() -> None:
    """A port that was just used may still be occupied."""
    first = free_ports(27900, 2)
    assert len(set(first)) == 2 and free_ports(first[-1], 1)[0] > first[-1] > first[0] > 27900


# ---- flags and pages


def test_training_flags_give_each_rank_one_micro_batch() -> None:
    """Also the flags of EDiT and the window of measured rounds."""
    flags = Model(micro_batch_size=3).flags(4, train_iters=7, log_interval=2)
    pairs = dict(pairwise(flags))
    assert pairs["--global-batch-size"] == "12" and pairs["--train-iters"] == "7"
    assert edit_flags(2, warmup_steps=0, log_dir="X")[:3] == [
        "--use-edit",
        "--edit-num-replicas",
        "2",
    ]
    assert Window.of_rounds(40, 2) == Window(60, 140, 10, 150)
    assert Window.of_rounds(7, 1) == Window(10, 17, 1, 18)


def test_table_columns_and_target_lines() -> None:
    """Missing values are empty cells; targets are upper or lower bounds."""
    spread = Spread.of([1.0, 4.0, 3.0])
    columns = (
        Column("it", "name"),
        Column("middle", "rate", "{:.1f}", 10),
        Column("all", lambda row: row["spread"], "{:g}", of=ALL),
        Column("most", "spread", "{:g}", of=("max",)),
    )
    rows = [{"name": "a", "rate": spread, "spread": spread},
            {"name": None, "rate": 2, "spread": None}]  # fmt: skip
    assert table_of(columns, rows).splitlines() == [
        "| it | middle | all: min | median | max | most |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | 30.0 | 1 | 3 | 4 | 4 |",
        "|  | 20.0 |  |  |  |  |",
    ]
    assert Column("name", "name").cells(RUN) == ["a"] and Spread.of([]) is None
    assert table(("a", "b"), [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert target_line("x", 0.9, 1.0) == "- x 0.900, wanted <= 1: pass"
    assert target_line("x", 0.9, 1.0, is_least=True) == "- x 0.900, wanted >= 1: MISS"


def test_console_is_read_incrementally(tmp_path: Path) -> None:
    """An incomplete line is not counted, and no line is read twice."""
    path, line = (
        tmp_path / "console",
        "iteration {:8d}/ 20 | elapsed time per iteration (ms): 7.5 |",
    )
    path.write_text(line.format(1) + "\n" + line.format(2)[:20])
    console = Console(path)
    assert console.read().last_iteration == 1
    path.write_text(f"{line.format(1)}\n{line.format(2)}\n")
    assert console.read().milliseconds() == {1: 7.5, 2: 7.5}
    assert read_console(path, path).last_iteration == 2


# ---- the folder


def test_benchmarks_do_not_import_parts_of_each_other() -> None:
    """Otherwise a change of one benchmark could change the numbers of another."""
    for path in BENCHMARKS.glob("*_parts/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        others = {m for m in modules if m and m.partition(".")[0].endswith("_parts")}
        assert {m.partition(".")[0] for m in others} <= {path.parent.name}, path
    for path in BENCHMARKS.glob("frame/*.py"):
        assert "_parts" not in path.read_text(encoding="utf-8"), path


def test_results_are_pages_pictures_and_small_files() -> None:
    """Each study has one page, one JSON file and at most one picture."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    files = [path for path in files if not path.parent.name.endswith(".runs")]  # git ignores these
    assert {path.suffix for path in files} == {".md", ".json", ".png"}
    pages = {path.stem for path in files if path.suffix == ".md"}
    assert {path.stem for path in files if path.suffix == ".json"} == pages
    assert {path.stem for path in files if path.suffix == ".png"} <= pages
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".json"}
    assert all(size <= MAX_RESULT_BYTES for size in sizes.values()), sizes
    for path in files:
        if path.suffix == ".json":
            assert read_series(path), path
