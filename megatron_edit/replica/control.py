"""The control record: what a replica tells the others at a meeting.

Every decision across replicas is taken from the gathered records and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.errors import SyncProtocolError

_HEADER = ("round", "step", "inner_steps", "samples", "schedule_position", "num_losses")


@dataclass(frozen=True)
class ControlRecord:
    """One replica's part of a meeting.

    Attributes:
        round: which sync this is, from 1.
        step: s, attempted optimizer steps so far.
        inner_steps: steps of this round.
        samples: samples that this replica has consumed so far.
        schedule_position: where its learning-rate schedule stands, in samples.
        losses: training losses since the last meeting, oldest first; NaN where not known here.
        norms: pseudo-gradient norm of every unit.
    """

    round: int
    step: int
    inner_steps: int
    samples: int
    schedule_position: int
    losses: Sequence[float]
    norms: Sequence[float]

    @property
    def num_losses(self) -> int:
        """How many losses there are."""
        return len(self.losses)

    def pack(self, capacity: int) -> Tensor:
        """As float64 [6 + capacity + units]; whole numbers are exact up to 2^53.

        Args:
            capacity: room for losses, the same for all records of a run.
        """
        header = [float(getattr(self, name)) for name in _HEADER]
        padding = [math.nan] * (capacity - self.num_losses)
        return torch.tensor([*header, *self.losses, *padding, *self.norms], dtype=torch.float64)

    @classmethod
    def unpack(cls, row: Tensor, capacity: int) -> ControlRecord:
        """Inverse of `pack`."""
        values = row.tolist()
        header = {name: int(value) for name, value in zip(_HEADER, values, strict=False)}
        first, norms = len(_HEADER), len(_HEADER) + capacity
        losses = values[first : first + header.pop("num_losses")]
        return cls(**header, losses=losses, norms=values[norms:])


def record_bytes(capacity: int, num_units: int) -> int:
    """Size of a packed record."""
    return 8 * (len(_HEADER) + capacity + num_units)


def check_same_meeting(records: Sequence[ControlRecord]) -> None:
    """All replicas must be at the same step of the same round.

    Raises:
        SyncProtocolError: they are not; the message shows where each stands.
    """
    places = [(record.round, record.step) for record in records]
    if len(set(places)) > 1:
        raise SyncProtocolError(f"replicas meet at different (round, step): {places}")
