"""Rows of tables that have one for each replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of(table: Tensor, rows: Sequence[int | None]) -> Tensor:
    """The rows of these replicas, in this order; zeros for None, a new replica.

    Args:
        table: [N, ...].
    """
    chosen = torch.zeros(len(rows), *table.shape[1:], dtype=table.dtype)
    for place, row in enumerate(rows):
        if row is not None:
            chosen[place] = table[row]
    return chosen
