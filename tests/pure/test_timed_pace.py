"""What A-EDiT decides at a meeting, with a host that only takes notes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megatron_edit.checkpoint.manifest import ReplicaEntry
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.trigger import Outcome
from megatron_edit.engine.rounds.triggers import ClockTrigger
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.ledger import Dealing


class Notes:
    """Notes what the host is told when replicas arrive at a sync."""

    def __init__(self) -> None:
        self.arrivals: list[dict[str, Any]] = []

    def end_round(self, samples: int, **flags: bool) -> None:
        self.arrivals.append({"samples": samples, **flags})


def pace_with(notes: Notes, **fields: Any) -> ClockTrigger:
    """Of replica 0 of two; rounds have at least 10 steps, training has 100 blocks."""
    timer = TimeTrigger(10.0, PhaseClock(lambda: 0))
    return ClockTrigger(0, 10, 1, timer, cast(Host, notes), Dealing(2, 100), **fields)


def records(*steps: int) -> list[ControlRecord]:
    """Of a meeting after so many steps of each replica in the round."""
    return [ControlRecord(0, n, n, 2 * n, 0, losses=(), norms=()) for n in steps]


@pytest.mark.parametrize("is_extended", [False, True])
def test_what_is_due_is_put_off_once(is_extended: bool) -> None:
    """A replica rejoins outside of a step: only that meeting puts off what is due, also where the
    round goes on after it."""
    notes = Notes()
    trigger = pace_with(notes)
    entry = ReplicaEntry(step=0, inner_steps=0, samples=0, schedule_position=0)
    trigger.resume(entry, trigger.dealing, is_rejoined=True)
    if is_extended:
        assert trigger.after_meeting(records(4, 4)) is Outcome.EXTEND
    assert trigger.after_meeting(records(6, 6)) is Outcome.SYNC
    assert [arrival["is_followed"] for arrival in notes.arrivals] == [not is_extended]


def test_more_steps_loaded_than_asked_for() -> None:
    """Training is over: catches a ledger that refuses a frontier beyond its target, and one that a
    checkpoint would take for samples that are still to consume."""
    trigger = pace_with(Notes())
    trigger.begin_together(30)
    assert trigger.dealing == Dealing(2, 100, 60) and not trigger.is_over
    trigger.begin_together(60)
    assert trigger.dealing == Dealing(2, 120, 120) and trigger.is_over
