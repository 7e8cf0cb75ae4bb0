"""Norms in float64, without a float64 copy of the tensor. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that a CPU converts at once: limits the scratch to 8 MiB.
_CHUNK = 1 << 20


def sum_of_squares(*parts: Tensor) -> Tensor:
    """Sum of squares of one or more fp32 [n] on a device, a float64 scalar there, without overflow.

    The same bits for the same values: the order depends only on each n and on the type of device.
    """
    device = parts[0].device
    if device.type != "cpu":
        return fused_sum_of_squares(parts)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        of_part = torch.zeros_like(total)
        for chunk in part.split(_CHUNK):
            of_part += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
        total += of_part
    return total


def fused_sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """The same in a few kernels for all parts, which convert each value as they read it."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    # The public `torch.linalg.vector_norm` takes five kernels a part, and a float64 copy.
    return torch.stack(torch._foreach_norm(filled, 2, dtype=torch.float64)).square().sum()


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Sum [ranks, ...] over the ranks, first to last: the same bits on every rank.

    As a bag of embeddings, which is one launch for any number of ranks, and adds them in this order
    on all devices. (PyTorch refuses a cumulative sum on a GPU with `--deterministic-mode`.)
    """
    columns = rows.reshape(len(rows), -1)
    ranks = torch.arange(len(rows), device=rows.device).unsqueeze(0)
    summed = torch.nn.functional.embedding_bag(ranks, columns, mode="sum")
    return summed.reshape(rows.shape[1:])
