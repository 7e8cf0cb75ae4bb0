"""Meetings: the exchange of control records, and the wait for the other replicas."""

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

LONGEST_POLL_SECONDS = 0.02  # between two polls while other replicas have not joined


@dataclass
class Meetings:
    """Exchanges control records with the other replicas.

    Attributes:
        board: announces a request to stop, also while this replica waits; its heartbeat monitor
            has the progress of the other replicas.
        same_step: whether all replicas join a meeting after the same step.
        has_digests: whether records carry digests of delayed landings.
        num_measured: see `ControlRecord.measured`.
        poll_exchanges: progresses exchanges while this replica waits, as others may be waiting for
            them; returns whether there are any.
    """

    host: Host
    groups: EngineGroups
    board: StopBoard
    state: RunState
    same_step: bool
    has_digests: bool
    poll_exchanges: Callable[[], bool]
    num_measured: int = 0

    def exchange_records(self, mine: Tensor | None = None) -> list[ControlRecord]:
        """Exchange control records with the other replicas.

        Collective: the sync group.

        Args:
            mine: the record of this replica, from `pack`; None is one without units.

        Returns:
            The records by replica. If one of them is stopping, no sync follows.
        """
        with record_function("edit/meeting"):
            return self.unpack(self.gather(self.pack() if mine is None else mine))

    def pack(
        self,
        norms: Mapping[int, float] | None = None,
        digests: Mapping[int, float] | None = None,
        *,
        round_loss: float = math.nan,
        exposed: float = math.nan,
        is_stopping: bool = False,
        measured: Sequence[float] = (),
    ) -> Tensor:
        """The record of this replica.

        Args:
            norms: of the units that are to sync, by position.
            digests: of those of them whose landing was delayed, by position.
            round_loss: mean loss of the replica since the last meeting.
            exposed: see `ControlRecord`.
            is_stopping: whether this replica stops on request.
            measured: see `ControlRecord`.
        """
        state, units = self.state, len(self.host.plan.names)
        mine = state.record(
            self.host.progress(),
            norms=_row(norms or {}, units),
            buffers=shared_values(self.host),
            is_stopping=int(is_stopping),
            round_loss=round_loss,
            exposed=exposed,
            measured=measured,
            digests=_row(digests or {}, units) if self.has_digests else (),
        )
        return mine.pack(state.losses.capacity)

    def unpack(self, rows: Tensor) -> list[ControlRecord]:
        """The records of all replicas, from their rows.

        Raises:
            SyncProtocolError: they are not at the same meeting.
        """
        return unpack_meeting(
            rows,
            self.state.losses.capacity,
            len(self.host.plan.names),
            has_digests=self.has_digests,
            same_step=self.same_step,
            num_measured=self.num_measured,
        )

    def gather(self, row: Tensor) -> Tensor:
        """Gather the rows of all replicas in replica order, however late they arrive.

        A replica that makes no progress for the time-out of the group is lost.

        Collective: the sync group.
        """
        with self.board.heartbeat.waiting():
            return self.groups.meeting.all_gather(row, poll=self._poller())

    def _poller(self) -> Callable[[], float]:
        """Create the function that is polled during the wait; it returns the seconds to sleep.

        It progresses exchanges that others may be waiting for; it announces a signal or the end of
        the allotted time, which no step of this replica will detect now, so that the other replicas
        stop and release it; and it raises if a missing replica makes no progress.
        """
        began, limit = time.monotonic(), self.groups.meeting.timeout.total_seconds()
        heartbeat = self.board.heartbeat

        def poll() -> float:
            now = time.monotonic()
            if overdue := heartbeat.overdue(began, limit, now):
                raise _lost(heartbeat.give_up(overdue), limit)
            if self.host.is_end_requested and not self.board.is_seen:
                self.board.announce()
            if self.poll_exchanges():
                return POLL_SECONDS
            return poll_interval(now - began, LONGEST_POLL_SECONDS)

        return poll


def size_of_record(host: Host, state: RunState, *, has_digests: bool) -> int:
    """Bytes of this replica's record at a meeting.

    Args:
        host: has units and shared values.
        has_digests: see `Meetings`.
    """
    units, buffers = len(host.plan.names), len(shared_values(host))
    return record_bytes(state.losses.capacity, units, buffers, has_digests=has_digests)


def shared_values(host: Host) -> list[float]:
    """Concatenated state that training changes and no optimizer owns, as biases of MoE routers.

    It is small, so it is sent in the records: fp32 values and integers are exact there.
    """
    tensors = [tensor.reshape(-1).double() for _, tensor in host.shared_buffers()]
    return torch.cat(tensors).tolist() if tensors else []


def average_shared_values(
    host: Host, rows: Sequence[Sequence[float]], accepted: Tensor, units: Sequence[int]
) -> None:
    """Average the buffers of some units over the replicas that the unit accepted (method 3.9).

    If none was accepted, over all replicas: there is no anchor to return to. Values that are not
    finite are left out. No communication: every rank averages the same numbers.

    Args:
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
