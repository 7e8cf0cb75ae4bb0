"""What the engine gets of a replica's model: units and their shards, gradients, router biases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import Parameter

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import EMBEDDING, FINAL, LAYER, MTP
from megatron_edit.engine import UnitPlan, forward_order, plan_units
from megatron_edit.errors import UsageError
from megatron_edit.host.model.optimizer import (
    EditDistributedOptimizer,
    ShardedOptimizer,
    is_quantized,
    param_shards_of,
    quantizers_of,
)
from megatron_edit.host.seams.megatron import DdpChunk, ModelChunk, ParamBucket, Router


@dataclass(frozen=True)
class ModelPlan:
    """Units of a model.

    Attributes:
        units: plan of the units of all trained parameters, with this rank's shards.
        unit_of: unit of each parameter of this rank.
        origins: parameter, first element and copy index of each shard, by the `id` of its tensor.
        has_tied_stages: whether several pipeline stages have a copy of the embedding.
    """

    units: UnitPlan
    unit_of: Mapping[torch.nn.Parameter, str]
    origins: Mapping[int, tuple[torch.nn.Parameter, int, int | None]]
    has_tied_stages: bool


def plan_model(
    chunks: Sequence[ModelChunk], optimizers: Sequence[ShardedOptimizer], replica: Group
) -> ModelPlan:
    """Plan the units of a model, with a list of units that all ranks of the replica agree on.

    Args:
        replica: group of all ranks of this replica.

    Raises:
        UsageError: a unit's parameters are on several pipeline stages, or a frozen parameter is
            quantized.
    """
    _check_frozen(chunks)
    named = [
        (parameter, (name, unit))
        for chunk in chunks
        for name, parameter, unit in named_units(chunk)
    ]
    stage_units = list(dict.fromkeys(unit for _, (_, unit) in named))
    own_units = {unit for p, (_, unit) in named if not getattr(p, "shared", False)}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = replica.all_gather_json((stage, stage_units, sorted(own_units)))
    everywhere = {unit for _, units, _ in stages for unit in units}
    _check_one_stage_each(everywhere, {(place, frozenset(own)) for place, _, own in stages})
    params = [f for optimizer in optimizers for f in param_shards_of(optimizer, dict(named))]
    return ModelPlan(
        units=plan_units(
            params,
            sorted(everywhere, key=forward_order),
            stage_units,
            quantizers_of(_with_quantized_params(optimizers), dict(named)),
        ),
        unit_of={parameter: unit for parameter, (_, unit) in named},
        origins={
            id(main): (parameter, optimizer.start_of(parameter), optimizer.copy_index)
            for optimizer in optimizers
            for parameter, main in optimizer.main_shards()
        },
        has_tied_stages=len({place for place, units, _ in stages if EMBEDDING in units}) > 1,
    )


def _with_quantized_params(
    optimizers: Sequence[ShardedOptimizer],
) -> Iterator[EditDistributedOptimizer]:
    for optimizer in optimizers:
        if isinstance(optimizer, EditDistributedOptimizer) and optimizer.has_quantized_params:
            yield optimizer


def _check_frozen(chunks: Sequence[ModelChunk]) -> None:
    """Refuse quantized frozen parameters, whose broadcast at the start is not supported."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad and is_quantized(parameter):
                raise UsageError(
                    f"--fp8-param-gather with the frozen parameter {name}",
                    "frozen parameters in eight bits are not supported together with --use-edit",
                    "drop --fp8-param-gather",
                )


def _check_one_stage_each(units: set[str], stages: set[tuple[int, frozenset[str]]]) -> None:
    """Refuse units on several pipeline stages: norms are reduced over one; ignore tied copies."""
    for unit in sorted(units):
        unit_stages = {stage for stage, own in stages if unit in own}
        if len(unit_stages) > 1:
            raise UsageError(
                f"unit {unit}",
                f"its parameters lie on pipeline stages {sorted(unit_stages)}, must be on one",
                "choose another pipeline layout",
            )


# ---- Assigns parameters of Megatron's GPT models to sync units, by their names


_LAYER = re.compile(r"^(?:decoder|encoder)\.layers\.(\d+)\.")
_MTP = re.compile(r"^mtp\.(?:layers\.)?(\d+)\.")
_FINAL = re.compile(r"^(?:(?:decoder|encoder)\.final_(?:layer)?norm|output_layer)\.")
_EMBEDDING = re.compile(r"^(?:embedding|position_embedding)\.")


