"""The control record that a replica sends to the others at a meeting, and flags inside a replica.

All decisions across replicas depend on the gathered records alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import islice

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.errors import DriftError, SyncProtocolError

_HEADER = (
    "round",
    "step",
    "inner_steps",
    "samples",
    "schedule_position",
    "is_stopping",
    "num_losses",
)
_RATES = ("inner_lr", "next_lr", "round_loss", "exposed")


@dataclass(frozen=True)
class ControlRecord:
    """Control record of one replica at a meeting.

    Attributes:
        round: syncs before this meeting.
        step: s, attempted optimizer steps so far.
        inner_steps: steps of this round.
        samples: samples that this replica has consumed so far.
        schedule_position: position of its learning-rate schedule, in samples.
        losses: training losses since the last meeting, oldest first; NaN where this rank does not
            know them.
        norms: pseudo-gradient norm of every unit.
        buffers: state that no optimizer owns, of this rank's stage.
        is_stopping: whether the replica stops on request, so that there is no sync.
        inner_lr: learning rate of the last step.
        next_lr: of the next step; while the schedule warms up, its peak value.
        digests: of every unit that syncs again after a delayed landing; NaN for the others. Empty
            where no landing is delayed.
        round_loss: nats per token, mean of the replica's training losses since the last meeting,
            the same on all its ranks; NaN where there is none.
        exposed: seconds that the syncs landed since the last meeting added to its training, the
            longest, the same on all its ranks; NaN where there is none.
        measured: what `--edit-auto` chooses from, where a choice is awaited at the meetings; else
            empty.
    """

    round: int
    step: int
    inner_steps: int
    samples: int
    schedule_position: int
    losses: Sequence[float]
    norms: Sequence[float]
    buffers: Sequence[float] = ()
    is_stopping: int = 0
    inner_lr: float = 0.0
    next_lr: float = 0.0
    digests: Sequence[float] = ()
    round_loss: float = math.nan
    exposed: float = math.nan
    measured: Sequence[float] = ()

    @property
    def num_losses(self) -> int:
        """Number of losses."""
        return len(self.losses)

    def pack(self, capacity: int) -> Tensor:
        """Pack into float64 [11 + capacity + units + digests + measured + buffers]; integers exact
        to 2^53.

        Args:
            capacity: room for losses, the same for all records of a run.
        """
        header = [float(getattr(self, name)) for name in _HEADER]
        padding = [math.nan] * (capacity - self.num_losses)
        rates = [getattr(self, name) for name in _RATES]
        found = (self.norms, self.digests, self.measured, self.buffers)
        rows = (header, rates, self.losses, padding, *found)
        values = [value for row in rows for value in row]
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def unpack(
        cls,
        row: Tensor,
        capacity: int,
        num_units: int,
        *,
        has_digests: bool = False,
        num_measured: int = 0,
    ) -> ControlRecord:
        """Inverse of `pack`."""
        values = iter(row.tolist())
        header = {name: int(next(values)) for name in _HEADER}
        rates = {name: next(values) for name in _RATES}
        losses = list(islice(values, capacity))[: header.pop("num_losses")]
        norms = list(islice(values, num_units))
        digests = list(islice(values, num_units if has_digests else 0))
        measured = list(islice(values, num_measured))
        return cls(
            **header, **rates, losses=losses, norms=norms, digests=digests, measured=measured,
            buffers=list(values),
        )  # fmt: skip


def unpack_meeting(
    rows: Tensor,
    capacity: int,
    num_units: int,
    *,
    has_digests: bool,
    same_step: bool,
    num_measured: int = 0,
) -> list[ControlRecord]:
    """Unpack and check the records of a meeting, by replica.

    Args:
        rows: float64 [N, ...], the packed records.
        num_units: U.
        has_digests: whether there are digests.
        same_step: whether all replicas meet after the same step.
        num_measured: see `ControlRecord.measured`.

    Raises:
        SyncProtocolError: no replica stops, and the replicas are not in the same round.
    """
    records = [
        ControlRecord.unpack(
            row, capacity, num_units, has_digests=has_digests, num_measured=num_measured
        )
        for row in rows
    ]
    if not any(record.is_stopping for record in records):
        check_same_meeting(records, same_step=same_step)
    return records


def record_bytes(
    capacity: int, num_units: int, num_buffers: int, *, has_digests: bool = False
) -> int:
    """Size of a packed record in bytes."""
    rows = 2 if has_digests else 1
    return 8 * (len(_HEADER) + len(_RATES) + capacity + rows * num_units + num_buffers)


def check_same_meeting(records: Sequence[ControlRecord], *, same_step: bool) -> None:
    """Check that all replicas are in the same round, and with `same_step` at the same step.

    Raises:
        SyncProtocolError: they are not; the message has round and step of each.
    """
    places = [(record.round, record.step) for record in records]
    if len({place if same_step else place[0] for place in places}) > 1:
        raise SyncProtocolError(f"replicas meet at different (round, step): {places}")


def check_same_digests(records: Sequence[ControlRecord], names: Sequence[str], count: int) -> None:
    """Compare the replicas' digests of units that have landed since their last meeting.

    Args:
        records: of a meeting.
        names: of all units.
        count: syncs before it.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    columns = zip(*(record.digests for record in records), strict=True)
    units = [
        name
        for name, values in zip(names, columns, strict=False)
        if len({None if math.isnan(value) else value for value in values}) > 1
    ]
    if units:
        when = f"in what had landed before the sync of round {count + 1}"
        raise DriftError.in_units(units, when)


