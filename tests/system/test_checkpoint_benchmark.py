"""benchmarks/checkpoints.py: its calculations on made-up numbers, and a small real run.

Would catch: files counted in the wrong part, a checkpoint counted before all ranks have finished
it, a first save that is timed, runs compared across repeats or modes, time counted in a span and
also in the enclosing one, and a target with the comparison reversed.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_parts.kinds import (
    ALL,
    AT_SYNC,
    KINDS,
    LEADER,
    MID_ROUND,
    STOCK_ALL,
    STOCK_ONE,
    Case,
    timed_cases,
    weighed_cases,
)
from checkpoint_parts.pretrain_saving import COMPLETE, Notes, SearchedOutput
from checkpoint_parts.report import Analysis, limit_bytes, markdown
from checkpoint_parts.runs import (
    OTHERS,
    OUTER,
    OWN,
    REST,
    Loop,
    Measurement,
    Save,
    count_bytes,
    saves_of,
)
from frame.gpt import Model
from frame.study import read_one, read_runs

from megatron_edit.observe.line_files import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
BASE = Case(ALL, "bf16", False, 2, 1, Model(), interval=6, num_saves=2, pause=0.1, async_pause=1.0)
PARAMETERS = 100


def save(position: str, stall: float, own: int, outer: int = 0, others: int = 0) -> Save:
    """Make a save of two ranks, with sizes in bytes per parameter."""
    sizes = {OWN: own, OUTER: outer, OTHERS: others, REST: 0}
    return Save(
        iteration=6,
        position=position,
        num_bytes={part: PARAMETERS * size for part, size in sizes.items()},
        stalls=[0.1, stall],
        spans={
            "": 0.1 * stall,
            "gather parameters": 0.1 * stall if outer else 0.0,
            "save/write": (0.8 if outer else 0.9) * stall,
        },
        complete=2 * stall,
        finalized=0.0,
        loop=0.5 * stall if outer else 0.6 * stall,
    )


def run(kind: str, turn: int | None, saves: list[Save], *, is_async: bool = False) -> Measurement:
    """Make a run of a kind."""
    case = next(c for c in timed_cases(BASE, [kind]) if c.is_async == is_async)
    return Measurement(case, turn, PARAMETERS, saves, [0.0, 0.0])


def test_cases_have_expected_flags_and_intervals() -> None:
    """`all` saves alternately within rounds and at syncs; `leader` at syncs, or after the due
    step."""
    flags = {case.name: case.flags("F") for case in timed_cases(BASE, KINDS)}
    assert len(flags) == 8
    for case in timed_cases(BASE, KINDS):
        words = case.flags("F")
        assert ("--async-save" in words) == case.is_async
        assert ("--use-edit" in words) == (case.kind in (LEADER, ALL))
        assert case.tau == {ALL: 4}.get(case.kind, 3) and case.warmup_steps == 0
        assert case.world_size == (1 if case.kind == STOCK_ONE else 2)
    weighed = weighed_cases(BASE, KINDS, precisions=["fp32"], replicas=[4])
    assert len({case.name for case in weighed} | flags.keys()) == 8 + 3 + 2 + 1
    between_syncs = weighed[-1]
    syncs = {between_syncs.warmup_steps + between_syncs.tau * number for number in range(1, 9)}
    assert between_syncs.kind == LEADER
    assert not syncs & set(range(0, 99, between_syncs.interval))


def test_bytes_are_counted_by_part(tmp_path: Path) -> None:
    """Every file is counted in exactly one part."""
    sizes = {
        "metadata.json": 1, "__0_0.distcp": 20, "edit/edit.json": 300, "edit/random/r0.pt": 4000,
        "edit/outer/__0_0.distcp": 50000, "edit/replica_1/__0_0.distcp": 600000,
    }  # fmt: skip
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert count_bytes(tmp_path) == {OWN: 21, OUTER: 50000, OTHERS: 600000, REST: 4300}


def test_saves_are_read_from_complete_notes(tmp_path: Path) -> None:
    """Saves that are not complete on all ranks, and incomplete lines, do not count."""
    iteration = tmp_path / "iter_0000006" / "edit"
    iteration.mkdir(parents=True)
    (iteration / "edit.json").write_text(json.dumps({"has_anchor": True}))
    first: list[dict[str, Any]] = [
        {"save": 6, "began": 10.0, "ended": 11.0, "spans": {"": 1.0}},
        {"finalize": 0.2, "began": 11.5},
        {"complete": 6, "at": 12.0},
        {"finalize": 0.7, "began": 12.5},
        {"save": 12, "began": 20.0, "ended": 21.0, "spans": {"": 1.0}},
        {"complete": 12, "at": 22.0},
    ]
    second: list[dict[str, Any]] = [{"save": 6, "began": 9.5, "ended": 11.5, "spans": {"": 2.0}}]
    assert saves_of([first, second], tmp_path, BASE) == []  # no rank has continued yet
    first += iterations({6: 5.0})
    second += iterations({6: 3.0})
    (found,) = saves_of([first, second], tmp_path, BASE)
    assert found.stalls == [1.0, 2.0] and found.stall == 2.0 and found.spans == {"": 2.0}
    assert (found.complete, found.finalized, found.position) == (2.5, 0.2, MID_ROUND)
    assert found.loop is None
    file = tmp_path / "notes"
    assert read_json_lines(file) == []
    file.write_text('{"complete": 6, "at": 1.0}\n{"complete"')
    assert read_json_lines(file) == [{"complete": 6, "at": 1.0}]


def iterations(longer: dict[int, float]) -> list[dict[str, Any]]:
    """Make notes of iterations of one second, or longer by the given seconds."""
    found, at = [], 0.0
    for number in range(1, max(longer) + BASE.span + 1):
        found.append({"iteration": number, "at": at})
        at += 1.0 + longer.get(number, 0.0)
    return found


def test_save_cost_compares_like_iterations() -> None:
    """Cost is relative to iterations at the same position in a round, while no save is written."""
    # Rounds of 4: 14 and 22 have the position of the save, at 18; at 10 a save is being written.
    longer = {10: 9.0, 13: 7.0, 14: 0.5, 18: 3.0, 19: 1.0, 20: 8.0, 22: 0.7}
    notes = [{"save": 6, "began": 7.0}, {"save": 18, "began": 37.0}, *iterations(longer)]
    loop = Loop(notes, BASE, {6: 20.0, 18: 40.0})
    assert loop.duration(18) == pytest.approx(6.0)
    assert loop.duration(22) == pytest.approx(2.7)
    assert loop.cost(18) == pytest.approx(6.0 - (2.5 + 2.7) / 2)
    assert loop.duration(24) is None and loop.cost(24) is None
    assert Loop(notes, BASE, {6: 20.0}).cost(18) == pytest.approx(6.0 - 2.5)
    assert not any(BASE.is_same_place(18, other) for other in (12, 16, 17, 19, 20))


def test_spans_count_only_their_own_time() -> None:
    """Each span counts its own time; outside a save no time is counted."""
    file = io.StringIO()
    notes = Notes(file)
    inner = notes.around_span(lambda: time.sleep(0.02), "inner")

    def around() -> None:
        inner()
        time.sleep(0.01)

    outer = notes.around_span(around, "outer")
    inner()
    assert notes._spans == {}
    notes.around_span(outer, "")()
    assert set(notes._spans) == {"", "outer", "outer/inner"}
    assert notes._spans["outer/inner"] >= 0.02
    assert 0.01 <= notes._spans["outer"] < 0.02 and notes._spans[""] < 0.01
    console = io.StringIO()
    watched = SearchedOutput(console, COMPLETE, notes)
    print("[edit] checkpoint of iteration 12 is complete: F (form all)", file=watched)
    print("[edit] checkpoint of iteration 18 waits", file=watched)
    assert console.getvalue().count("\n") == 2
    (line,) = file.getvalue().splitlines()
    assert json.loads(line)["complete"] == 12


def test_byte_limits_per_parameter() -> None:
    """The theoretical bytes per parameter of each kind."""
    assert limit_bytes(STOCK_ONE, "bf16", 2, "") == 14
    assert limit_bytes(LEADER, "bf16", 4, AT_SYNC) == 18
    assert limit_bytes(ALL, "fp32", 3, MID_ROUND) == 3 * 16 + 8


def test_ratios_and_verdicts() -> None:
    """Ratios are within a repeat and mode, without the first save, for the slowest rank."""
    runs = []
    for turn, drift in enumerate((1.0, 2.0, 4.0)):
        stock, one = save("", drift, 14), save("", 9.0, 14)
        runs += [
            run(STOCK_ONE, turn, [one, stock, stock]),
            run(STOCK_ALL, turn, [one, save("", 0.5 * drift, 14)]),
            run(LEADER, turn, [one, save(AT_SYNC, (1.0 + 0.1 * turn) * drift, 14, 4)]),
            run(
                ALL, turn, [save(MID_ROUND, 9.0, 14, 8, 14), save(AT_SYNC, 1.5 * drift, 14, 4, 14)]
            ),
        ]
    runs.append(run(LEADER, 0, [one, save(AT_SYNC, 7.0, 14, 4)], is_async=True))
    analysis = Analysis(runs)
    timings = {(t.kind, t.is_async, t.position): t for t in analysis.timings()}
    leader = timings[LEADER, False, AT_SYNC]
    assert leader.of_one is not None and leader.of_all is not None
    assert vars(leader.of_one) == pytest.approx({"min": 1.0, "median": 1.1, "max": 1.2})
    assert leader.of_all.median == pytest.approx(2.2)
    assert leader.loop_of_one is not None and leader.loop_of_all is not None
    assert leader.loop_of_one.median == pytest.approx(1.1 * 5 / 6)
    assert leader.loop_of_all.median == pytest.approx(2.2 * 5 / 6)
    assert leader.of_one_aside is not None
    assert leader.of_one_aside.median == pytest.approx(1.1 * 0.9)
    spans = {"rest": 0.22, "gather parameters": 0.22, "write": 1.76}
    assert leader.spans == pytest.approx(spans)
    assert leader.complete.median == pytest.approx(4.4)
    assert timings[LEADER, True, AT_SYNC].of_one is None
    assert (ALL, False, MID_ROUND) not in timings
    weights = {(w.kind, w.position): w for w in analysis.weights()}
    heavy, light = weights[ALL, MID_ROUND], weights[LEADER, AT_SYNC]
    assert heavy.parts == {OWN: 14, OUTER: 8, OTHERS: 14, REST: 0} and heavy.limit == 36
    assert heavy.of_stock is not None and light.of_stock is not None
    assert heavy.of_stock.median == pytest.approx(36 / 14)
    assert light.of_stock.max == pytest.approx(18 / 14)
    verdicts = analysis.verdicts()
    bytes_pass, leader_pass = [True, True], [True, False, True, False]  # of one rank, of all
    assert [v.passes for v in verdicts] == [*bytes_pass, *leader_pass, *4 * [False]]
    text = markdown(analysis.weights(), analysis.timings(), verdicts)
    *tables, marks = text.split("\n\n")
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert [line.endswith("pass") for line in marks.splitlines()] == [v.passes for v in verdicts]


@pytest.mark.full
def test_small_real_run(tmp_path: Path) -> None:
    """The bytes of real saves exceed the theoretical ones by at most 10 %."""
    output = tmp_path / "checkpoints.json"
    script = str(ROOT / "benchmarks/checkpoints.py")
    argv = [sys.executable, script, "--quick", "--output", str(output), "--folder", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert output.with_suffix(".png").stat().st_size > 10_000
    record, runs = read_one(output), read_runs(output, Measurement)
    assert not record["failures"] and len(runs) == record["num_runs"]
    assert not list(tmp_path.glob("checkpoints-*"))
    assert {(w["kind"], w["position"]) for w in record["bytes"]} == {
        (STOCK_ONE, ""), (ALL, AT_SYNC), (ALL, MID_ROUND)
    }  # fmt: skip
    for weight in record["bytes"]:
        assert weight["limit"] <= weight["total"]["median"] <= 1.1 * weight["limit"]
    for one in runs:
        for each in one["saves"]:
            assert sum(each["spans"].values()) == pytest.approx(max(each["stalls"]), abs=0.1)
            handed = any(path.endswith("hand over") for path in each["spans"])
            assert handed == one["case"]["is_async"]
