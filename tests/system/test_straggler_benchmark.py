"""benchmarks/stragglers.py: its calculations on made-up numbers, and a small real run.

Would catch: replicas that disagree on which one is slow, a first round or start-up that is
measured, a speed over partial steps, and runs compared across scenarios or repeats.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from frame.study import read_one
from straggler_parts.kinds import (
    A_EDIT,
    EDIT,
    IDEAL,
    KINDS,
    STOCK,
    Job,
    Plan,
    check_scenario,
)
from straggler_parts.report import Analysis, markdown
from straggler_parts.runs import (
    Measurement,
    read_marks,
    round_lengths,
    spans_by_syncs,
    spans_by_time,
    step_lengths,
)

ROOT = Path(__file__).resolve().parents[2]
STEP = 0.05
TOKENS = 64


def job(name: str, kind: str, *, phase: float = 0.0, seed: int = 1) -> Job:
    """Make a job with four replicas and tau 128."""
    plan = Plan(name, 4, STEP, seed)
    return Job(kind, plan, tau=128, rounds=2, seconds=6.0, phase=phase)


def steady(start: float, step: float, count: int) -> list[float]:
    """Make marks of a replica with constant step time."""
    return [start + step * number for number in range(count)]


def measurement(kind: str, speed: float, *, scenario: str = "4x", repeat: int = 0,
                waits: tuple[float, ...] = ()) -> Measurement:  # fmt: skip
    """Make a run of four replicas, the last of which takes four times as long."""
    return Measurement(
        scenario=scenario,
        kind=kind,
        repeat=repeat,
        step_seconds=[0.05] * 3 + [0.2],
        tokens_per_second=speed,
        round_seconds=[6.4] * len(waits),
        syncs=[{"seconds": {"wait": wait, "exposed": wait + 0.02}} for wait in waits],
        load=[0.0, 0.0],
    )


def test_random_plan_is_equal_in_every_process() -> None:
    """In each step exactly one random replica is slow, and the plan survives serialization."""
    plan = job("random", IDEAL).plan
    other = Plan(**json.loads(plan.to_json()))
    assert other == plan
    for step in range(50):
        lengths = [other.step_seconds(replica, step) for replica in range(4)]
        assert sorted(lengths) == pytest.approx([STEP] * 3 + [2 * STEP])
        assert lengths.index(max(lengths)) == plan.drawn_replica(step)
    draws = [plan.drawn_replica(step) for step in range(50)]
    assert set(draws) == {0, 1, 2, 3}
    assert draws != [job("random", IDEAL, seed=2).plan.drawn_replica(step) for step in range(50)]


def test_plans_slow_down_last_replica() -> None:
    """Steps of the last replica take a multiple of the time of the others."""
    plan = job("4x", IDEAL).plan
    assert [plan.step_seconds(r, 7) for r in range(4)] == pytest.approx([STEP] * 3 + [4 * STEP])
    assert {job("equal", IDEAL).plan.step_seconds(r, 7) for r in range(4)} == {STEP}


@pytest.mark.parametrize(
    ("name", "interval", "seconds"),
    [("equal", 128, 6.4), ("random", 128, 8.0), ("2x", 64, 6.4), ("4x", 32, 6.4)],
)
def test_rounds_of_edit_and_aedit_last_equally_long(
    name: str, interval: int, seconds: float
) -> None:
    """A-EDiT's rounds take as long as EDiT's."""
    for kind in KINDS:
        assert job(name, kind).interval == interval
        assert job(name, kind).round_seconds == pytest.approx(seconds)
    flags = job(name, A_EDIT).flags("LOG")
    assert "--edit-sync-interval" not in flags
    assert float(flags[flags.index("--edit-sync-seconds") + 1]) == pytest.approx(seconds)
    assert str(interval) == job(name, EDIT).flags("LOG")[-1]
    assert job(name, IDEAL).edit_steps == (1 + interval, 1 + 3 * interval)
    later = job(name, A_EDIT, phase=0.5).round_seconds
    assert later == pytest.approx(seconds * (1 + 0.5 / interval))  # half a slow step
    assert "--use-edit" not in job(name, STOCK).flags("LOG")


def test_unknown_scenarios_are_refused() -> None:
    """They are not taken for a scenario with equal replicas."""
    for name in ("0x", "1x", "slow", "x"):
        with pytest.raises(ValueError):
            check_scenario(name)


def test_spans_by_time_cover_one_common_span() -> None:
    """The span begins when all replicas have started, and has complete steps of all of them."""
    marks = [steady(0.05, 0.1, 100), steady(2.0, 0.4, 20)]
    marks[1] = marks[1][:1] + steady(2.7, 0.4, 19)  # a slow first step
    found = spans_by_time(marks, 3.0)  # from 4.3 to 7.3
    assert found == [(43, 72), (5, 12)]
    assert step_lengths(marks, found) == pytest.approx([0.1, 0.4])
    assert spans_by_time(marks, 5.7) is None  # replica 0 ends at 9.95
    assert spans_by_time([marks[0], marks[1][:5]], 3.0) is None
    with pytest.raises(ValueError, match="all that is measured"):
        spans_by_time(marks, 0.3)


def test_spans_by_syncs_start_at_first_sync() -> None:
    """Each replica is measured over its own steps of the rounds, without earlier steps."""
    inner_steps = [[7, 2], [20, 5], [24, 6], [20, 5]]
    syncs: list[dict[str, Any]] = [{"inner_steps": steps} for steps in inner_steps]
    marks = [
        [*steady(0.0, 0.3, 8), *steady(5.0, 0.1, 20), *steady(7.2, 0.1, 24), 9.8],
        [*steady(0.0, 1.0, 3), *steady(5.0, 0.4, 5), *steady(7.2, 0.4, 6), 9.8],
    ]
    found = spans_by_syncs(marks, syncs[:3], 2)
    assert found == [(8, 52), (3, 14)]
    assert step_lengths(marks, found) == pytest.approx([4.8 / 44, 4.8 / 11])
    assert round_lengths(marks[0], syncs[:3], 2) == pytest.approx([2.2, 2.6])
    assert spans_by_syncs(marks, syncs[:2], 2) is None
    assert spans_by_syncs([marks[0], marks[1][:14]], syncs, 2) is None  # still in the sync


def test_incomplete_line_is_no_mark(tmp_path: Path) -> None:
    """Files are read while replicas write them."""
    path = tmp_path / "marks"
    assert read_marks(path) == []
    path.write_text("12.5\n13.25\n14.")
    assert read_marks(path) == [12.5, 13.25]


def test_ratios() -> None:
    """Ratios are within a repeat; waiting is in steps of the slowest replica, of 0.2 s."""
    runs = [measurement(IDEAL, 1.0, scenario="random"), measurement(EDIT, 0.95, scenario="random")]
    for repeat, drift in enumerate((1.0, 2.0, 4.0)):
        runs += [
            measurement(IDEAL, 100.0 * drift, repeat=repeat),
            measurement(STOCK, 25.0 * drift, repeat=repeat),
            measurement(A_EDIT, (96.0 + repeat) * drift, repeat=repeat, waits=(0.1, 0.1, 0.5)),
        ]
    analysis = Analysis(runs)
    rows = {(row["scenario"], row["kind"]): row for row in analysis.rows()}
    timed = rows["4x", A_EDIT]
    assert vars(timed["of_ideal"]) == pytest.approx({"min": 0.96, "median": 0.97, "max": 0.98})
    assert timed["of_stock"].median == pytest.approx(3.88)
    assert vars(timed["waited_steps"]) == pytest.approx({"min": 0.5, "median": 0.5, "max": 2.5})
    assert timed["synced"].max == pytest.approx(0.02)
    assert rows["4x", STOCK]["waited"] is None and rows["random", EDIT]["of_stock"] is None
    table = markdown(analysis.rows())
    assert len(table.splitlines()) == 2 + 5
    assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.full
def test_small_real_run(tmp_path: Path) -> None:
    """Real trainings of all kinds; with A-EDiT the fast replica makes more steps."""
    output = tmp_path / "stragglers.json"
    script = str(ROOT / "benchmarks/stragglers.py")
    argv = [sys.executable, script, "--quick", "--output", str(output)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n|") == 1 + 2 * len(KINDS)
    results = read_one(output)
    assert not results["failures"] and len(results["runs"]) == 2 * len(KINDS)
    files = (tmp_path / "stragglers.runs").iterdir()
    found: list[Measurement] = [pickle.loads(file.read_bytes()) for file in files]
    runs = {(run.scenario, run.kind): run for run in found}
    assert runs["4x", EDIT].syncs[0]["inner_steps"] == [4, 4]
    fast, slow = runs["4x", A_EDIT].syncs[0]["inner_steps"]
    assert fast >= 2 * slow >= 2
    assert runs["4x", A_EDIT].tokens_per_second > 1.2 * runs["4x", EDIT].tokens_per_second
    for run in runs.values():
        speed = sum(TOKENS / seconds for seconds in run.step_seconds)
        assert run.tokens_per_second == pytest.approx(speed)
