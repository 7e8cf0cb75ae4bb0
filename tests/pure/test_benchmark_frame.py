"""benchmarks/frame: what all benchmarks stand on, without a training.

Would catch: a study that measures again what it has, or takes runs of other settings for its own;
a failed run that ends the others; numbers that come back from a file as others; a crash after
training that fails a run, and one before its end that does not; raw data among the results.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from frame.gpt import Model, Window, edit_flags
from frame.launch import DONE, RunFailedError, Training, free_ports
from frame.page import Spread, cells, mark_line, middle, table
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


def study(folder: Path, *, series: str = "all", resume: bool = False, tau: int = 4) -> Study:
    """Of two numbers; its summary is what there is."""
    output = folder / "study.json"
    args = argparse.Namespace(output=output, series=series, resume=resume)
    return Study("study", args, {"tau": tau}, lambda: {"rows": [{"tau": tau, "x": None}]})


# ---- a study


def test_a_study_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    """With `resume` nothing is made twice; without it, or with other settings, all of it is."""
    made: list[str] = []

    def run(each: Study, key: str) -> Run:
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
        assert each.measure("turn 1", float, fail, str) is None
        assert each.measure("turn 2", float, lambda: 2.0, str) == 2.0
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


def test_cells_and_marks() -> None:
    """An empty cell where there is nothing; a mark is passed from the right side."""
    spread = Spread.of([1.0, 4.0, 3.0])
    assert middle(spread, "{:.1f}", 10) == "30.0" and middle(None, "{}") == ""
    assert cells(spread, "{:g}") == ["1", "3", "4"] and cells(None, "{}") == [""] * 3
    assert cells(spread, "{:g}", of=("max",)) == ["4"] and Spread.of([]) is None
    assert table(("a", "b"), [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert mark_line("x", 0.9, 1.0) == "- x 0.900, wanted <= 1: pass"
    assert mark_line("x", 0.9, 1.0, is_least=True) == "- x 0.900, wanted >= 1: MISS"


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
