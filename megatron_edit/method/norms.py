"""Norms in float64, without a float64 copy of the tensor. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements converted at once: limits the scratch to 8 MiB on the CPU, and to 128 MiB where launches
# cost more than memory.
_CHUNK = {"cpu": 1 << 20}
_CHUNK_ELSEWHERE = 1 << 24


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares of fp32 [n], a float64 scalar on the tensor's device, without overflow.

    The same bits for the same values: the split into chunks depends only on n and the device type.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(_CHUNK.get(values.device.type, _CHUNK_ELSEWHERE)):
        total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Sum [ranks, ...] over the ranks, first to last: the same bits on every rank.

    A cumulative sum, which is one launch for any number of ranks. For a single column a GPU may use
    another order, so a single number is duplicated.
    """
    columns = rows.reshape(len(rows), -1)
    if columns.shape[1] == 1:
        columns = columns.expand(-1, 2)
    return columns.cumsum(dim=0)[-1, : rows[0].numel()].reshape(rows.shape[1:])
