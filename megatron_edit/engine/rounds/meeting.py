"""Meetings: the control records that replicas exchange, and who came."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_edit.comm.control import ControlRecord, check_same_meeting, record_bytes
from megatron_edit.comm.heartbeat import HeartbeatMonitor, Place
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.buffers import values_of
from megatron_edit.engine.rounds.trigger import SyncTrigger
from megatron_edit.engine.sync.queue import SyncQueue
from megatron_edit.errors import ReplicaLostError

POLL_SECONDS = 0.0002  # between two looks at a meeting that others have not come to, at least
LONGEST_POLL_SECONDS = 0.02
POLL_SHARE = 0.01  # of the time waited so far: who waits long need not poll so often


@dataclass
class Meetings:
    """What this replica has to tell at a meeting, and how meetings are held.

    Attributes:
        host: says where training stands.
        groups: who meets.
        board: where this replica says that it was asked to end, also while it waits; its heartbeat
            knows how far the others have come.
        trigger: knows the losses, and whether replicas meet at the same step.
        has_digests: whether records carry digests of delayed landings.
        traffic: goes on while this replica waits for the others: they may wait for it.
    """

    host: Host
    groups: EngineGroups
    board: StopBoard
    trigger: SyncTrigger
    has_digests: bool
    traffic: SyncQueue | None = None

    @property
    def record_bytes(self) -> int:
        """Size of a record on the wire."""
        units, buffers = len(self.host.plan.names), len(values_of(self.host))
        return record_bytes(
            self.trigger.losses.capacity, units, buffers, has_digests=self.has_digests
        )

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
        progress, capacity = self.host.progress(), self.trigger.losses.capacity
        mine = ControlRecord(
            round=round,
            step=step,
            inner_steps=inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            losses=self.trigger.losses.payload()[
                -capacity:
            ],  # a resumed round may have been longer
            norms=_row(norms or {}, units),
            buffers=values_of(self.host),
            is_leaving=int(is_leaving),
            inner_lr=progress.inner_lr,
            next_lr=progress.next_lr,
            digests=_row(digests or {}, units) if self.has_digests else (),
        )
        rows = self.gather(mine.pack(capacity))
        records = [
            ControlRecord.unpack(row, capacity, units, has_digests=self.has_digests) for row in rows
        ]
        if not any(record.is_leaving for record in records):
            check_same_meeting(records, same_step=self.trigger.meets_at_same_step)
        return records

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all replicas, in their order, however late they come.

        A replica that makes no progress for the time-out of the group is lost.

        Collective: the sync group.
        """
        with self.board.heartbeat.waiting():
            return self.groups.meeting.all_gather(row, poll=self._poller())

    def _poller(self) -> Callable[[], float]:
        """What this replica does while it waits, again and again; it gives the seconds in between.

        It lets exchanges go on, as the others may wait for them; and it looks for a signal or the
        end of its time, which no step of its own will find now: the others then leave, and that
        releases it. Of the replicas that have not come it wants to see progress.
        """
        began, limit = time.monotonic(), self.groups.meeting.timeout.total_seconds()
        heartbeat = self.board.heartbeat

        def poll() -> float:
            now = time.monotonic()
            if overdue := heartbeat.overdue(began, limit, now):
                raise _lost(heartbeat.give_up(overdue), limit)
            if self.host.is_end_asked and not self.board.is_seen:
                self.board.announce()
            if self.traffic is not None and self.traffic.is_busy:
                self.traffic.poll()
                return POLL_SECONDS
            return min(max(POLL_SECONDS, POLL_SHARE * (now - began)), LONGEST_POLL_SECONDS)

        return poll


def open_board(groups: EngineGroups, world: ReplicaWorld, step: Callable[[], int]) -> StopBoard:
    """Where this rank learns of stops, and of the others' progress.

    Args:
        groups: count how far this rank has come.
        world: whose store is asked.
        step: s, of this replica.
    """
    place, is_first = world.placement, groups.control.rank == 0

    def where() -> Place:
        return Place(groups.meeting.num_started, groups.sync.num_started, step())

    heartbeat = HeartbeatMonitor(
        place.replica,
        place.num_replicas,
        where,
        is_telling=is_first,
        store_host=None if place.is_single_launch else 0,
    )
    return StopBoard(world.shared_store, heartbeat, is_watching=is_first)


def _lost(replicas: Sequence[int], limit: float) -> ReplicaLostError:
    error = ReplicaLostError(f"no progress was seen for {limit:.3g} s")
    error.lost = replicas
    return error


def _row(values: Mapping[int, float], units: int) -> tuple[float, ...]:
    return tuple(values.get(index, math.nan) for index in range(units))
