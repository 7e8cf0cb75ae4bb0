"""Weights of the replicas in the average (paper 3.3, eq. of the weighted averaging; method 3.3).

Every rank computes them from the gathered norms, and all must get the same bits: sums are in the
order of the replicas, and the exponential is made of operations that every processor rounds alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_edit.method.norms import sum_in_rank_order

_LOG_2 = float.fromhex("0x1.62e42fefa39efp-1")
# The same in two parts: multiples of the first, up to 2^20, are exact.
_LOG_2_PARTS = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_LEAST_EXPONENT = -700.0  # exp of less is taken as 0
_NUM_TERMS = 14  # of the series: for |x| <= log(2) / 2 the rest is below 1e-17
_MANTISSA_BITS, _BIAS = 52, 1023  # of float64


def replica_weights(
    norms: Tensor, anomalous: Tensor, *, temperature: float | None, uniform: bool = False
) -> Tensor:
    """softmax(-G / T) over the replicas that are not anomalous, unit by unit.

    Args:
        norms: float64 [N, U], pseudo-gradient norms G.
        anomalous: bool [N, U], replicas that get weight 0.
        temperature: T; 1.0 is the paper's formula. None ("auto") takes, unit by unit, the median
            of the accepted norms (mean of the two middle ones where their number is even), which
            makes the weights independent of the model's size.
        uniform: True gives 1 / n to each of the n accepted replicas.

    Returns:
        float64 [N, U]; a column sums to 1, or is all zero where every replica is anomalous.
    """
    accepted = ~anomalous
    count = accepted.sum(dim=0)
    equal = accepted.double() / count.clamp(min=1).double()
    if uniform:
        return equal
    infinity = torch.full_like(norms, torch.inf)
    masked = torch.where(accepted, norms, infinity)
    lowest = masked.min(dim=0).values  # the shift: the largest exponent is 0, so no underflow
    if temperature is None:
        scale = _median_of_accepted(masked, count)
    else:
        scale = torch.full_like(lowest, temperature)
    distance = torch.where(accepted, norms - lowest, infinity)
    raised = torch.where(accepted, _exp(-distance / scale), torch.zeros_like(norms))
    total = sum_in_rank_order(raised)
    # T = 0 happens only if half of the norms are exactly 0: then the method specifies 1 / n.
    usable = (scale > 0) & (total > 0)
    return torch.where(usable, raised / torch.where(usable, total, torch.ones_like(total)), equal)


def blend_step_weights(weights: Tensor, accepted: Tensor, steps: Tensor, share: float) -> Tensor:
    """w <- (1 - rho) w + rho * steps_r / sum steps over the accepted replicas (method section 5).

    Args:
        weights: float64 [N, U], from `replica_weights`.
        accepted: bool [N, U]; the others keep weight 0. An accepted one may also have weight 0, if
            its norm is so far above the smallest that exp(-G / T) underflows.
        steps: float64 [N, U], inner steps since the unit's last sync.
        share: rho, in [0, 1].

    Returns:
        float64 [N, U]; columns sum to 1, or are zero as before.
    """
    if share == 0.0:
        return weights
    counted = torch.where(accepted, steps, torch.zeros_like(weights))
    total = sum_in_rank_order(counted)
    by_steps = torch.where(total > 0, counted / total.clamp(min=1.0), weights)
    blended = (1.0 - share) * weights + share * by_steps
    norm = sum_in_rank_order(blended)
    return torch.where(norm > 0, blended / torch.where(norm > 0, norm, 1.0), blended)


def effective_replicas(weights: Tensor) -> Tensor:
    """1 / sum_r w^2, float64 [U]: effective number of replicas in an average; 0 where none."""
    squares = (weights * weights).sum(dim=0)
    return torch.where(squares > 0, 1.0 / squares, torch.zeros_like(squares))


def _exp(exponents: Tensor) -> Tensor:
    """exp of numbers <= 0, float64, within 1e-15; 0 for those that are not numbers."""
    twos = (exponents / _LOG_2).round()
    rest = exponents - twos * _LOG_2_PARTS[0] - twos * _LOG_2_PARTS[1]
    series = torch.ones_like(rest)
    for number in range(_NUM_TERMS, 0, -1):
        series = series * rest / number + 1.0
    power = (twos.clamp(min=-_BIAS + 1).long() + _BIAS) << _MANTISSA_BITS
    found = series * power.view(torch.float64)
    return torch.where(exponents > _LEAST_EXPONENT, found, torch.zeros_like(found))


def _median_of_accepted(masked: Tensor, count: Tensor) -> Tensor:
    """Median of the finite entries of each column; `masked` holds inf elsewhere. 0 where none."""
    ordered = masked.sort(dim=0).values
    low = ((count - 1).clamp(min=0) // 2).unsqueeze(0)
    high = (count // 2).clamp(max=masked.shape[0] - 1).unsqueeze(0)
    below, above = ordered.gather(0, low), ordered.gather(0, high)
    # Halves before the sum: two norms of 1e308 must not overflow.
    middle = torch.where(low == high, below, 0.5 * below + 0.5 * above).squeeze(0)
    return torch.where(count > 0, middle, torch.zeros_like(middle))
