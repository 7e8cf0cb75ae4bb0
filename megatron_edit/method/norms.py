"""Norms in float64, without a float64 copy of what is measured. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements converted at once: bounds the scratch at 8 MiB, and where launches cost more than memory
# at 128 MiB.
_CHUNK = {"cpu": 1 << 20}
_CHUNK_ELSEWHERE = 1 << 24


def sum_of_squares(values: Tensor) -> Tensor:
    """Of fp32 [n], as a float64 scalar on the tensor's device, which cannot overflow.

    The same bits for the same values: the cut into chunks depends on n and the kind of device.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(_CHUNK.get(values.device.type, _CHUNK_ELSEWHERE)):
        total += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return total


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Add [ranks, ...] over the ranks, first to last: the same bits on every rank.

    A running sum, as one launch for however many ranks. Of one column it could be taken in another
    order on a GPU, so a single number has a copy beside it.
    """
    columns = rows.reshape(len(rows), -1)
    if columns.shape[1] == 1:
        columns = columns.expand(-1, 2)
    return columns.cumsum(dim=0)[-1, : rows[0].numel()].reshape(rows.shape[1:])
