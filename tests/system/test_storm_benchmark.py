"""benchmarks/elastic_storm.py: its tape and calculations on made-up numbers, and a small real run.

Would catch: a tape that a resumed storm does not continue, a kind of fault that is never made,
seconds of a dead or frozen replica that count, waiting of the survivors that does not count, a
block that is lost or doubled without being noticed, waiting for others that counts as control time,
and a target with the comparison reversed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frame.study import read_one
from storm_parts.analysis import (
    Lives,
    Part,
    blocks_of,
    delay_of,
    drifts_of,
    returns_of,
    speed_of,
    summarize,
)
from storm_parts.control import Control, MeetingTimes, RankTimes
from storm_parts.faults import MAKERS, Done
from storm_parts.report import verdicts
from storm_parts.tape import KINDS, Tape, draw

from tests.harness.torch_groups import HAS_GROUPS

ROOT = Path(__file__).resolve().parents[2]
NAMES = "abcd"


def commit(number: int, when: float, members: str = NAMES, **more: Any) -> dict[str, Any]:
    """Make a commit in which each replica has two blocks, dealt in turns after eight of warm-up."""
    first = more.pop("first", 8 + number * 8)
    blocks = {name: [[first + 2 * place, 2]] for place, name in enumerate(members)}
    last = max((start + count for runs in blocks.values() for start, count in runs), default=first)
    return {
        "event": "commit", "time": when, "round": number, "members": list(members),
        "blocks": blocks, "samples": last, "holes": [], "seq": 100 * number,
    } | more  # fmt: skip


def action(what: str, name: str, when: float, **more: Any) -> dict[str, Any]:
    """Make an action."""
    return {"action": what, "name": name, "time": when} | more


def part(commits: list[dict[str, Any]], *more: dict[str, Any], digests: Any = None) -> Part:
    """Make a part from commits, and from other lines of the journal and actions."""
    starts = [action("start", name, 0.0) for name in NAMES]
    journal = sorted([*commits, *(x for x in more if "event" in x)], key=lambda x: x["time"])
    actions = [*starts, *(x for x in more if "action" in x)]
    return Part(tuple(commits), tuple(journal), tuple(actions), digests)


def steady(count: int = 6) -> list[dict[str, Any]]:
    """Make commits, one every two seconds."""
    return [commit(number, 2.0 + 2.0 * number) for number in range(count)]


def done(kind: str = "kill-train", victim: str = "b", began: float = 7.0) -> Done:
    """Make a fault of the first part."""
    return Done(0, kind, "", 0, victim, began, began + 3.0, began + 6.0)


def test_tape_follows_from_seed_and_length(tmp_path: Path) -> None:
    """All kinds are drawn, in their shares, and all can be made."""
    tape = Tape.draw({"seed": 1, "faults": 60, "pause": 10.0})
    assert tape == Tape.draw({"seed": 1, "faults": 60, "pause": 10.0})
    assert tape.faults != draw(2, 60, 10.0)
    assert Counter(fault.kind for fault in tape.faults) == {k.name: k.share for k in KINDS}
    assert MAKERS.keys() == {kind.name for kind in KINDS}
    for kind in KINDS:
        of_kind = [fault for fault in tape.faults if fault.kind == kind.name]
        places = {fault.place for fault in of_kind}
        assert len(places) == min(len(kind.places), kind.share)
        assert all(kind.seconds[0] <= fault.seconds <= kind.seconds[1] for fault in of_kind)
    assert min(fault.pause for fault in tape.faults) >= 5.0
    tape.write(tmp_path / "tape.json")
    assert Tape.read(tmp_path / "tape.json") == tape
    assert len({fault.kind for fault in draw(1, 6, 4.0)}) == 6


def test_live_seconds_end_with_a_fault_and_begin_with_a_commit() -> None:
    """A replica that is down, or copies the state, does not count; one that waits does."""
    assert Lives.of(part(steady())).seconds() == pytest.approx(4 * 10.0)
    away = [commit(n, 2.0 + 2.0 * n, "acd" if n in (3, 4) else NAMES) for n in range(7)]
    lives = Lives.of(part(away, action("down", "b", 7.0), action("start", "b", 9.0)))
    assert lives.seconds() == pytest.approx(3 * 12.0 + 5.0 + 2.0)  # b: until 7, from 12
    assert lives.participation == [1.0] * 6
    frozen = part(steady(), action("freeze", "a", 5.0), action("thaw", "a", 8.0))
    assert Lives.of(frozen).seconds() == pytest.approx(4 * 10.0 - 3.0)


def test_live_replica_that_is_left_out_is_noticed() -> None:
    """It counts from the commit after the one in which it was healed."""
    commits = [commit(n, 2.0 + 2.0 * n, "acd" if n == 3 else NAMES) for n in range(6)]
    assert Lives.of(part(commits)).participation == [1.0, 1.0, 0.75, 1.0, 1.0]


def test_delay_is_beyond_the_usual_rounds() -> None:
    """It is counted up to the first commit without the victim."""
    commits = [commit(n, when) for n, when in enumerate((2.0, 4.0, 6.0, 8.1, 13.0))]
    leave = {"event": "leave", "name": "b", "time": 10.0, "seq": 350, "reason": "lost"}
    found = delay_of(part(commits, leave), done(began=7.0), 2.0)
    assert found is not None
    assert found.seconds == pytest.approx(7.0 - 2 * 2.0) and not found.has_joiner
    join = {"event": "join", "name": "b", "time": 11.0, "seq": 360}
    found = delay_of(part(commits, leave, join), done(began=7.0), 2.0)
    assert found is not None and found.has_joiner
    assert delay_of(part(commits[:4], leave), done(began=7.0), 2.0) is None


def test_syncs_until_a_replica_counts() -> None:
    """Those without samples of it count, too."""
    commits = steady()
    commits[3]["blocks"]["b"] = []
    join = {"event": "join", "name": "b", "time": 7.0, "seq": 250}
    (found,) = returns_of(part(commits, join))
    assert (found.name, found.syncs) == ("b", 2) and found.seconds == pytest.approx(3.0)
    leave = {"event": "leave", "name": "b", "time": 8.5, "seq": 310, "reason": "lost"}
    assert not returns_of(part(commits, join, leave))


def test_lost_and_doubled_blocks_are_counted() -> None:
    """Blocks that wait to be dealt again are neither."""
    assert blocks_of(part(steady())) == (48, 0, 0)
    commits = steady()
    commits[2] = commit(2, 6.0, "acd", first=24)
    assert blocks_of(part(commits)) == (46, 2, 0)
    commits[-1]["holes"] = [[30, 2]]
    assert blocks_of(part(commits)) == (46, 0, 0)
    commits[3] = commit(3, 8.0, first=28)
    assert blocks_of(part(commits))[2] == 4  # two of round 2, and two holes


def test_drift_is_what_no_flipped_bit_explains() -> None:
    """Different parameters at the end, or a replica that the hub has sent away."""
    leave = {"event": "leave", "name": "b", "time": 10.0, "seq": 350, "reason": "drifted"}
    assert drifts_of(part(steady(), leave), [])
    assert not drifts_of(part(steady(), leave), [done("flip")])
    assert drifts_of(part(steady(), digests={"a": ["1", "2"], "b": ["1", "3"]}), [])
    assert not drifts_of(part(steady(), digests={"a": ["1", "2"], "b": ["1", "2"]}), [])


def test_targets_compare_with_runs_without_faults() -> None:
    """A storm without a fault meets all targets; half the speed, and a hang, do not."""
    reference = part(steady())
    assert speed_of([reference]) == pytest.approx(40 / 40)
    summary = summarize([part(steady())], [reference], [])
    assert summary.relative_speed == pytest.approx(1.0)
    assert all(verdict.passes for verdict in verdicts(summary))
    slow = part([commit(number, 2.0 + 4.0 * number) for number in range(6)])
    missed = [v.text for v in verdicts(summarize([slow], [reference], [])) if not v.passes]
    assert len(missed) == 1 and "committed samples" in missed[0]
    hang = action("problem", "", 9.0, kind="hang", text="no commit")
    missed = [v.text for v in verdicts(summarize([part(steady(), hang)], [], [])) if not v.passes]
    assert missed == ["hangs"]
    assert not all(v.passes for v in verdicts(replace(summary, num_doubled=1)))


def test_control_time_is_that_of_the_dearest_replica() -> None:
    """At meetings, waiting for replicas and the exchange are left out. 7 ms of a step of 0.5 s miss
    the target."""
    late = MeetingTimes(1, 12.0, 12.3, 14.0, 14.5)
    ranks = [RankTimes(0.5, 0.002, 0.001, [MeetingTimes(1, 10.0, 12.2, 14.1, 14.4)]),
             RankTimes(0.5, 0.001, 0.006, [late, replace(late, round=2)])]  # fmt: skip
    found = Control.of(ranks)
    assert found is not None and Control.of([]) is None
    assert (found.main, found.agent) == (0.001, 0.006)
    assert found.share == pytest.approx(0.014)
    assert found.meetings == pytest.approx([0.3 + 0.4])  # not the second, which only one was in
    assert found.exchanges == pytest.approx([14.1 - 12.2])
    parts = [replace(part(steady()), control=found)] * 2
    missed = [v for v in verdicts(summarize([], parts, [])) if not v.passes]
    assert [v.text for v in missed] == ["control time per step without faults, share of a step"]
    bounds = {v.text: v.bound for v in verdicts(summarize([], parts, []))}
    assert bounds["extra delay after a kill, longest (s)"] == pytest.approx(15.0 + 1.9)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_storm_is_resumed(tmp_path: Path) -> None:
    """A storm whose last fault was not noted makes it again, in a new run."""
    out = tmp_path / "storm"
    argv = [sys.executable, str(ROOT / "benchmarks" / "elastic_storm.py"), "--out", str(out),
            "--faults", "3", "--pause", "1", "--reference", "4"]  # fmt: skip
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (out / "done.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    (out / "done.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    refused = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    again = subprocess.run(
        [*argv, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stdout + again.stderr
    results = read_one(out / "summary.json")
    assert (results["faults"], results["parts"]) == (3, 2)
    for control in results["control_without_faults"]:
        assert 0 < control["share_of_a_step"] < 0.5, control
        assert control["agent_cpu_per_step"] > 0 and control["exchange"]["median"] > 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_storm_of_replicas_with_two_ranks(tmp_path: Path) -> None:
    """The blocks of three replicas are counted from their own warm-up."""
    out = tmp_path / "storm"
    argv = [sys.executable, str(ROOT / "benchmarks" / "elastic_storm.py"), "--out", str(out),
            "--faults", "2", "--replicas", "3", "--ranks", "2", "--pause", "1",
            "--reference", "4"]  # fmt: skip
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = read_one(out / "summary.json")
    assert (results["faults"], results["parts"]) == (2, 1) and results["blocks"] > 0
