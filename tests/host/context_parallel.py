"""Context parallelism on CPU: an attention that gathers all keys and values, for tests only.

Megatron leaves context parallelism to Transformer Engine's attention; its own refuses it. Megatron
assigns the chunks of a sequence in zig-zag order, so that causal attention costs all ranks the
same; with two ranks:

    chunk    0 | 1 | 2 | 3
    rank     0 | 1 | 1 | 0

Rank i of C holds chunks i and 2C - 1 - i, in this order.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class GatheringAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's own attention, from this rank's queries to the keys of the complete sequence."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # The base class checks this size to refuse context parallelism, and reads it nowhere else.
        without_cp = copy.copy(config)
        without_cp.context_parallel_size = 1
        super().__init__(without_cp, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute causal attention; ignore the given mask, which covers this rank's chunks only."""
        group = parallel_state.get_context_parallel_group()
        positions = [_positions(rank, group.size(), len(query)) for rank in range(group.size())]
        own = positions[group.rank()]
        is_later = torch.cat(positions)[None, :] > own[:, None]  # a mask hides where it is true
        # Forward gathers in rank order; backward sums the gradients and scatters them.
        key = gather_from_sequence_parallel_region(key, group=group)
        value = gather_from_sequence_parallel_region(value, group=group)
        return super().forward(query, key, value, is_later[None, None], *args, **kwargs)


def _positions(rank: int, num_ranks: int, num_tokens: int) -> Tensor:
    """Positions in the sequence, int64 [num_tokens], of the tokens that a rank holds."""
    chunk = num_tokens // 2
    first, last = rank * chunk, (2 * num_ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


def install() -> None:
    """Make Megatron's local layers use this attention in this process, without undo."""
    LocalSpecProvider.core_attention = lambda self: GatheringAttention
