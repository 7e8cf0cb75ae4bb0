"""Hooks that put main shards, or the model's parameters, into other hands: as an optimizer that
keeps its own does, and a quantisation that all ranks of a shard group share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.host.spy import record


@dataclass(frozen=True)
class Kept:
    """A main shard behind an accessor, which shows the model what it takes.

    Attributes:
        main: Megatron's own, fp32.
        model: where the model reads it.
    """

    main: Tensor
    model: Tensor

    def numel(self) -> int:
        """Elements."""
        return self.main.numel()  # type: ignore[no-any-return]

    def read(self) -> Tensor:
        """A copy: what is changed in it must be written."""
        return self.main.clone()

    def write(self, values: Tensor) -> None:
        """Both at once."""
        self.main.copy_(values)
        self.model.copy_(values)


def hold() -> None:
    """Let every main shard of the distributed optimizers be behind an accessor."""
    from megatron_edit.host.model.optimizer import EditDistributedOptimizer

    record()

    def main_of(self: Any, parameter: torch.nn.Parameter, key: Tensor) -> Kept:
        where = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[parameter]
        data = self.buffers[buffer].buckets[bucket].param_data.view(-1)
        return Kept(key.detach().view(-1), data[where.start : where.end])

    EditDistributedOptimizer.main_of = main_of  # type: ignore[method-assign]


def quantize() -> None:
    """Let matrices be written by a function that is collective over the ranks of a shard group."""
    from megatron.core import fp8_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_edit.host.model import optimizer, planning

    record()

    def is_matrix(parameter: torch.nn.Parameter) -> bool:
        return bool(parameter.dim() == 2 and parameter.requires_grad)

    def write(models: list[Any], mains: list[Any], starts: list[Any], group: Any) -> None:
        count = torch.tensor([float(len(models))])
        dist.all_reduce(count, group=group)  # as of the largest elements, for the scales
        assert count.item() == len(models) * group.size(), "a rank has others, or did not come"
        for model, main, start in zip(models, mains, starts, strict=True):
            if main is not None:
                model.data.view(-1)[start : start + main.numel()].copy_(main)

    optimizer.is_quantized = planning.is_quantized = is_matrix  # type: ignore[attr-defined]
    optimizer.EditDistributedOptimizer.has_eight_bits = True  # type: ignore[assignment, method-assign]
    DistributedOptimizer._is_fp8_param_for_param_gather = staticmethod(is_matrix)
    fp8_utils.quantize_param_shard = write
