"""Arithmetic of a sync on one unit's shard: contribution, clip, outer step (method 3, 6).

Every replica runs the outer step for itself, and all must get the same bits, also on unlike
processors: each product and each sum is rounded on its own. `add_` with `alpha` is not used: it
rounds only once where the processor has a fused multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import SLOW_MOMENTUM, STALE_MOMENTUM, STRATEGIES

CLIP_EPSILON = 1e-6


def weighted_contribution_(delta: Tensor, weight: float) -> Tensor:
    """Make a pseudo-gradient this replica's addend to the weighted average, in place.

    Weight 0, of a rejected replica, gives exact zeros without a product: 0 * inf would be NaN.
    """
    return delta.zero_() if weight == 0.0 else delta.mul_(weight)


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor:
    """c = min(1, phi / (norm + 1e-6)), float64, of the shape of `norm`.

    Args:
        norm: float64, ||average of the unit|| over the whole replica.
        max_norm: phi; None switches the clip off (c = 1).
    """
    if max_norm is None:
        return torch.ones_like(norm)
    return (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)


class OuterRule(Protocol):
    """Outer step: updates anchor and momentum with the average."""

    def step_(
        self,
        anchor: Tensor,
        momentum: Tensor,
        average: Tensor,
        *,
        clip: float | Tensor,
        inner_lr: float,
    ) -> None:
        """Update anchor and momentum in place.

        Args:
            anchor: A, fp32 [n]. Mutated.
            momentum: b, fp32 [n]. Mutated.
            average: Dbar, fp32 [n], a descent direction. Used as scratch.
            clip: c; a number, or a scalar tensor, which needs no host read.
            inner_lr: learning rate of the inner optimizer at the sync.
        """


@dataclass(frozen=True)
class Nesterov:
    """b <- mu b + c Dbar;  A <- A - nu (c Dbar + mu b) (method 3.7; EDiT, DiLoCo).

    With nu = 1 and mu = 0 the anchor becomes the average of the parameters (local SGD).
    """

    lr: float
    momentum: float

    def step_(
        self,
        anchor: Tensor,
        momentum: Tensor,
        average: Tensor,
        *,
        clip: float | Tensor,
        inner_lr: float,
    ) -> None:
        """Update anchor and momentum, fp32 [n], in place; the average is used as scratch."""
        average.mul_(clip)
        momentum.mul_(self.momentum).add_(average)
        anchor.sub_(average.mul_(self.lr)).sub_(
            average.copy_(momentum).mul_(self.lr * self.momentum)
        )


@dataclass(frozen=True)
class Averaging:
    """b <- 0;  A <- A - c Dbar: the anchor becomes the average of the parameters."""

    def step_(
        self,
        anchor: Tensor,
        momentum: Tensor,
        average: Tensor,
        *,
        clip: float | Tensor,
        inner_lr: float,
    ) -> None:
        """Update anchor and momentum, fp32 [n], in place; the average is used as scratch."""
        anchor.sub_(average.mul_(clip))
        momentum.zero_()


@dataclass(frozen=True)
class SlowMomentum:
    """u <- beta u + c Dbar / lr;  A <- A - alpha lr u (SlowMo, arXiv 1910.00643, Algorithm 1).

    At lr 0 the division is undefined: the anchor becomes the average, and u does not change.

    Attributes:
        lr: alpha, the slow learning rate.
    """

    lr: float
    momentum: float

    def step_(
        self,
        anchor: Tensor,
        momentum: Tensor,
        average: Tensor,
        *,
        clip: float | Tensor,
        inner_lr: float,
    ) -> None:
        """Update anchor and momentum, fp32 [n], in place; at `inner_lr` 0 the anchor alone."""
        average.mul_(clip)
        if inner_lr == 0.0:
            anchor.sub_(average)
            return
        momentum.mul_(self.momentum).add_(average.mul_(1.0 / inner_lr))
        anchor.sub_(average.copy_(momentum).mul_(self.lr * inner_lr))


@dataclass(frozen=True)
class StaleMomentum:
    """m <- beta m + c Dbar / Lambda, clamped;  A <- A - alpha m (CO2, arXiv 2401.16265).

    Attributes:
        lr: alpha.
        gap: Lambda, the penalty on the staleness gap.
        bound: phi_m, largest element of m; None does not clamp.
    """

    lr: float
    momentum: float
    gap: float
    bound: float | None

    def step_(
        self,
        anchor: Tensor,
        momentum: Tensor,
        average: Tensor,
        *,
        clip: float | Tensor,
        inner_lr: float,
    ) -> None:
        """Update anchor and momentum, fp32 [n], in place; `inner_lr` is not used."""
        average.mul_(clip)
        momentum.mul_(self.momentum).add_(average.mul_(1.0 / self.gap))
        if self.bound is not None:
            momentum.clamp_(-self.bound, self.bound)
        anchor.sub_(average.copy_(momentum).mul_(self.lr))


def outer_rule(settings: Settings) -> OuterRule:
    """The rule of the strategy's outer step."""
    kind = STRATEGIES[settings.strategy].outer
    lr, momentum = settings.outer_lr, settings.outer_momentum
    if kind == SLOW_MOMENTUM:
        return SlowMomentum(lr, momentum)
    if kind == STALE_MOMENTUM:
        return StaleMomentum(lr, momentum, settings.co2_gap, settings.co2_clip)
    return Nesterov(lr, momentum)
