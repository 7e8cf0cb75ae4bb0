"""benchmarks/elastic_storm.py: its draws and calculations on made-up numbers, and small real runs.

Would catch: draws that differ from run to run, a kind of fault that is never made, seconds of a
dead or frozen replica that count, waiting of the survivors that does not count, a block that is
lost or doubled without being noticed, and a target with the comparison reversed.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from frame.study import read_one
from storm_parts.analysis import Lives, Part, Summary, blocks_of, delay_of, drifts_of
from storm_parts.faults import KINDS, Fault, draw

from tests.harness.torch_groups import HAS_GROUPS

ROOT = Path(__file__).resolve().parents[2]
NAMES = "abcd"


def commit(number: int, when: float, members: str = NAMES, **more: Any) -> dict[str, Any]:
    """Make a commit in which each replica has two blocks, in turns."""
    first = more.pop("first", number * 8)
    blocks = {name: [[first + 2 * place, 2]] for place, name in enumerate(members)}
    last = max((start + count for runs in blocks.values() for start, count in runs), default=first)
    return {
        "event": "commit", "time": when, "round": number, "members": list(members),
        "blocks": blocks, "samples": last, "holes": [], "seq": 100 * number,
    } | more  # fmt: skip


def action(what: str, name: str, when: float) -> dict[str, Any]:
    """Make an action."""
    return {"action": what, "name": name, "time": when}


def part(commits: list[dict[str, Any]], *more: dict[str, Any], digests: Any = None) -> Part:
    """Make a run from commits, and from other lines of the journal and actions."""
    starts = [action("start", name, 0.0) for name in NAMES]
    journal = sorted([*commits, *(x for x in more if "event" in x)], key=lambda x: x["time"])
    return Part(journal, [*starts, *(x for x in more if "action" in x)], digests or {})


def steady(count: int = 6, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Make commits, one every two seconds."""
    return [commit(number, 2.0 + seconds * number) for number in range(count)]


def fault(kind: str = "kill-train", victim: str = "b", began: float = 7.0) -> Fault:
    """Make a fault that was made."""
    return Fault(0, kind, "", 0.0, Random(0), victim, began, began + 3.0, began + 6.0)


def live_seconds(made: Part) -> float:
    """Return the seconds of all replicas."""
    return sum(end - begin for begin, end in Lives(made).spans)


def test_faults_follow_from_seed_and_number() -> None:
    """All kinds are drawn, in their shares, and all their places."""
    faults, again = (draw(1, 60) for _ in range(2))
    assert [(f.kind, f.place, f.seconds) for f in faults] == [
        (f.kind, f.place, f.seconds) for f in again
    ]
    assert [f.dice.random() for f in faults] == [f.dice.random() for f in again]
    assert [f.kind for f in faults] != [f.kind for f in draw(2, 60)]
    assert Counter(f.kind for f in faults) == {name: kind.share for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        own = [f for f in faults if f.kind == name]
        assert {f.place for f in own} == set(kind.places)
        assert all(kind.seconds[0] <= f.seconds <= kind.seconds[1] for f in own)
    assert len({f.kind for f in draw(1, 6)}) == 6


def test_live_seconds_end_with_a_fault_and_begin_with_a_commit() -> None:
    """A replica that is down, or copies the state, does not count; one that waits does."""
    assert live_seconds(part(steady())) == pytest.approx(4 * 10.0)
    away = [commit(n, 2.0 + 2.0 * n, "acd" if n in (3, 4) else NAMES) for n in range(7)]
    made = part(away, action("down", "b", 7.0), action("start", "b", 9.0))
    assert live_seconds(made) == pytest.approx(3 * 12.0 + 5.0 + 2.0)  # b: until 7, from 12
    assert Lives(made).participation == [1.0] * 6
    frozen = part(steady(), action("freeze", "a", 5.0), action("thaw", "a", 8.0))
    assert live_seconds(frozen) == pytest.approx(4 * 10.0 - 3.0)


def test_live_replica_that_is_left_out_is_noticed() -> None:
    """It counts from the commit after the one in which it was healed."""
    commits = [commit(n, 2.0 + 2.0 * n, "acd" if n == 3 else NAMES) for n in range(6)]
    assert Lives(part(commits)).participation == [1.0, 1.0, 0.75, 1.0, 1.0]


def test_delay_is_beyond_the_usual_rounds() -> None:
    """It is counted up to the first commit without the victim."""
    commits = [commit(n, when) for n, when in enumerate((2.0, 4.0, 6.0, 8.1, 13.0))]
    leave = {"event": "leave", "name": "b", "time": 10.0, "seq": 350, "reason": "lost"}
    found = delay_of(part(commits, leave), fault(), 2.0)
    assert found == pytest.approx(7.0 - 2 * 2.0)
    assert delay_of(part(commits[:4], leave), fault(), 2.0) is None


def test_lost_and_doubled_blocks_are_counted() -> None:
    """Blocks that wait for another replica are neither."""
    assert blocks_of(part(steady())) == (48, 0, 0)
    commits = steady()
    commits[2] = commit(2, 6.0, "acd", first=16)
    assert blocks_of(part(commits)) == (46, 2, 0)
    commits[-1]["holes"] = [[22, 2]]
    assert blocks_of(part(commits)) == (46, 0, 0)
    commits[3] = commit(3, 8.0, first=20)
    assert blocks_of(part(commits))[2] == 4  # two of round 2, and two holes


def test_drift_is_what_no_flipped_bit_explains() -> None:
    """Different parameters at the end, or a replica that the hub has sent away."""
    leave = {"event": "leave", "name": "b", "time": 10.0, "seq": 350, "reason": "drifted"}
    assert drifts_of(part(steady(), leave), [])
    assert not drifts_of(part(steady(), leave), [fault("flip")])
    assert drifts_of(part(steady(), digests={"a": ["1", "2"], "b": ["1", "3"]}), [])
    assert not drifts_of(part(steady(), digests={"a": ["1", "2"], "b": ["1", "2"]}), [])


def test_targets_compare_with_runs_without_faults() -> None:
    """A storm without a fault meets all targets; half the speed, and a hang, do not."""
    reference = part(steady())
    assert reference.speed == pytest.approx(40 / 40)
    summary = Summary(reference, [reference], [])
    assert all(target.passes for target in summary.targets())
    slow = replace(summary, storm=part(steady(seconds=4.0)))
    (missed,) = [target.text for target in slow.targets() if not target.passes]
    assert "committed samples" in missed and "MISS" in slow.page()
    hung = replace(summary, hangs=["no commit"])
    assert [target.text for target in hung.targets() if not target.passes] == ["hangs"]


@pytest.mark.timeout(400)
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
@pytest.mark.parametrize("shape", [(), ("--replicas", "3", "--ranks", "2")])
def test_small_storm(tmp_path: Path, shape: tuple[str, ...]) -> None:
    """Also of replicas with two ranks; an old folder is refused."""
    out = tmp_path / "storm"
    argv = [sys.executable, str(ROOT / "benchmarks" / "elastic_storm.py"), "--out", str(out),
            "--faults", "3", "--pause", "1", "--reference", "4", *shape]  # fmt: skip
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = read_one(out / "summary.json")
    assert results["faults"] == 3 and results["blocks"] > 0
    assert all(seconds > 0 for seconds in results["reference_samples_per_live_replica_second"])
    refused = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "must be a new folder" in refused.stderr
