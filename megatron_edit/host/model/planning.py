"""What a replica's model consists of: its units, and where each param of them comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_edit.comm.collectives import Group
from megatron_edit.engine import EMBEDDING, UnitPlan, forward_order, plan_units
from megatron_edit.errors import UsageError
from megatron_edit.host.model.naming import named_units
from megatron_edit.host.model.optimizer import ShardedOptimizer, param_shards_of
from megatron_edit.host.seams.megatron import ModelChunk


@dataclass(frozen=True)
class ModelPlan:
    """A model as the engine sees it.

    Attributes:
        units: that hold all trained parameters, with this rank's params.
        unit_of: the unit of each parameter of this rank.
        origins: of a param, by the `id` of its tensor: its parameter, its first element, and
            which copy this is.
        has_tied_stages: whether several pipeline stages hold the embedding.
    """

    units: UnitPlan
    unit_of: Mapping[torch.nn.Parameter, str]
    origins: Mapping[int, tuple[torch.nn.Parameter, int, int | None]]
    has_tied_stages: bool


def plan_model(
    chunks: Sequence[ModelChunk], optimizers: Sequence[ShardedOptimizer], replica: Group
) -> ModelPlan:
    """Agree with the other ranks of the replica on the list of units.

    Args:
        chunks: of the model, unwrapped.
        optimizers: of its parameters.
        replica: all ranks of this replica.

    Raises:
        UsageError: a unit's parameters lie on several pipeline stages.
    """
    named = [
        (parameter, (name, unit))
        for chunk in chunks
        for name, parameter, unit in named_units(chunk)
    ]
    stage_units = list(dict.fromkeys(unit for _, (_, unit) in named))
    own_units = {unit for p, (_, unit) in named if not getattr(p, "shared", False)}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = replica.all_gather_objects((stage, stage_units, own_units))
    everywhere = {unit for _, units, _ in stages for unit in units}
    _check_one_stage_each(everywhere, {(place, frozenset(own)) for place, _, own in stages})
    params = [f for optimizer in optimizers for f in param_shards_of(optimizer, dict(named))]
    return ModelPlan(
        units=plan_units(params, sorted(everywhere, key=forward_order), stage_units),
        unit_of={parameter: unit for parameter, (_, unit) in named},
        origins={
            id(main): (parameter, optimizer.start_of(parameter), optimizer.copy_index)
            for optimizer in optimizers
            for parameter, main in optimizer.main_shards()
        },
        has_tied_stages=len({place for place, units, _ in stages if EMBEDDING in units}) > 1,
    )


def _check_one_stage_each(units: set[str], stages: set[tuple[int, frozenset[str]]]) -> None:
    """A unit's norm is taken over the ranks of one pipeline stage; tied copies do not count."""
    for unit in sorted(units):
        homes = {stage for stage, own in stages if unit in own}
        if len(homes) > 1:
            raise UsageError(
                f"unit {unit}",
                f"its parameters lie on pipeline stages {sorted(homes)}, EDiT needs them on one",
                "choose another pipeline layout",
            )
