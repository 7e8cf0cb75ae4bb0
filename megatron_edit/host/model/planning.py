"""Plans the units of a replica's model, and the origin of each of their parameter shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import EMBEDDING
from megatron_edit.engine import UnitPlan, forward_order, plan_units
from megatron_edit.errors import UsageError
from megatron_edit.host.model.naming import named_units
from megatron_edit.host.model.optimizer import (
    EditDistributedOptimizer,
    ShardedOptimizer,
    param_shards_of,
)
from megatron_edit.host.model.quantized import is_quantized, quantizers_of
from megatron_edit.host.seams.megatron import ModelChunk


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
        chunks: unwrapped chunks of the model.
        optimizers: optimizers of its parameters.
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
