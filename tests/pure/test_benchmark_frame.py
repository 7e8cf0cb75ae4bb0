"""benchmarks/frame: what all benchmarks stand on, without a training.

Would catch: a study that measures again what it has, or takes runs of other settings for its own;
a failed run that ends the others; numbers that come back from a file as others; a crash after
training that fails a run, and one before its end that does not; raw data among the results; an
earlier package that is not the one that is measured, or is left behind; ratios across turns.
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
    Compared,
    comparison_table,
    earlier_package,
    resolve_commit,
)
from frame.gpt import Model, Window, edit_flags
from frame.launch import DONE, REPOSITORY, RunFailedError, Training, free_ports
from frame.page import ALL, Column, Spread, mark_line, table, table_of
from frame.readings import Console, read_console
from frame.study import (
    Study,
    common_flags,
    from_json,
    read_one,
    read_runs,
    read_series,
    runs_folder,
    there_and_back,
    to_json,
    write_series,
)

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
MOST_BYTES = 31_000


@dataclass(frozen=True)
class Part:
    """Of a run."""

    first: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """As benchmarks have them: nested, with tuples and what may be missing."""

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
    """Of one number a run; its summary is what there is."""

    def summary(self) -> dict[str, Any]:
        """A row."""
        return {"rows": [{"tau": self.args.tau, "x": None}]}

    def numbers(self, run: float) -> dict[str, float | None]:
        """The number, and one that nobody knows."""
        return {"speed": run, "unknown": None}


def study(
    folder: Path, *, series: str = "all", resume: bool = False, tau: int = 4,
    against: str | None = None,
) -> Numbers:  # fmt: skip
    """A study whose OUTPUT is in a folder."""
    output = folder / "study.json"
    args = argparse.Namespace(output=output, series=series, resume=resume, tau=tau, against=against)
    return Numbers("study", args, float, {"tau": tau})


# ---- a study


def test_a_study_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    """With `resume` nothing is made twice; without it, or with other settings, all of it is."""
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

    series = study(tmp_path, series="again")  # leaves those of the other series alone
    run(series, "a")
    assert made == [*"abca", "a"] and len(read_runs(tmp_path / "study.json", Run)) == 5
    run(study(tmp_path), "a")
    assert made == [*"abcaa", "a"] and len(read_runs(tmp_path / "study.json", Run)) == 2


def test_a_run_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is noted in one line, told in whole, and made again when the study goes on."""

    def fail() -> float:
        raise RunFailedError("rank 0 exited with 1; it said last:\nno room")

    each = study(tmp_path)
    with each.progress(2):
        assert each.measure("turn 1", fail) is None
        assert each.measure("turn 2", lambda: 2.0) == 2.0
    each.write()
    assert each.failures == ["turn 1: rank 0 exited with 1; it said last: no room"]
    assert "no room" in capsys.readouterr().err
    assert read_one(tmp_path / "study.json")["failures"] == each.failures
    again = study(tmp_path, resume=True)
    assert again.once("turn 1", float, lambda: 1.0) == 1.0


def test_series_share_a_file(tmp_path: Path) -> None:
    """Each is written anew without the others; rows come back as they were, also what is None."""
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


def test_files_are_small_and_say_the_same(tmp_path: Path) -> None:
    """Tables have their names once; numbers as many digits as are asked for."""
    rows = [to_json(RUN) | {"rate": 100e6 / 3}, to_json(RUN) | {"spread": None}]
    path = tmp_path / "x.json"
    write_series(path, "x", {"all": {"rows": rows, "odd": [{"a": 1}, {"b": 2}]}}, digits=3)
    found = read_one(path)
    assert found["rows"] == [rows[0] | {"rate": 33_300_000.0}, rows[1]]
    assert found["odd"] == [{"a": 1}, {"b": 2}]
    assert path.read_text().count('"factors"') == 1
    assert json.loads(path.read_text())["study"] == "x"


def test_dataclasses_come_back_from_json() -> None:
    """Through a text, with their types."""
    assert from_json(Run, json.loads(json.dumps(to_json(RUN)))) == RUN
    assert isinstance(from_json(float, 1), float) and from_json(int, 1) == 1


def test_turns_and_flags() -> None:
    """There and back; flags that all have are told once."""
    assert [there_and_back("abc", turn) for turn in range(3)] == [[*"abc"], [*"cba"], [*"abc"]]
    flags = {"x": ["--a", "1", "--b"], "y": ["--a", "1"], "z": ["--a", "1", "--c", "--b"]}
    assert common_flags(flags) == {"common": "--a 1", "x": "--b", "y": "", "z": "--c --b"}


