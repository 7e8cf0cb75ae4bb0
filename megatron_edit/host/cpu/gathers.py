"""Replaces gathers of Megatron that do not work with gloo.

Coalesced gathers are split into single ones, because torch's coalesced gather corrupts the heap:
two threads of a gloo group finish its operations, and each assigns the operation's name to a string
of the group without a lock (``ProcessGroupGloo::runLoop``, seen in torch 2.13.0). Only the name
``ALLGATHER_COALESCED`` is too long for the string's inline storage, so that two such operations
that end at the same time free the same heap block twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_edit.host.seams.patching import Patcher

# Coalesced -> single; names in newer torch, then in older (2.13 has both).
_SINGLE = {
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "_allgather_base",
}


def split_coalesced_gathers(patcher: Patcher) -> None:
    """Replace coalesced gathers by single ones with a common handle.

    The gathered bits, and the order in which ranks issue the gathers, are the same.

    Mutates: the class of torch's process groups, through `patcher`.
    """
    for coalesced, single in _SINGLE.items():
        if hasattr(dist.ProcessGroup, coalesced):
            patcher.wrap(
                dist.ProcessGroup, coalesced, _one_by_one(getattr(dist.ProcessGroup, single))
            )


class _Gathers:
    """Handle of several gathers."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all gathers are complete."""
        for work in self._works:
            work.wait()


def _one_by_one(
    single: Callable[..., dist.Work],
) -> Callable[[Callable[..., object]], Callable[..., _Gathers]]:
    def around(coalesced: Callable[..., object]) -> Callable[..., _Gathers]:
        @functools.wraps(coalesced)
        def gather(
            group: dist.ProcessGroup,
            outputs: Sequence[torch.Tensor],
            inputs: Sequence[torch.Tensor],
            *options: object,
        ) -> _Gathers:
            pairs = zip(outputs, inputs, strict=True)
            return _Gathers([single(group, output, part, *options) for output, part in pairs])

        return gather

    return around


def patch_layer_wise_gathers(patcher: Patcher) -> None:
    """Make Megatron's layer-wise distributed optimizer broadcast parameters instead of gathering.

    Its gather takes tensors of different sizes from the ranks, which NCCL supports and gloo does
    not. Megatron also implements broadcasts with the same results. Imports Megatron; does nothing
    if it has no such optimizer.

    Mutates: the class, through `patcher`.
    """
    try:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    except ImportError:
        return

    def broadcasting(gather: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(gather)
        def broadcast(optimizer: LayerWiseDistributedOptimizer) -> object:
            return optimizer.broadcast_params()

        return broadcast

    patcher.wrap(LayerWiseDistributedOptimizer, "allgather_params", broadcasting)
