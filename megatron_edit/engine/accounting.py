"""Figures of a sync that no single rank knows: bytes of a replica, numbers of other stages."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.units import UnitPlan
from megatron_edit.replica.collectives import all_reduce_payload


def gather_unit_numels(groups: EngineGroups, plan: UnitPlan) -> Tensor:
    """Elements that each rank of the replica holds of each unit, int64 [K, U]. Set-up only."""
    mine = torch.zeros(len(plan.names), dtype=torch.int64)
    for shard in plan.shards:
        mine[shard.index] = shard.numel
    return groups.replica.all_gather(mine)


def wire_bytes(
    groups: EngineGroups, unit_numels: Tensor, rollback: Tensor, table_bytes: int
) -> int:
    """Payload that the ranks of one replica send in a sync, as rings send it.

    Args:
        groups: who communicates.
        unit_numels: from `gather_unit_numels`.
        rollback: bool [U], units that were not exchanged.
        table_bytes: size of one replica's control record.
    """
    size = groups.sync.size
    exchanged = unit_numels[:, ~rollback].flatten().tolist()
    tables: int = groups.replica.size * (size - 1) * table_bytes
    return tables + sum(all_reduce_payload(4 * int(numel), size) for numel in exchanged)


def over_stages(groups: EngineGroups, values: Tensor) -> Tensor:
    """Fill in the units of other pipeline stages from whoever knows them.

    Args:
        groups: who communicates; without pipeline stages nobody has to.
        values: float64 [U] on the CPU, NaN where this stage does not hold the unit.
    """
    if groups.stage.size == groups.replica.size:
        return values
    rows = groups.replica.all_gather(values)
    known = torch.where(rows.isnan(), -torch.inf, rows).max(dim=0).values
    return torch.where(known.isinf(), torch.nan, known)
