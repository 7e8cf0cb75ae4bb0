"""What A-EDiT decides at a meeting, with a host that only takes notes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megatron_edit.checkpoint.manifest import ReplicaEntry
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.trigger import Outcome
from megatron_edit.engine.rounds.triggers import TimedPace
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.ledger import Dealing


class Notes:
    """Notes what the host is told when replicas arrive at a sync."""

    def __init__(self) -> None:
        self.arrivals: list[dict[str, Any]] = []

    def arrive(self, samples: int, **flags: bool) -> None:
        self.arrivals.append({"samples": samples, **flags})


def pace_with(notes: Notes, **fields: Any) -> TimedPace:
    """Of replica 0 of two; rounds have at least 10 steps, training has 100 blocks."""
    trigger = TimeTrigger(10.0, PhaseClock(lambda: 0))
    return TimedPace(0, 10, 1, trigger, cast(Host, notes), Dealing(2, 100), **fields)


def records(*steps: int) -> list[ControlRecord]:
    """Of a meeting after so many steps of each replica in the round."""
    return [ControlRecord(0, n, n, 2 * n, 0, losses=(), norms=()) for n in steps]


@pytest.mark.parametrize("is_extended", [False, True])
def test_what_is_due_is_put_off_once(is_extended: bool) -> None:
    """A replica rejoins outside of a step: only that meeting puts off what is due, also where the
    round goes on after it."""
    notes = Notes()
    pace = pace_with(notes)
    entry = ReplicaEntry(step=0, inner_steps=0, samples=0, schedule_position=0)
    pace.resume(entry, pace.dealing, is_rejoined=True)
    if is_extended:
        assert pace.after_meeting(records(4, 4)) is Outcome.EXTEND
    assert pace.after_meeting(records(6, 6)) is Outcome.SYNC
    assert [arrival["is_followed"] for arrival in notes.arrivals] == [not is_extended]


def test_more_steps_loaded_than_asked_for() -> None:
    """Training is over: catches a ledger that refuses a frontier beyond its target, and one that a
    checkpoint would take for samples that are still to consume."""
    pace = pace_with(Notes())
    pace.begin_together(30)
    assert pace.dealing == Dealing(2, 100, 60) and not pace.is_over
    pace.begin_together(60)
    assert pace.dealing == Dealing(2, 120, 120) and pace.is_over