def unit_of(name: str, parameter: torch.nn.Parameter, model: ModelChunk) -> str:
    """Return the name of a parameter's unit.

    Layers are numbered as Megatron numbers them over all pipeline stages (`layer_number`, from 1).

    Args:
        name: name from `model.named_parameters()`.
        parameter: the parameter; a tied copy of the embedding belongs to `embedding`.

    Raises:
        UsageError: the parameter belongs to no known unit.
    """
    if getattr(parameter, "shared_embedding", False) or _EMBEDDING.match(name):
        return EMBEDDING
    if found := _LAYER.match(name):
        stack = getattr(model, name.partition(".")[0])
        return f"{LAYER}.{stack.layers[int(found.group(1))].layer_number}"
    if found := _MTP.match(name):
        return f"{MTP}.{found.group(1)}"
    if _FINAL.match(name):
        return FINAL
    raise UsageError(
        f"model parameter {name}",
        "belongs to no supported sync unit (embedding, layers, final, mtp)",
        "train a GPT model, or report this model as unsupported",
        is_local=True,
    )


def named_units(model: ModelChunk) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    """Yield name, parameter and unit of every trainable parameter of an unwrapped model chunk."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, unit_of(name, parameter, model)


# ---- The gradients that this rank's optimizers read, in the buffers of Megatron's DDP


@dataclass(frozen=True)
class GradientPlace:
    """A parameter's gradient, or this rank's part of it, in a gradient shard.

    Attributes:
        first: its first element in the shard, counted in the flattened parameter.
        is_copied: whether the ranks of a data-parallel group have all elements, and not one each.
        gradient: the elements, flat; a view.
    """

    parameter: Parameter
    first: int
    shard: int
    where: slice
    is_copied: bool
    gradient: Tensor


def gradient_shards(model: Sequence[DdpChunk]) -> Iterator[Tensor]:
    """Yield flat views of gradient buffers: this rank's shards, or with plain DDP all.

    One per bucket, in buffer order, including padding (which is zero).
    """
    return (shard for _, _, shard in _shards(model))


def gradient_places(model: Sequence[DdpChunk]) -> Iterator[GradientPlace]:
    """Yield the gradients of all parameters that have elements in a gradient shard, in the order of
    the buckets' parameters, which is the same on all ranks with the same layers."""
    for number, (chunk, bucket, shard) in enumerate(_shards(model)):
        is_copied = not chunk.ddp_config.use_distributed_optimizer
        begin = _offset(shard, bucket.grad_data)
        for parameter in bucket.params_list:
            start = _offset(parameter.main_grad, bucket.grad_data) - begin  # may be negative
            low, high = max(start, 0), min(start + parameter.numel(), shard.numel())
            if low < high:
                yield GradientPlace(
                    parameter, low - start, number, slice(low, high), is_copied, shard[low:high]
                )


def _shards(model: Sequence[DdpChunk]) -> Iterator[tuple[DdpChunk, ParamBucket, Tensor]]:
    for chunk in model:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            for bucket in bucket_group.buckets:
                shard = bucket.grad_data.view(-1)
                if chunk.ddp_config.use_distributed_optimizer:
                    parts = shard.chunk(bucket_group.intra_distributed_optimizer_instance_size)
                    shard = parts[bucket_group.intra_distributed_optimizer_instance_rank]
                yield chunk, bucket, shard


def _offset(view: Tensor, data: Tensor) -> int:
    """Return the elements of `data` before `view`, which lies in it."""
    return int((view.data_ptr() - data.data_ptr()) // data.element_size())


# ---- State of MoE routers outside the optimizer: biases that balance the load of the experts


@dataclass(frozen=True)
class Routers:
    """The routers of a model that have a bias, with their units.

    Modules are stored because Megatron replaces the bias tensors when it changes their dtype.

    Attributes:
        modules: unit and Megatron's `TopKRouter`.
    """

    modules: tuple[tuple[str, Router], ...]

    @classmethod
    def of(cls, chunks: Sequence[ModelChunk], unit_of: Mapping[Parameter, str]) -> Routers:
        """Find the routers in unwrapped model chunks."""
        return cls(
            tuple(
                (unit_of[module.weight], module)
                for chunk in chunks
                for module in chunk.modules()
                if _biases(module) and getattr(module, "weight", None) in unit_of
            )
        )

    def biases(self) -> list[tuple[str, Tensor]]:
        """Return unit and bias, fp32 [experts], for averaging at a sync."""
        return [(unit, bias) for unit, module in self.modules for bias in _biases(module)]

    def token_counts(self) -> list[Tensor]:
        """Return the tokens per expert of the current global batch, fp32 [experts].

        Megatron's `_update_router_expert_bias` changes each bias by the sign of their difference
        from the mean.
        """
        return [
            module.local_tokens_per_expert
            for _, module in self.modules
            if getattr(module, "expert_bias", None) is not None
        ]

    def quantile_biases(self) -> list[Tensor]:
        """Return biases of `quantile_balancing`, fp32 [experts], which can be averaged directly."""
        return [
            module.qb_beta
            for _, module in self.modules
            if getattr(module, "qb_beta", None) is not None
        ]


def _biases(module: Router) -> list[Tensor]:
    found = (getattr(module, name, None) for name in ("expert_bias", "qb_beta"))
    return [bias for bias in found if isinstance(bias, Tensor)]
