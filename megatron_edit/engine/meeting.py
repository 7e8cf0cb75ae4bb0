"""Meetings: the control records that replicas exchange, and who came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.engine.buffers import values_of
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.pace import Pace
from megatron_edit.replica.control import ControlRecord, check_same_meeting, record_bytes
from megatron_edit.replica.world import ReplicaWorld


@dataclass
class Meetings:
    """What this replica has to tell at a meeting, and how meetings are held.

    Attributes:
        host: says where training stands.
        groups: who meets.
        world: where replicas announce that they come.
        pace: knows the losses, and whether replicas meet at the same step.
        count: meetings that this replica has come to.
    """

    host: Host
    groups: EngineGroups
    world: ReplicaWorld
    pace: Pace
    count: int = 0

    @property
    def record_bytes(self) -> int:
        """Size of a record on the wire."""
        units, buffers = len(self.host.plan.names), len(values_of(self.host))
        return record_bytes(self.pace.losses.capacity, units, buffers)

    def hold(
        self,
        *,
        round: int,
        step: int,
        inner_steps: int,
        norms: Sequence[float] | None = None,
        is_leaving: bool = False,
    ) -> list[ControlRecord]:
        """Exchange records with the other replicas: the one table of a sync.

        Collective: the sync group.

        Args:
            round: syncs so far.
            step: s.
            inner_steps: steps of this round.
            norms: of all units; None where there is no sync to decide on.
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
            losses=self.pace.losses.payload(),
            norms=tuple([math.nan] * units if norms is None else norms),
            buffers=values_of(self.host),
            is_leaving=int(is_leaving),
        )
        self._announce()
        rows = self.groups.sync.all_gather(mine.pack(capacity))
        records = [ControlRecord.unpack(row, capacity, units) for row in rows]
        if not any(record.is_leaving for record in records):
            check_same_meeting(records, same_step=self.pace.meets_at_same_step)
        return records

    def absent(self) -> list[int]:
        """Replicas that have not come to the last meeting; for the message of an error."""
        if self.count == 0:
            return []  # lost in warm-up, where nobody announces anything
        return self.world.absent(f"meeting/{self.count}")

    def _announce(self) -> None:
        self.count += 1
        self.world.announce(f"meeting/{self.count}")
        if self.count > 2:  # all have left that one: they have come to the one after it
            self.world.forget(f"meeting/{self.count - 2}")
