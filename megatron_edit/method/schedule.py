"""When things happen: phases of training by attempted optimizer step (method sections 2, 4, 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Warm-up and syncs, by attempted optimizer step.

    Attributes:
        interval: tau, steps between two syncs of a unit.
        fragments: F, groups of units that sync at steps of their own.
        has_fixed_rounds: whether all rounds have at most `interval` steps.
    """

    has_fixed_rounds: bool

    @property
    def warmup_steps(self) -> int | None:
        """W; None is a warm-up that never ends."""

    @property
    def interval(self) -> int:
        """tau, steps between two syncs of a unit."""

    @property
    def fragments(self) -> int:
        """F, number of fragments that sync at steps of their own."""

    def is_warmup(self, step: int) -> bool:
        """Whether the gradients of step `step` (from 1) are averaged over the replicas."""

    def is_switch(self, step: int) -> bool:
        """Whether the anchor is taken after step `step`; step 0 is the start of training."""

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """The fragments that begin a sync after step `step`; none in warm-up.

        Args:
            step: s, from 1.
            start: the step after which the round began.
            length: steps that `round_length` gave it.
        """

    def round_length(self, inner_lr: float) -> int:
        """Steps of the round that begins now; `inner_lr` is the inner learning rate."""


@dataclass(frozen=True)
class StepSchedule:
    """A synchronous warm-up, then a sync of each fragment every `interval` steps.

    Attributes:
        warmup_steps: W; None is a warm-up that never ends (strategy `ddp`).
        interval: tau, inner steps between two syncs of a fragment.
        fragments: F; fragment f is late by floor(f tau / F) steps.
    """

    warmup_steps: int | None
    interval: int
    fragments: int
    has_fixed_rounds = True

    def is_warmup(self, step: int) -> bool:
        """Whether `step` is one of the first W, or warm-up never ends."""
        return self.warmup_steps is None or step <= self.warmup_steps

    def is_switch(self, step: int) -> bool:
        """Whether `step` is W, the last step of the warm-up."""
        return self.warmup_steps is not None and step == self.warmup_steps

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """The f for which s - W - floor(f tau / F) is a multiple of tau; none in warm-up."""
        if self.warmup_steps is None or step <= self.warmup_steps:
            return ()
        count = step - self.warmup_steps
        return [
            fragment
            for fragment in range(self.fragments)
            if (count - fragment * self.interval // self.fragments) % self.interval == 0
        ]

    def round_length(self, inner_lr: float) -> int:
        """tau steps, at any learning rate."""
        return self.interval


@dataclass(frozen=True)
class QuadraticSchedule(StepSchedule):
    """QSR: rounds of H = max(tau, floor((a / lr)^2)) steps (arXiv 2310.14423, eq. 2).

    Attributes:
        growth: a.
    """

    growth: float
    has_fixed_rounds = False

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """Fragment 0, the only one, after the last step of a round; else none."""
        return [0] if not self.is_warmup(step) and step - start == length else []

    def round_length(self, inner_lr: float) -> int:
        """max(tau, floor((a / lr)^2)) steps; at lr 0 the round lasts to the end."""
        if inner_lr * math.isqrt(LONGEST) <= self.growth:  # also 0; the square could overflow
            return LONGEST
        return max(self.interval, math.floor((self.growth / inner_lr) ** 2))


LONGEST = 2**53  # what a control record and a manifest hold exactly
