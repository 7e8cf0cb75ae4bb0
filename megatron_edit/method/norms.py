"""Norms in float64, without a float64 copy of what is measured. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements converted at once: bounds the scratch at 8 MiB


def sum_of_squares(values: Tensor) -> Tensor:
    """Of fp32 [n], as a float64 scalar on the tensor's device, which cannot overflow.

    The same bits for the same values: the cut into chunks depends on n alone.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(_CHUNK):
        total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Add [ranks, ...] over the ranks, first to last: the same bits on every rank."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