# ---- beside an earlier package


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git checkout with two commits; the first has no package."""
    root = tmp_path / "repository"
    package = root / "megatron_edit" / "__init__.py"
    git(tmp_path, "init", "--quiet", str(root))
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    git(root, *who, "commit", "--quiet", "--allow-empty", "-m", "first")
    package.parent.mkdir()
    package.write_text("VERSION = 'earlier'\n")
    git(root, "add", ".")
    git(root, *who, "commit", "--quiet", "-m", "second")
    package.write_text("VERSION = 'here'\n")
    return root


def git(folder: Path, *words: str) -> str:
    """What git prints."""
    argv = ["git", "-C", str(folder), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_earlier_package_is_checked_out_and_removed(repository: Path) -> None:
    """As it was committed, also where what is done with it fails."""
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


def test_commits_that_cannot_be_measured(
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
    """Although that of this checkout has been imported before; their children do, too."""
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


def test_pairs_of_a_turn_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In alternation, backwards in every other turn; a pair with a failed run does not count."""
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
        for turn in range(3):
            each.turn(turn, ("a", "b"), str, make)
    here_first = [("a", True), ("a", False), ("b", True), ("b", False)]
    assert made == [*here_first, *reversed(here_first), *here_first]
    assert each.found == [10.0, 1.0, 1.0, 20.0, 40.0, 1.0] and len(each.failures) == 3
    (row,) = each.compared()
    here, earlier, ratios = (
        Spread(10.0, 20.0, 40.0), Spread(10.0, 20.0, 80.0), Spread(0.5, 0.5, 2.0)
    )  # fmt: skip
    assert row == Compared("a", "speed", 3, here, earlier, ratios)
    assert each.report("the page") == 1
    said = capsys.readouterr().out
    assert said == f"the page\n\n{comparison_table(commit, [row])}\n"
    assert "| a | speed | 3 | 10 | 20 | 40 | 150.0 | 10 | 20 | 80 | 350.0 | 0.500 | 0.500 |" in said
    (kept,) = read_one(tmp_path / "study.json")["against"]
    assert kept == to_json(row)
    assert "against" not in read_one_of(study(tmp_path))


def read_one_of(each: Numbers) -> dict[str, Any]:
    """What a study writes."""
    each.write()
    return read_one(each.args.output)


# ---- a training


class Ended:
    """A training whose ranks end after so many looks, with an exit code."""

    def __init__(self, folder: Path, *ranks: tuple[int, int]) -> None:
        self.looks = 0
        self.all_but_first_ended = False
        self.training = Training("it", folder, self._others_are_done)
        for number, (after, code) in enumerate(ranks):
            self.training.add(number, lambda a=after, c=code: c if self.looks >= a else None)  # type: ignore[misc]

    def look(self) -> None:
        """One more."""
        self.looks += 1

    def _others_are_done(self) -> None:
        self.all_but_first_ended = True


def test_a_crash_counts_unless_training_was_over(tmp_path: Path) -> None:
    """Of any rank, with its last words; and the first rank hears that the others are done."""
    good = Ended(tmp_path, (3, 0), (2, 0))
    assert good.training.to_end(good.look, limit=9, poll=0) == [0, 0]
    assert good.all_but_first_ended
    late = Ended(tmp_path, (3, 0), (2, -11))
    late.training.log(1).write_text(f"x\n{DONE} y\n")
    assert late.training.to_end(late.look, limit=9, poll=0) == [0, -11]
    early = Ended(tmp_path, (9, 0), (2, 1))
    early.training.log(1).write_text("no room\n")
    with pytest.raises(RunFailedError, match=r"(?s)it: rank 1 exited with 1.*no room"):
        early.training.to_end(early.look, limit=9, poll=0)
    never = Ended(tmp_path, (9, 0))
    with pytest.raises(RunFailedError, match="not done after 0 s"):
        never.training.to_end(lambda: None, limit=0, poll=0)


def test_what_is_looked_for_ends_a_training(tmp_path: Path) -> None:
    """Unless a rank ends first, however it does."""
    each = Ended(tmp_path, (9, 0))
    found: Iterator[Any] = iter([None, None, "it"])
    assert each.training.until(lambda: next(found), limit=9, poll=0) == "it"
    each.looks = 9
    with pytest.raises(RunFailedError, match="rank 0 exited with 0"):
        each.training.until(lambda: None, limit=9, poll=0)


def test_ports_are_free_and_go_on() -> None:
    """The same port is not used twice in a row: it may linger."""
    first = free_ports(27900, 2)
    assert len(set(first)) == 2 and free_ports(first[-1], 1)[0] > first[-1] > first[0] > 27900


# ---- flags and pages


def test_flags_of_a_training() -> None:
    """One micro-batch on each rank."""
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


def test_columns_and_marks() -> None:
    """An empty cell where there is nothing; a mark is passed from the right side."""
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
    assert mark_line("x", 0.9, 1.0) == "- x 0.900, wanted <= 1: pass"
    assert mark_line("x", 0.9, 1.0, is_least=True) == "- x 0.900, wanted >= 1: MISS"


def test_consoles_are_read_as_they_grow(tmp_path: Path) -> None:
    """A line that is still being written does not count, and none is read twice."""
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


def test_parts_import_the_frame_and_never_each_other() -> None:
    """Else a change of one benchmark changes the numbers of another."""
    for path in BENCHMARKS.glob("*_parts/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        others = {m for m in modules if m and m.partition(".")[0].endswith("_parts")}
        assert {m.partition(".")[0] for m in others} <= {path.parent.name}, path
    for path in BENCHMARKS.glob("frame/*.py"):
        assert "_parts" not in path.read_text(encoding="utf-8"), path


def test_results_are_pages_pictures_and_small_files() -> None:
    """One page and one JSON file a study, and at most one picture."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    files = [path for path in files if not path.parent.name.endswith(".runs")]  # git ignores these
    assert {path.suffix for path in files} == {".md", ".json", ".png"}
    pages = {path.stem for path in files if path.suffix == ".md"}
    assert {path.stem for path in files if path.suffix == ".json"} == pages
    assert {path.stem for path in files if path.suffix == ".png"} <= pages
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".json"}
    assert all(size <= MOST_BYTES for size in sizes.values()), sizes
    for path in files:
        if path.suffix == ".json":
            assert read_series(path), path