# ---- What the ranks of a replica learn of each other one step later: flags of rank 0, and votes
#
# All ranks of a replica must act alike, but only rank 0 reads the clock and the control store.
# Its flags after a step are sent while the next step computes, so that no rank waits for them.


class Flag(IntFlag):
    """Flags that rank 0 sends to the ranks of its replica."""

    NONE = 0
    MEET = 1  # the inner phase is long enough: meet
    STOP = 2  # a stop was requested by a signal or the time limit


@dataclass
class DelayedFlags:
    """Sends one set of flags per step.

    Attributes:
        group: the ranks of the replica, on the CPU: the host must not wait for the device.
        latest: the flags that were read last, the same on all ranks.
        steps_of_others: optimizer steps of the other replicas, read with the flags.
    """

    group: Group
    latest: Flag = Flag.NONE
    steps_of_others: int = 0
    _sent: tuple[Work, Tensor] | None = None

    def post(self, flags: Flag, steps_of_others: int = 0) -> None:
        """Send the flags of rank 0, after a step. Other ranks' arguments are ignored.

        Collective: the ranks of the replica, once after each step. Does not block.

        Args:
            flags: raised after the step.
            steps_of_others: see above.
        """
        self.read()
        tensor = torch.tensor([int(flags), steps_of_others], dtype=torch.int64)
        self._sent = (self.group.start_broadcast(tensor), tensor)

    def read(self) -> Flag:
        """Return the flags sent after the last step, the same on all ranks.

        Raises:
            ReplicaLostError: a rank of the replica is lost.
        """
        if self._sent is not None:
            work, tensor = self._sent
            work.wait()
            flags, self.steps_of_others = tensor.tolist()
            self.latest, self._sent = Flag(flags), None
        return self.latest


@dataclass
class DelayedVote:
    """Whether something holds on all ranks of the replica, without a wait for them.

    Attributes:
        group: the ranks of the replica, on the CPU.
    """

    group: Group
    _sent: tuple[Work, Tensor] | None = None

    def post(self, holds: bool) -> None:
        """Send this rank's vote, after a step. Does not block.

        Collective: the ranks of the replica.
        """
        against = torch.tensor([int(not holds)])
        self._sent = (self.group.start_all_reduce(against), against)

    def read(self) -> bool:
        """Whether a vote was posted since the last call, and all ranks were in favour.

        Raises:
            ReplicaLostError: a rank of the replica is lost.
        """
        if self._sent is None:
            return False
        (work, against), self._sent = self._sent, None
        work.wait()
        return int(against) == 0
