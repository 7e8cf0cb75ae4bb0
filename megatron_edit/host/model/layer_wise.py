"""Adapts Megatron's layer-wise distributed optimizer (Muon), which assigns parameters to ranks.

It chains optimizers that have only this rank's parameters, and gathers those of all ranks after
the step. It needs Megatron 0.19 or newer, so that this module is imported on demand.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from megatron_edit.host.model.optimizer import PlainOptimizer


class EditLayerWiseOptimizer(LayerWiseDistributedOptimizer):  # type: ignore[misc]
    """Megatron's layer-wise distributed optimizer with a gather that can be deferred until a sync.

    Made from an instance of Megatron's class, like `EditDistributedOptimizer`.
    """

    edit_defers_gather: bool

    @classmethod
    def adopt(cls, optimizer: LayerWiseDistributedOptimizer) -> EditLayerWiseOptimizer:
        """Change the class of a Megatron optimizer to this one; `release` undoes it."""
        optimizer.__class__ = cls
        optimizer.edit_defers_gather = False
        return optimizer

    def release(self) -> None:
        """Restore Megatron's class."""
        self.__dict__.pop("edit_defers_gather", None)
        self.__class__ = LayerWiseDistributedOptimizer

    def gather(self) -> None:
        """Gather the parameters in the replica, unless buffers of Megatron's DDP do."""
        if not self.use_buffer_param_sync:
            self.allgather_params()

    def allgather_params(self) -> None:
        """Gather parameters outside of Megatron's buffers, unless the gather is deferred."""
        if not self.edit_defers_gather:
            super().allgather_params()

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Gather parameters in Megatron's buffers, unless the gather is deferred."""
        if not self.edit_defers_gather:
            super().start_param_sync_for_bucket_group_subset()


class LayerWiseShards(PlainOptimizer):
    """An optimizer chained by the layer-wise one, with parameters that only this rank steps.

    Main copies are not sharded: fp32 of the parameter's shape, for bf16 parameters.
    """

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Return True: no other data-parallel rank of the replica has a main copy."""
        return True

    @property
    def copy_index(self) -> int | None:
        """0: there is only one copy."""
        return 0
