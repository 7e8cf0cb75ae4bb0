"""benchmarks/frame, the common base of all benchmarks, tested without a training.

Would catch: a study that repeats finished runs, or reuses runs of other settings; a failed run that
ends the others; numbers changed by a file; a crash after training that fails a run, and one before
its end that does not; raw data among the results.
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
from frame.page import ALL, Column, Spread, table, table_of, target_line
from frame.readings import Console, read_console
from frame.study import (
    Study,
    alternate_order,
    common_flags,
    read_one,
    read_series,
    runs_folder,
    to_json,
    write_results,
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


def study(folder: Path, *, resume: bool = False, tau: int = 4) -> Numbers:
    """Return a study that writes study.json in a folder."""
    args = argparse.Namespace(output=folder / "study.json", resume=resume, tau=tau)
    return Numbers("study", args, {"tau": tau})


# ---- a study


def test_study_resumes_without_repeating_finished_runs(tmp_path: Path) -> None:
    """With `resume` no run is repeated; without it, or with other settings, all runs are."""
    made: list[str] = []

    def run(each: Study[float], key: str) -> Run:
        def make() -> Run:
            made.append(key)
            return RUN

        return each.once(key, make)

    first = study(tmp_path)
    assert [run(first, key) for key in "ab"] == [RUN, RUN] and made == ["a", "b"]
    resumed = study(tmp_path, resume=True)
    assert [run(resumed, key) for key in "abc"] == [RUN] * 3 and made == ["a", "b", "c"]
    other = study(tmp_path, resume=True, tau=8)
    assert run(other, "a") == RUN and made == [*"abc", "a"]
    run(study(tmp_path), "a")
    assert made == [*"abca", "a"]
    assert len(list(runs_folder(tmp_path / "study.json").iterdir())) == 1


def test_failed_run_does_not_end_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is recorded in one line, printed in full, and repeated when the study is resumed."""

    def fail() -> float:
        raise RunFailedError("rank 0 exited with 1; it said last:\nno room")

    each = study(tmp_path)
    assert each.measure("repeat 1", fail) is None
    assert each.measure("repeat 2", lambda: 2.0) == 2.0
    each.write()
    assert each.failures == ["repeat 1: rank 0 exited with 1; it said last: no room"]
    assert "no room" in capsys.readouterr().err
    assert read_one(tmp_path / "study.json")["failures"] == each.failures
    again = study(tmp_path, resume=True)
    assert again.once("repeat 1", lambda: 1.0) == 1.0


def test_results_round_trip(tmp_path: Path) -> None:
    """Numbers are rounded, None values are kept; tables of older files are read, too."""
    rows = [to_json(RUN) | {"rate": 100e6 / 3}, to_json(RUN) | {"spread": None}]
    path = tmp_path / "x.json"
    write_results(path, "x", {"rows": rows, "odd": [{"a": 1}, {"b": 2}], "none": []})
    found = read_one(path)
    assert found["rows"] == [rows[0] | {"rate": 33_333_000.0}, rows[1]]
    assert (found["odd"], found["none"]) == ([{"a": 1}, {"b": 2}], [])
    assert json.loads(path.read_text())["study"] == "x"
    table = {"columns": ["a", "b: min, median, max"], "rows": [[1, [2, 3, 4]], [5, None]]}
    path.write_text(json.dumps({"study": "x", "series": {"all": {"rows": table}}}))
    spread = {"min": 2, "median": 3, "max": 4}
    assert read_one(path)["rows"] == [{"a": 1, "b": spread}, {"a": 5, "b": None}]
    study(tmp_path, tau=8).write()
    own = read_one(tmp_path / "study.json")
    assert own["configuration"] == {"tau": 8} and own["rows"] == [{"tau": 8, "x": None}]
    assert own["versions"]["cores"] >= 1


def test_repeats_alternate_order_and_common_flags_are_split_off() -> None:
    """Every other repeat is in reverse order; common flags are listed once."""
    assert [alternate_order("abc", repeat) for repeat in range(3)] == [[*"abc"], [*"cba"], [*"abc"]]
    flags = {"x": ["--a", "1", "--b"], "y": ["--a", "1"], "z": ["--a", "1", "--c", "--b"]}
    assert common_flags(flags) == {"common": "--a 1", "x": "--b", "y": "", "z": "--c --b"}


# ---- a training


class FakeTraining:
    """A training whose ranks exit after a number of polls, each with an exit code."""

    def __init__(self, folder: Path, *ranks: tuple[int, int]) -> None:
        self.polls = 0
        self.all_but_first_ended = False
        self.training = Training("it", folder, self._others_are_done)
        for after, code in ranks:
            self.training.add(lambda a=after, c=code: c if self.polls >= a else None)  # type: ignore[misc]

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
