"""What A-EDiT decides at a meeting, with a host that only takes notes."""

from __future__ import annotations

from typing import Any, cast

from megatron_edit.engine.host import Host
from megatron_edit.engine.paces import TimedPace
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


def test_more_steps_loaded_than_asked_for() -> None:
    """Training is over: catches a ledger that refuses a frontier beyond its target, and one that a
    checkpoint would take for samples that are still to consume."""
    pace = pace_with(Notes())
    pace.begin_together(30)
    assert pace.dealing == Dealing(2, 100, 60) and not pace.is_over
    pace.begin_together(60)
    assert pace.dealing == Dealing(2, 120, 120) and pace.is_over
