"""Megatron's layer-wise distributed optimizer (Muon): whole parameters, shared out among ranks.

It chains optimizers that hold this rank's parameters alone, and gathers those of all ranks after
the step. Only Megatron 0.19 and newer has it as we use it, so this module is imported on demand.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from megatron_edit.host.model.optimizer import PlainOptimizer


class EditLayerWiseOptimizer(LayerWiseDistributedOptimizer):  # type: ignore[misc]
    """Megatron's layer-wise distributed optimizer, whose gather can wait for a sync.

    Made from an instance of Megatron's class, like `EditDistributedOptimizer`.
    """

    edit_defers_gather: bool

    @classmethod
    def adopt(cls, optimizer: LayerWiseDistributedOptimizer) -> EditLayerWiseOptimizer:
        """Turn an instance of Megatron's class into one of this class. `release` undoes it."""
        optimizer.__class__ = cls
        optimizer.edit_defers_gather = False
        return optimizer  # type: ignore[no-any-return]

    def release(self) -> None:
        """Become an instance of Megatron's own class again."""
        self.__dict__.pop("edit_defers_gather", None)
        self.__class__ = LayerWiseDistributedOptimizer

    def gather(self) -> None:
        """Gather the parameters in the replica, where no buffers of Megatron's DDP do it."""
        if not self.use_buffer_param_sync:
            self.allgather_params()

    def allgather_params(self) -> None:
        """Megatron's, of parameters apart from its buffers; not before a sync."""
        if not self.edit_defers_gather:
            super().allgather_params()

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Megatron's, of parameters in its buffers; not before a sync."""
        if not self.edit_defers_gather:
            super().start_param_sync_for_bucket_group_subset()


class LayerWiseShards(PlainOptimizer):
    """One of the optimizers that the layer-wise one chains: parameters that this rank alone steps.

    The main copies are whole: fp32 of the parameter's shape, beside bf16 parameters.
    """

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Always: no other data-parallel rank of the replica holds its main copy."""
        return True

    @property
    def copy_index(self) -> int | None:
        """0: there are no copies."""
        return 0
