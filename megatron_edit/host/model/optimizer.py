"""Gives the engine access to the parameter shards of Megatron's optimizers.

`EditDistributedOptimizer` is Megatron's `DistributedOptimizer` with the outer state of its shards.
Megatron constructs its optimizers by name, so that the class of an instance is changed after its
construction, and restored by `release`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from megatron_edit.engine import TIED_EMBEDDING, ParamShard, ShardAccessor, UnitPlan
from megatron_edit.host.model.quantized import is_quantized
from megatron_edit.host.model.shard_access import AdamShard, HybridShard
from megatron_edit.host.seams.megatron import InnerOptimizer, ParamBuffer

TIED_TP, TIED_EXPERT_TP = "tied-tp", "tied-expert-tp"


@dataclass(frozen=True)
class OuterShard:
    """Outer state of one parameter's shard on this rank, aligned with Megatron's main shard.

    Attributes:
        main: fp32 [n], Megatron's main shard, or an accessor that reads and writes it.
        anchor: fp32 [n], a view of the outer state.
        momentum: fp32 [n], a view of the outer state.
    """

    main: Tensor | ShardAccessor
    anchor: Tensor
    momentum: Tensor


class ShardedOptimizer(Protocol):
    """Interface of Megatron's optimizers for the engine's host."""

    def main_shards(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield model parameter and main shard, in the order of the optimizer's shard map.

        The second is the fp32 main shard, or the optimizer's key for it."""

    def main_of(self, parameter: torch.nn.Parameter, key: Tensor) -> Tensor | ShardAccessor:
        """Return the flat fp32 main shard, or its accessor, for a pair of `main_shards`."""

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank has the copy of the shard that counts in norms."""

    def target_of(self, parameter: torch.nn.Parameter, main: Tensor) -> Tensor | None:
        """Return the model's tensor to which a main shard is copied; None if there is none."""

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        """Return the index of the main shard's first element in the parameter."""

    @property
    def copy_index(self) -> int | None:
        """Index of this rank's copy of the shards; None if it is the data-parallel rank."""


class EditDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Megatron's distributed optimizer, with anchor and outer momentum of its ZeRO shards."""

    edit_outer: Mapping[int, OuterShard]
    edit_defers_gather: bool
    edit_keeps_padding: bool

    @classmethod
    def adopt(cls, optimizer: DistributedOptimizer) -> EditDistributedOptimizer:
        """Change the class of a Megatron optimizer to this one; `release` undoes it."""
        optimizer.__class__ = cls
        optimizer.edit_outer = {}
        optimizer.edit_defers_gather = False
        optimizer.edit_keeps_padding = False
        return optimizer

    def release(self) -> None:
        """Restore Megatron's class, and remove all attributes of this one."""
        for name in (
            "edit_outer", "edit_defers_gather", "edit_keeps_padding", "_defer_param_sync"
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        self.__class__ = DistributedOptimizer

    def main_shards(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield model parameter and 1-D shard of this rank.

        The shard is the fp32 main shard, or the 16-bit shard that is the inner optimizer's key."""
        if self.is_stub_optimizer:
            return
        halves = (
            self.shard_float16_groups
            if self.holds_main_shards
            else self.shard_fp32_from_float16_groups
        )
        for models, mains in (
            (self.model_float16_groups, halves),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                yield from zip(model_group, main_group, strict=True)

    @property
    def has_quantized_params(self) -> bool:
        """Whether parameters may be quantized, i.e. stored and gathered in 8 bits."""
        return not self.is_stub_optimizer and bool(self.ddp_config.fp8_param_gather)

    @property
    def holds_main_shards(self) -> bool:
        """Whether the inner optimizer stores the main shards of 16-bit parameters."""
        return bool(getattr(self.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))

    def main_of(self, parameter: torch.nn.Parameter, key: Tensor) -> Tensor | ShardAccessor:
        """Return the main shard, fp32 [n], or an accessor to it in the inner optimizer."""
        if hasattr(self.optimizer, "param_to_inner_param"):
            return HybridShard(self.optimizer, key)
        if self.holds_main_shards and key.dtype != torch.float32:
            return AdamShard(self.optimizer, key)
        return key.detach().view(-1)

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this is the first of the optimizer instances that have equal shards."""
        return bool(self.distributed_optimizer_instance_id == 0)

    def target_of(self, parameter: torch.nn.Parameter, main: Tensor) -> Tensor | None:
        """Return the shard's slice of the parameter buffer that Megatron gathers.

        None if the slice is the main shard, or if an accessor or the quantization writes it."""
        if is_quantized(parameter) or not isinstance(self.main_of(parameter, main), Tensor):
            return None
        where = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        buffer_index, _, bucket_index = self.model_param_gbuf_map[parameter]
        bucket = self.buffers[buffer_index].buckets[bucket_index]
        target = bucket.param_data.view(-1)[where.start : where.end]
        return None if target.data_ptr() == main.data_ptr() else target

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        """Return the index of the first element of this rank's ZeRO shard in the parameter."""
        return int(self._get_model_param_range_map(parameter)["param"].start)

    @property
    def copy_index(self) -> int | None:
        """Index of this optimizer instance; several may have copies of the same shards."""
        return int(self.distributed_optimizer_instance_id)

    def attach_outer_state(
        self, plan: UnitPlan, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        """Give each main shard its views of anchor and momentum, if these exist."""
        if not anchors:
            self.edit_outer = {}
            return
        mine = {id(main) for _, main in self.main_shards()}
        self.edit_outer = {
            id(param.source): OuterShard(
                param.main,
                anchors[shard.name][where],
                momenta[shard.name][where],
            )
            for shard in plan.shards
            for param, where in zip(shard.params, shard.slices, strict=True)
            if id(param.source) in mine
        }

    def sharded_param_state_fully_reshardable(self, *args: object, **kwargs: object) -> object:
        """Call Megatron's method with gathered buffers that include the padding of buckets.

        It uses offsets that count this padding, but the buffers that it gathers have none: with
        several buckets it would store wrong elements."""
        self.edit_keeps_padding = True
        try:
            return super().sharded_param_state_fully_reshardable(*args, **kwargs)
        finally:
            self.edit_keeps_padding = False

    def get_parameter_state_dp_zero(self, *args: object, **kwargs: object) -> object:
        """Call Megatron's method; for the caller above, add the padding of buckets."""
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is not None and self.edit_keeps_padding:
            for index, buffer in enumerate(self.buffers):
                for tensors in state[index].values():
                    pad_buckets(tensors, buffer)
        return state

    def step_with_ready_grads(self) -> bool:
        """Step, without Megatron's gather if it is deferred because of a sync."""
        if not self.edit_defers_gather:
            return bool(super().step_with_ready_grads())
        self._defer_param_sync = True
        try:
            return bool(super().step_with_ready_grads())
        finally:
            del self._defer_param_sync


class PlainOptimizer:
    """A Megatron optimizer without sharding (plain DDP): every rank has all parameters, M = 1.

    Args:
        optimizer: `FP32Optimizer` or `Float16OptimizerWithFloat16Params`.
    """

    def __init__(self, optimizer: InnerOptimizer) -> None:
        self._optimizer = optimizer
        is_mixed = hasattr(optimizer, "fp32_from_float16_groups")
        self._mixed = optimizer if is_mixed else None

    def main_shards(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield model parameter and main copy, fp32 of the parameter's shape.

        Both are the same tensor if the parameter is fp32."""
        if self._mixed is None:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, parameter
            return
        groups = zip(self._mixed.float16_groups, self._mixed.fp32_from_float16_groups, strict=True)
        for models, mains in groups:
            yield from zip(models, mains, strict=True)
        for parameters in self._mixed.fp32_from_fp32_groups:
            for parameter in parameters:
                yield parameter, parameter

    def main_of(self, parameter: torch.nn.Parameter, key: Tensor) -> Tensor | ShardAccessor:
        """Return a flat view of the main copy, fp32 [n]."""
        return key.detach().view(-1)

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this is the first data-parallel rank; all of them have equal copies."""
        if getattr(parameter, "allreduce", True):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:
            group = parallel_state.get_expert_data_parallel_group()
        return bool(group.rank() == 0)

    def target_of(self, parameter: torch.nn.Parameter, main: Tensor) -> Tensor | None:
        """Return the flat model parameter; None if it is the main copy."""
        return None if parameter is main else parameter.detach().view(-1)

    def start_of(self, parameter: torch.nn.Parameter) -> int:
        """Return 0: the main copy has the complete parameter."""
        return 0

    @property
    def copy_index(self) -> int | None:
        """None: the data-parallel rank is the index of the copy."""
        return None


def pad_buckets(tensors: dict[str, object], buffer: ParamBuffer) -> None:
    """Insert the padding of buckets into the gathered tensors of a buffer.

    Args:
        tensors: tensors by kind, fp32 [numel without padding]; replaced by tensors with padding.
        buffer: Megatron's buffer.
    """
    for kind, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.numel() == buffer.numel:
            continue
        padded, start = torch.zeros(buffer.numel, dtype=tensor.dtype), 0
        for bucket in buffer.buckets:
            stop = start + bucket.numel_unpadded
            padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensor[start:stop]
            start = stop
        tensors[kind] = padded


def param_shards_of(
    optimizer: ShardedOptimizer,
    names: Mapping[torch.nn.Parameter, tuple[str, str]],
) -> Iterator[ParamShard]:
    """Yield the optimizer's main shards with their units.

    Args:
        optimizer: optimizer with the shards.
        names: name and unit of every trainable parameter.
    """
    for parameter, main in optimizer.main_shards():
        name, unit = names[parameter]
        is_expert = not getattr(parameter, "allreduce", True)
        is_unique = param_is_not_tensor_parallel_duplicate(
            parameter,
            tp_group=parallel_state.get_expert_tensor_parallel_group()
            if is_expert
            else parallel_state.get_tensor_model_parallel_group(),
        )
        yield ParamShard(
            parameter=name,
            unit=unit,
            main=optimizer.main_of(parameter, main),
            is_counted=(
                is_unique
                and not getattr(parameter, "shared", False)
                and optimizer.is_first_holder(parameter)
            ),
            tie=tie_of(parameter),
            source=main,
            target=optimizer.target_of(parameter, main),
        )


def tie_of(parameter: torch.nn.Parameter) -> str | None:
    """Return the group over which this parameter has copies that must stay equal, if any."""
    if getattr(parameter, "shared_embedding", False):
        return TIED_EMBEDDING
    if getattr(parameter, "tensor_model_parallel", False):
        return None
    return TIED_TP if getattr(parameter, "allreduce", True) else TIED_EXPERT_TP
