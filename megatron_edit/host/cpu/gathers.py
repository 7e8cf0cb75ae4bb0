"""Gathers that gloo cannot do as Megatron asks for them.

Those that Megatron coalesces reach it one by one: torch's coalesced one corrupts the heap.

Two threads of a gloo group finish its operations. Each then assigns the operation's name to one
string of the group, without a lock (``ProcessGroupGloo::runLoop``, seen in torch 2.13.0). Of all
names only ``ALLGATHER_COALESCED`` is too long for the string's own storage, so that two of these
which end at the same time free one block of the heap twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_edit.host.seams.patching import Patcher

# Coalesced -> single: the names of newer torch (2.13 has both pairs), then of older.
_SINGLE = {
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "_allgather_base",
}


def separate_gathers(patcher: Patcher) -> None:
    """Let every coalesced gather be as many single ones, which a single handle waits for.

    The gathered bits are the same, and so is the order in which the ranks issue them.

    Mutates: the class of torch's process groups, through `patcher`.
    """
    for coalesced, single in _SINGLE.items():
        if hasattr(dist.ProcessGroup, coalesced):
            patcher.wrap(
                dist.ProcessGroup, coalesced, _one_by_one(getattr(dist.ProcessGroup, single))
            )


class _Gathers:
    """The handle of gathers that were issued together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all of them are done."""
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


def serve_layer_wise_gathers(patcher: Patcher) -> None:
    """Let Megatron's layer-wise distributed optimizer broadcast parameters instead of gathering.

    Its gather takes tensors of a different size from each rank, which NCCL knows and gloo does
    not. Megatron has the broadcasts beside it, for reference: the same bits. Imports Megatron;
    does nothing where it has no such optimizer.

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
