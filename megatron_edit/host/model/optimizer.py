"""Gives the engine access to the parameter shards of Megatron's optimizers.

`EditDistributedOptimizer` is Megatron's `DistributedOptimizer` with the outer state of its shards.
Megatron constructs its optimizers by name, so that the class of an instance is changed after its
construction, and restored by `release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core import fp8_utils, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from megatron_edit.engine import TIED_EMBEDDING, ParamShard, ShardAccessor, UnitPlan
from megatron_edit.errors import UsageError
from megatron_edit.host.seams.megatron import (
    FusedAdam,
    HybridOptimizer,
    InnerOptimizer,
    ParamBuffer,
    QuantizingOptimizer,
)

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


# ---- Adapts Megatron's layer-wise distributed optimizer (Muon), which assigns parameters to
# ranks
#
# It chains optimizers that have only this rank's parameters, and gathers those of all ranks after
# the step. It needs Megatron 0.19 or newer, so that this module is imported on demand.


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


# ---- Accessors for main shards that are stored in the state of an optimizer
#
# With ``--use-precision-aware-optimizer`` Megatron has no fp32 copy: Transformer Engine's Adam
# has it, as fp32 or as the remainder of bf16 parameters. With ``--optimizer-cpu-offload`` it is a
# tensor of Megatron's hybrid optimizer, which may be in host memory. Loading a checkpoint
# replaces both, so that they are looked up at each use.


MASTER = "master_param"
_LOW = 0xFFFF


@dataclass(frozen=True)
class AdamShard:
    """A main shard in the state of Transformer Engine's Adam.

    Before the first step there is no state, and theta is the model's shard, from which Adam will
    begin.

    Attributes:
        optimizer: optimizer with the state.
        model: bf16 or fp16 [n], a view of the model's parameter; the optimizer's key of the state.
    """

    optimizer: FusedAdam
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """Return theta, fp32 [n]: Adam's main copy, or the model's values before the first step.

        A main copy that is stored as a remainder is joined with the model's values."""
        if MASTER not in self.optimizer.state.get(self.model, {}):
            return self.model.detach().float()
        main = self.optimizer.get_unscaled_state(self.model, MASTER)
        return join_remainder(self.model.detach(), main) if main.dtype == torch.int16 else main

    def write(self, values: Tensor) -> None:
        """Set theta to `values`, fp32 [n]; the model's shard is rounded as by Adam's kernels."""
        state, model = self.optimizer.state.get(self.model, {}), self.model.detach()
        if MASTER in state and state[MASTER].dtype == torch.int16:
            rounded, remainder = split_fp32(values)
            model.copy_(rounded)
            self.optimizer.set_scaled_state(self.model, MASTER, remainder)
            return
        model.copy_(values)
        if MASTER in state:
            self.optimizer.set_scaled_state(self.model, MASTER, values)


@dataclass(frozen=True)
class HybridShard:
    """A main shard of Megatron's hybrid optimizer, on the device or in host memory.

    In host memory, the host blocks for each copy, because the CPU optimizer uses the shard.

    Attributes:
        optimizer: optimizer with the shard.
        model: [n], a view of the model's parameter; the optimizer's key of the shard.
    """

    optimizer: HybridOptimizer
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """Return theta, fp32 [n], on the parameter's device: a copy if it is stored elsewhere."""
        return self._main.to(device=self.model.device, dtype=torch.float32)

    def write(self, values: Tensor) -> None:
        """Set theta to `values`, fp32 [n], in the optimizer's copy and in the model's parameter."""
        self._main.copy_(values)
        self.model.detach().copy_(values)

    @property
    def _main(self) -> Tensor:
        return self.optimizer.param_to_inner_param[self.model].detach()


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bf16 and an int16 remainder, bit for bit as Adam's kernels do.

    Args:
        values: fp32 [n].
    """
    bits = values.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half, as a signed number
    high = (bits >> 16) + (remainder < 0)  # rounded up if the low half is at least a half
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_remainder(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the exact fp32 [n] from the results of `split_fp32`.

    Args:
        rounded: bf16 [n].
        remainder: int16 [n].
    """
    high = rounded.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & _LOW)).view(torch.float32)


# ---- Writes quantized (8-bit) parameters (``--fp8-param-gather``) by Megatron's quantization
#
# A main shard cannot be copied into such a parameter, because its scale depends on all ranks that
# have a shard of it. Megatron's function takes lists of parameters and is collective over these
# ranks, so that all of them call it once for each unit and optimizer.


def is_quantized(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is stored in 8 bits."""
    is_grouped = getattr(fp8_utils, "is_grouped_tensor_with_quantized_storage", None)  # from 0.19
    return bool(fp8_utils.is_float8tensor(parameter) or (is_grouped and is_grouped(parameter)))


def quantizers_of(
    optimizers: Iterable[object], unit_of: Mapping[torch.nn.Parameter, tuple[str, str]]
) -> dict[str, Callable[[], None]]:
    """Return, for each unit with quantized parameters, a function that writes them.

    Args:
        optimizers: Megatron's distributed optimizers, in the same order on all ranks.
        unit_of: name and unit of each parameter.

    Raises:
        UsageError: this Megatron does not support it (older than 0.19).
    """
    parts: dict[str, list[Callable[[], None]]] = {}
    for optimizer in optimizers:
        if not hasattr(optimizer, "_expand_quantized_param_shard_for_cast"):
            raise UsageError(
                "--fp8-param-gather",
                "with --use-edit it needs megatron-core 0.19 or newer",
                "use a newer Megatron-LM, or drop the flag",
            )
        for unit, quantize in _of_optimizer(optimizer, unit_of).items():
            parts.setdefault(unit, []).append(quantize)
    return {unit: _call_in_order(quantizers) for unit, quantizers in parts.items()}


def _call_in_order(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call_all() -> None:
        for function in functions:
            function()

    return call_all


def _of_optimizer(
    optimizer: QuantizingOptimizer, unit_of: Mapping[torch.nn.Parameter, tuple[str, str]]
) -> dict[str, Callable[[], None]]:
    units: dict[str, set[int]] = {}
    for parameter in optimizer._get_fp8_params_and_shard_fp32_from_fp8()[0]:
        units.setdefault(unit_of[parameter][1], set()).add(id(parameter))
    return {unit: _quantizer(optimizer, chosen) for unit, chosen in units.items()}


def _quantizer(optimizer: QuantizingOptimizer, chosen: set[int]) -> Callable[[], None]:
    def quantize() -> None:
        lists: tuple[list[object], list[object], list[object]] = ([], [], [])
        # Read at each call: a load may have replaced the tensors of main shards.
        for parameter, main, start in zip(
            *optimizer._get_fp8_params_and_shard_fp32_from_fp8(), strict=True
        ):
            if id(parameter) in chosen:
                # The function takes the members of a group of parameters.
                parts = optimizer._expand_quantized_param_shard_for_cast(parameter, main, start)
                for target, part in zip(lists, parts, strict=True):
                    target.extend(part)
        fp8_utils.quantize_param_shard(*lists, optimizer.data_parallel_group)

    return quantize
