"""Scripts and optimizers that replace functions of Megatron, or keep main shards elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.host.spy import record


def replace_optimizer_step() -> None:
    """Replace `optimizer.step` by Megatron's own when training begins."""
    import megatron.training.training as training

    train = training.train

    @wraps(train)
    def replacing(step: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        own = type(optimizer).step
        optimizer.step = lambda: own(optimizer)
        return train(step, model, optimizer, *rest, **kwargs)

    training.train = replacing


def replace_training_log() -> None:
    """Replace `training_log` by Megatron's own when training begins."""
    import megatron.training.training as training

    train, log = training.train, training.training_log

    @wraps(train)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        training.training_log = log
        return train(*args, **kwargs)

    training.train = replacing


def finalize_gradients_as_before_0_19() -> None:
    """Let the loop set the model's `finalize_model_grads_func`, as that of 0.16 to 0.18 does, and
    record losses and gradient norms."""
    import megatron.training.training as training
    from megatron.core.utils import get_model_config

    from tests.host.spy import record

    train = training.train

    @wraps(train)
    def setting(step: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
        get_model_config(model[0]).finalize_model_grads_func = training.finalize_model_grads
        return train(step, model, *rest, **kwargs)

    training.train = setting
    record()


def turn_an_update() -> None:
    """Let rank 1 apply its first update with the opposite sign."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def turn(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.neg_()
        handle.remove()

    if os.environ["RANK"] == "1":
        handle = register_optimizer_step_pre_hook(turn)


# ---- main shards


@dataclass(frozen=True)
class Accessor:
    """A main shard behind an accessor that writes values to the model as well.

    Attributes:
        main: Megatron's main shard, fp32.
        model: the same elements of the model's parameter.
    """

    main: Tensor
    model: Tensor

    def numel(self) -> int:
        """Number of elements."""
        return self.main.numel()  # type: ignore[no-any-return]

    def read(self) -> Tensor:
        """Return a copy; changes to it must be written back."""
        return self.main.clone()

    def write(self, values: Tensor) -> None:
        """Write to the main shard and to the model."""
        self.main.copy_(values)
        self.model.copy_(values)


def use_accessors() -> None:
    """Put every main shard of the distributed optimizers behind an accessor."""
    from megatron_edit.host.model.optimizer import EditDistributedOptimizer

    record()

    def main_of(self: Any, parameter: torch.nn.Parameter, key: Tensor) -> Accessor:
        where = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[parameter]
        data = self.buffers[buffer].buckets[bucket].param_data.view(-1)
        return Accessor(key.detach().view(-1), data[where.start : where.end])

    EditDistributedOptimizer.main_of = main_of  # type: ignore[method-assign]


def quantize_collectively() -> None:
    """Write matrices by a function that is collective over the ranks of a shard group."""
    from megatron.core import fp8_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_edit.host.model import optimizer, planning

    record()

    def is_matrix(parameter: torch.nn.Parameter) -> bool:
        return bool(parameter.dim() == 2 and parameter.requires_grad)

    def write(models: list[Any], mains: list[Any], starts: list[Any], group: Any) -> None:
        count = torch.tensor([float(len(models))])
        dist.all_reduce(count, group=group)  # like the maximum for the scales
        assert count.item() == len(models) * group.size(), (
            "a rank has other matrices, or did not take part"
        )
        for model, main, start in zip(models, mains, starts, strict=True):
            if main is not None:
                model.data.view(-1)[start : start + main.numel()].copy_(main)

    optimizer.is_quantized = planning.is_quantized = is_matrix  # type: ignore[attr-defined]
    optimizer.EditDistributedOptimizer.has_quantized_params = True  # type: ignore[assignment, method-assign]
    DistributedOptimizer._is_fp8_param_for_param_gather = staticmethod(is_matrix)
    fp8_utils.quantize_param_shard = write
