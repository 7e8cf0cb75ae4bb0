"""Phases of training and times of syncs, by attempted optimizer step (method sections 2, 4, 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_edit.constants import ADACOMM, STL
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES


def last_local(total: int, final_fraction: float) -> int:
    """The last iteration (or sample) before the final synchronous phase.

    A step belongs to the final phase if the share 1 - X of the training was done when it began.

    Args:
        total: iterations, or samples, of the complete training.
        final_fraction: X, share of the training that the final phase takes; in [0, 1].

    Returns:
        ceil((1 - X) total), exact in the decimal value of X: 0 if all of the training is
        synchronous, `total` if there is no final phase.
    """
    return math.ceil((1 - Fraction(repr(final_fraction))) * total)


@dataclass(frozen=True)
class RoundStart:
    """Values that the length of a round may depend on; the same on all ranks of all replicas.

    Attributes:
        step: s, the step after which the round begins.
        inner_lr: inner learning rate of its first step.
        loss: F, mean training loss of the last round over the replicas; None where not known.
        first_loss: F_0, the same of the first round; None where not known.
    """

    step: int
    inner_lr: float
    loss: float | None = None
    first_loss: float | None = None


@dataclass(frozen=True)
class StepSchedule:
    """A synchronous warm-up, then a sync of each fragment every `interval` steps.

    Attributes:
        warmup_steps: W; None for an endless warm-up (strategy `ddp`).
        interval: tau, inner steps between two syncs of a fragment.
        fragments: F; fragment f syncs with an offset of floor(f tau / F) steps.
        has_fixed_rounds: whether all rounds have at most `interval` steps.
    """

    warmup_steps: int | None
    interval: int
    fragments: int
    has_fixed_rounds = True

    @property
    def first_step(self) -> int:
        """The step after which the first round of this length begins: W."""
        assert self.warmup_steps is not None, "an endless warm-up has no rounds"
        return self.warmup_steps

    def is_warmup(self, step: int) -> bool:
        """Whether gradients of step `step` (from 1) are averaged over the replicas: of the first W
        steps, or of all."""
        return self.warmup_steps is None or step <= self.warmup_steps

    def is_switch(self, step: int) -> bool:
        """Whether the anchor is taken after step `step`, which is W; step 0 is the start of
        training."""
        return self.warmup_steps is not None and step == self.warmup_steps

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """The fragments that begin a sync after step `step`; none in warm-up.

        They are the f for which s - W - floor(f tau / F) is a multiple of tau.

        Args:
            step: s, from 1.
            start: the step after which the round began.
            length: of the round, from `round_length`.
        """
        if self.warmup_steps is None or step <= self.warmup_steps:
            return ()
        count = step - self.first_step
        return [
            fragment
            for fragment in range(self.fragments)
            if (count - fragment * self.interval // self.fragments) % self.interval == 0
        ]

    def round_length(self, start: RoundStart) -> int:
        """Steps of the round that begins at `start`; at least 1. Here tau."""
        return self.interval


Schedule = StepSchedule  # from which all schedules are derived


@dataclass(frozen=True)
class LaterSchedule(StepSchedule):
    """A step schedule whose first round begins after another step than W."""

    origin: int

    @property
    def first_step(self) -> int:
        """The step after which the first round of this length begins."""
        return self.origin


@dataclass(frozen=True)
class VaryingSchedule(StepSchedule):
    """Rounds whose length is determined when they begin. There is one fragment."""

    has_fixed_rounds = False

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """Fragment 0, the only one, after the last step of a round; else none."""
        return [0] if not self.is_warmup(step) and step - start == length else []


@dataclass(frozen=True)
class QuadraticSchedule(VaryingSchedule):
    """QSR: rounds of H = max(tau, floor((a / lr)^2)) steps (arXiv 2310.14423, eq. 2).

    Attributes:
        growth: a.
    """

    growth: float

    def round_length(self, start: RoundStart) -> int:
        """max(tau, floor((a / lr)^2)) steps; at lr 0 the round lasts to the end."""
        if start.inner_lr * math.isqrt(LONGEST) <= self.growth:  # also 0; the square could overflow
            return LONGEST
        ratio = self.growth / start.inner_lr
        return max(self.interval, math.floor(ratio * ratio))  # not a power: they round differently


@dataclass(frozen=True)
class StagewiseSchedule(VaryingSchedule):
    """STL: rounds of tau 2^k steps in stage k of the local training (arXiv 2006.06377, with
    stages of equal length).

    A round has the length of the stage in which it begins, and may end in the next one.

    Attributes:
        stages: number of equal parts of the local training; >= 1.
        last_step: L, the last local step.
    """

    stages: int
    last_step: int

    def round_length(self, start: RoundStart) -> int:
        """tau 2^k steps, k = floor((s - W) stages / (L - W)), at most stages - 1."""
        first = self.warmup_steps or 0
        stage = (start.step - first) * self.stages // max(1, self.last_step - first)
        doublings = min(max(0, stage), self.stages - 1, LONGEST.bit_length())
        return min(LONGEST, self.interval << doublings)


@dataclass(frozen=True)
class LossSchedule(VaryingSchedule):
    """AdaComm: rounds of ceil(tau sqrt(F / F_0)) steps (arXiv 1810.08313, at a constant
    learning rate)."""

    def round_length(self, start: RoundStart) -> int:
        """ceil(tau sqrt(F / F_0)) steps; tau where F or F_0 is not known or not above 0."""
        loss, first = start.loss, start.first_loss
        if loss is None or first is None or not (loss > 0 and first > 0):
            return self.interval
        ratio = loss / first
        if not math.isfinite(ratio):
            return self.interval
        return max(1, min(LONGEST, math.ceil(self.interval * math.sqrt(ratio))))


LONGEST = 2**53  # the largest length that control records and manifests represent exactly


def schedule_of(settings: Settings, last_local_step: int, origin: int | None = None) -> Schedule:
    """The schedule of a run.

    Args:
        last_local_step: last step before the final synchronous phase, or of the training.
        origin: step after which the first round of a fixed length began; None is the end of the
            warm-up.
    """
    is_endless = STRATEGIES[settings.strategy].endless_warmup
    # With a hub the warm-up consists of rounds, too.
    warmup = None if is_endless else settings.warmup_steps if settings.hub is None else 0
    usual = warmup, settings.sync_interval, settings.fragments
    if settings.qsr_a is not None:
        return QuadraticSchedule(*usual, settings.qsr_a)
    if settings.interval == STL:
        return StagewiseSchedule(*usual, settings.stl_stages, last_local_step)
    if settings.interval == ADACOMM:
        return LossSchedule(*usual)
    return StepSchedule(*usual) if origin is None else LaterSchedule(*usual, origin)
