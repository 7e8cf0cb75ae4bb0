"""Meetings: the control records that replicas exchange, and who came."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_edit.engine.buffers import values_of
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.pace import Pace
from megatron_edit.engine.traffic import Traffic
from megatron_edit.replica.control import ControlRecord, check_same_meeting, record_bytes
from megatron_edit.replica.stop import StopBoard
from megatron_edit.replica.world import ReplicaWorld

LOOK_SECONDS = 0.0002  # between two looks at a meeting that others have not come to, at least
LONGEST_LOOK_SECONDS = 0.02
LOOK_SHARE = 0.01  # of the time waited so far: who waits long need not look so often


@dataclass
class Meetings:
    """What this replica has to tell at a meeting, and how meetings are held.

    Attributes:
        host: says where training stands.
        groups: who meets.
        world: where replicas announce that they come.
        board: where this replica says that it was asked to end, also while it waits.
        pace: knows the losses, and whether replicas meet at the same step.
        has_digests: whether records carry digests of delayed landings.
        traffic: goes on while this replica waits for the others: they may wait for it.
        count: meetings that this replica has come to.
    """

    host: Host
    groups: EngineGroups
    world: ReplicaWorld
    board: StopBoard
    pace: Pace
    has_digests: bool
    traffic: Traffic | None = None
    count: int = 0

    @property
    def record_bytes(self) -> int:
        """Size of a record on the wire."""
        units, buffers = len(self.host.plan.names), len(values_of(self.host))
        return record_bytes(self.pace.losses.capacity, units, buffers, has_digests=self.has_digests)

    def hold(
        self,
        *,
        round: int,
        step: int,
        inner_steps: int,
        norms: Mapping[int, float] | None = None,
        digests: Mapping[int, float] | None = None,
        is_leaving: bool = False,
    ) -> list[ControlRecord]:
        """Exchange records with the other replicas: the one table of a sync.

        Collective: the sync group.

        Args:
            round: syncs so far.
            step: s.
            inner_steps: steps of this round.
            norms: of the units that are to sync, by position.
            digests: of landed units, by position.
            is_leaving: whether this replica obeys a stop.

        Returns:
            The records by replica. Where one of them is leaving, the meeting is no sync.
        """
        units = len(self.host.plan.names)
        progress, capacity = self.host.progress(), self.pace.losses.capacity
        mine = ControlRecord(
            round=round,
            step=step,
            inner_steps=inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            losses=self.pace.losses.payload()[-capacity:],  # a resumed round may have been longer
            norms=_row(norms or {}, units),
            buffers=values_of(self.host),
            is_leaving=int(is_leaving),
            inner_lr=progress.inner_lr,
            next_lr=progress.next_lr,
            digests=_row(digests or {}, units) if self.has_digests else (),
        )
        self._announce()
        rows = self.groups.meeting.all_gather(mine.pack(capacity), idle=self._waiting())
        records = [
            ControlRecord.unpack(row, capacity, units, has_digests=self.has_digests) for row in rows
        ]
        if not any(record.is_leaving for record in records):
            check_same_meeting(records, same_step=self.pace.meets_at_same_step)
        return records

    def absent(self) -> list[int]:
        """Replicas that have not come to the last meeting; for the message of an error."""
        if self.count == 0:
            return []  # lost in warm-up, where nobody announces anything
        return self.world.absent(f"meeting/{self.count}")

    def _waiting(self) -> Callable[[], float]:
        """What this replica does while it waits, again and again; it gives the seconds in between.

        It lets exchanges go on, as the others may wait for them; and it looks for a signal or the
        end of its time, which no step of its own will find now: the others then leave, and that
        releases it.
        """
        began = time.monotonic()

        def look() -> float:
            if self.host.is_end_asked and not self.board.is_seen:
                self.board.announce()
            if self.traffic is not None and self.traffic.is_busy:
                self.traffic.poll()
                return LOOK_SECONDS
            waited = time.monotonic() - began
            return min(max(LOOK_SECONDS, LOOK_SHARE * waited), LONGEST_LOOK_SECONDS)

        return look

    def _announce(self) -> None:
        self.count += 1
        self.world.announce(f"meeting/{self.count}")
        if self.count > 2:  # all have left that one: they have come to the one after it
            self.world.forget(f"meeting/{self.count - 2}")


def _row(values: Mapping[int, float], units: int) -> tuple[float, ...]:
    return tuple(values.get(index, math.nan) for index in range(units))
