"""What happens to one unit's shard at a sync: contribution, clip, outer step (method 3.4-3.7)."""

from __future__ import annotations

import torch
from torch import Tensor

CLIP_EPSILON = 1e-6


def weighted_contribution(delta: Tensor, weight: float) -> Tensor:
    """This replica's addend to the weighted average, of the shape and dtype of `delta`.

    A replica that is left out contributes exact zeros by selection: 0 * inf would be NaN.
    """
    return weighted_contribution_(delta.clone(), weight)


def weighted_contribution_(delta: Tensor, weight: float) -> Tensor:
    """`weighted_contribution`, in place."""
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


def nesterov_step_(
    anchor: Tensor,
    momentum: Tensor,
    average: Tensor,
    *,
    clip: float | Tensor,
    lr: float,
    momentum_coefficient: float,
) -> None:
    """b <- mu b + c Dbar;  A <- A - nu (c Dbar + mu b), in place (method 3.7).

    Args:
        anchor: A, fp32 [n]. Mutated.
        momentum: b, fp32 [n]. Mutated.
        average: Dbar, fp32 [n], a descent direction. Used as scratch.
        clip: c; a number, or a scalar tensor, which no host has to read.
        lr: nu, the outer learning rate.
        momentum_coefficient: mu, the outer momentum.
    """
    average.mul_(clip)
    momentum.mul_(momentum_coefficient).add_(average)
    anchor.sub_(average.add_(momentum, alpha=momentum_coefficient), alpha=lr)
