"""Meetings: the control records that replicas exchange, and how the others are waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.control import ControlRecord, record_bytes, unpack_meeting
from megatron_edit.comm.polling import POLL_SECONDS, poll_interval
from megatron_edit.comm.stop import StopBoard
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.state import RunState
from megatron_edit.errors import ReplicaLostError

LONGEST_POLL_SECONDS = 0.02  # between two polls of a meeting that others have not come to


@dataclass
class Meetings:
    """What this replica has to tell at a meeting, and how meetings are held.

    Attributes:
        host: says where training stands.
        groups: who meets.
        board: where this replica says that it was asked to end, also while it waits; its heartbeat
            monitor knows how far the others have come.
        state: of the run.
        same_step: whether all replicas come to a meeting after the same step.
        has_digests: whether records carry digests of delayed landings.
        poll_exchanges: lets exchanges go on while this replica waits for the others, who may wait
            for them; whether there are any.
    """

    host: Host
    groups: EngineGroups
    board: StopBoard
    state: RunState
    same_step: bool
    has_digests: bool
    poll_exchanges: Callable[[], bool]

    def exchange_records(
        self,
        norms: Mapping[int, float] | None = None,
        digests: Mapping[int, float] | None = None,
        *,
        round_loss: float = math.nan,
        is_leaving: bool = False,
    ) -> list[ControlRecord]:
        """Exchange records with the other replicas: the one table of a sync.

        Collective: the sync group.

        Args:
            norms: of the units that are to sync, by position.
            digests: of those of them that have landed late, by position.
            round_loss: mean loss of the replica since the last meeting.
            is_leaving: whether this replica obeys a stop.

        Returns:
            The records by replica. Where one of them is leaving, the meeting is no sync.
        """
        with record_function("edit/meeting"):
            state, units = self.state, len(self.host.plan.names)
            capacity = state.losses.capacity
            mine = state.record(
                self.host.progress(),
                norms=_row(norms or {}, units),
                buffers=shared_values(self.host),
                is_leaving=int(is_leaving),
                round_loss=round_loss,
                digests=_row(digests or {}, units) if self.has_digests else (),
            )
            rows = self.gather(mine.pack(capacity))
            return unpack_meeting(
                rows, capacity, units, has_digests=self.has_digests, same_step=self.same_step
            )

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all replicas, in their order, however late they come.

        A replica that makes no progress for the time-out of the group is lost.

        Collective: the sync group.
        """
        with self.board.heartbeat.waiting():
            return self.groups.meeting.all_gather(row, poll=self._poller())

    def _poller(self) -> Callable[[], float]:
        """What this replica does while it waits, again and again; it gives the seconds in between.

        It lets exchanges go on, as the others may wait for them; and it polls for a signal or the
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
            if self.poll_exchanges():
                return POLL_SECONDS
            return poll_interval(now - began, LONGEST_POLL_SECONDS)

        return poll


def size_of_record(host: Host, state: RunState, *, has_digests: bool) -> int:
    """Bytes of this replica's record at a meeting.

    Args:
        host: has units and shared values.
        state: of the run.
        has_digests: see `Meetings`.
    """
    units, buffers = len(host.plan.names), len(shared_values(host))
    return record_bytes(state.losses.capacity, units, buffers, has_digests=has_digests)


def shared_values(host: Host) -> list[float]:
    """State that training changes and no optimizer owns, such as biases of MoE routers, end to end.

    It is small, so it travels with the records: fp32 values are exact there.
    """
    tensors = [tensor.reshape(-1) for _, tensor in host.shared_buffers()]
    return torch.cat(tensors).tolist() if tensors else []


def average_shared_values(
    host: Host, rows: Sequence[Sequence[float]], accepted: Tensor, units: Sequence[int]
) -> None:
    """Give this state of some units its mean over the replicas that the unit accepted (method 3.9).

    Where none was accepted, over all: there is no anchor to go back to. Values that are not
    finite never count. No communication: every rank averages the same numbers.

    Args:
        host: has the buffers.
        rows: `shared_values` of all replicas.
        accepted: bool [N, units], which replicas each unit accepted.
        units: positions in the replica's list.

    Mutates: the host's buffers.
    """
    table, start = torch.tensor(rows, dtype=torch.float64), 0
    for index, tensor in host.shared_buffers():
        part = table[:, start : start + tensor.numel()]
        start += tensor.numel()
        if index not in units:
            continue
        chosen = accepted[:, units.index(index)]
        usable = (chosen if bool(chosen.any()) else ~chosen) & part.isfinite().all(dim=1)
        total = torch.zeros(tensor.numel(), dtype=torch.float64)
        for row in part[usable]:
            total += row
        mean = total / max(1, int(usable.sum()))
        tensor.copy_(mean.view_as(tensor))


def _lost(replicas: Sequence[int], limit: float) -> ReplicaLostError:
    error = ReplicaLostError(f"no progress was seen for {limit:.3g} s")
    error.lost = replicas
    return error


def _row(values: Mapping[int, float], units: int) -> tuple[float, ...]:
    return tuple(values.get(index, math.nan) for index in range(units))
