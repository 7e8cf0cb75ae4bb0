"""Training losses on their way to `loss.jsonl`: they travel with the control records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.report import Reporter


class Losses(Protocol):
    """What a replica has to tell of its losses at the next meeting.

    Attributes:
        capacity: numbers that a record has room for. Records of one run are all of one size.
    """

    @property
    def capacity(self) -> int:
        """See above."""

    def note(self, step: int, loss: float) -> None:
        """Keep the loss of a step; NaN where this rank does not know it."""

    def payload(self) -> tuple[float, ...]:
        """What this replica has to tell; the last `capacity` numbers go into the next record."""

    @property
    def last_step(self) -> int:
        """The step of the last loss; 0 where that does not matter."""

    def restore(self, payload: Sequence[float], last_step: int) -> None:
        """Come back to what `payload` and `last_step` said."""

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """Report what all replicas told, and forget what has been reported."""


@dataclass
class StepLosses:
    """Every loss travels: all replicas make the same steps.

    Attributes:
        capacity: steps between two meetings.
    """

    capacity: int
    last_step: int = 0
    _losses: list[float] = field(default_factory=list)

    def note(self, step: int, loss: float) -> None:
        """See `Losses`."""
        self._losses.append(loss)
        self.last_step = step

    def payload(self) -> tuple[float, ...]:
        """See `Losses`."""
        return tuple(self._losses)

    def restore(self, payload: Sequence[float], last_step: int) -> None:
        """See `Losses`. A mean, which has no last step, cannot be told step by step."""
        self._losses, self.last_step = list(payload) if last_step else [], last_step

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """The mean over the replicas of each step. A step's loss is known after its sync."""
        losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
        first = self.last_step - losses.shape[1] + 1
        reporter.on_losses(first, torch.nanmean(losses, dim=0).tolist())
        self._losses.clear()


@dataclass
class MeanLoss:
    """One mean per round, weighted by steps: replicas make different numbers of them."""

    last_step: int = 0
    _total: float = 0.0
    _count: int = 0

    @property
    def capacity(self) -> int:
        """A sum and a count."""
        return 2

    def note(self, step: int, loss: float) -> None:
        """See `Losses`. A step without a loss (fp16 skipped it, or another rank knows) is none."""
        if not math.isnan(loss):
            self._total += loss
            self._count += 1

    def payload(self) -> tuple[float, ...]:
        """See `Losses`."""
        return (self._total, float(self._count))

    def restore(self, payload: Sequence[float], last_step: int) -> None:
        """See `Losses`. A run with rounds of fixed length has left a loss for each step."""
        if last_step:
            for loss in payload:
                self.note(last_step, loss)
        elif payload:
            self._total, self._count = payload[0], int(payload[1])

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """One line: the step of replica 0, and the mean over all steps of all replicas."""
        total, count = (sum(column) for column in zip(*(r.losses for r in records), strict=True))
        if count:
            reporter.on_losses(records[0].step, [total / count])
        self._total, self._count = 0.0, 0
