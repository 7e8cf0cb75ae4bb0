"""The control record: what a replica tells the others at a meeting.

Every decision across replicas is taken from the gathered records and from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.errors import SyncProtocolError

_HEADER = ("round", "step", "inner_steps", "samples", "schedule_position")


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

    def pack(self) -> Tensor:
        """As float64 [5 + losses + units]; whole numbers are exact up to 2^53."""
        header = [float(getattr(self, name)) for name in _HEADER]
        return torch.tensor([*header, *self.losses, *self.norms], dtype=torch.float64)

    @classmethod
    def unpack(cls, row: Tensor, num_losses: int) -> ControlRecord:
        """Inverse of `pack`."""
        values = row.tolist()
        split = len(_HEADER) + num_losses
        header = {name: int(value) for name, value in zip(_HEADER, values, strict=False)}
        return cls(**header, losses=values[len(_HEADER) : split], norms=values[split:])


def check_same_meeting(records: Sequence[ControlRecord]) -> None:
    """All replicas must be at the same step of the same round.

    Raises:
        SyncProtocolError: they are not; the message shows where each stands.
    """
    places = [(record.round, record.step) for record in records]
    if len(set(places)) > 1:
        raise SyncProtocolError(f"replicas meet at different (round, step): {places}")
