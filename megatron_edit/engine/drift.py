"""Drift: replicas that must hold the same bits, and a check that names the unit where not."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_edit.engine.digest import combine, tensor_digest
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.errors import DriftError


def shard_digest(shard: UnitShard) -> int:
    """Digest of this rank's main shards of a unit. No communication."""
    return tensor_digest(fragment.main for fragment in shard.fragments)


def plan_digests(plan: UnitPlan) -> dict[int, int]:
    """Digest of every shard of this rank, by the unit's position."""
    return {shard.index: shard_digest(shard) for shard in plan.shards}


def differing_units(
    plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, int]
) -> tuple[list[str], int]:
    """Units that are not the same on all replicas, and one digest of this replica.

    Collective: all ranks of all replicas. Every rank of every replica gets the same list.

    Args:
        plan: all units.
        groups: who communicates.
        mine: digests of this rank's shards by position; units of other stages may be missing.
    """
    row = torch.tensor([mine.get(i, 0) for i in range(len(plan.names))], dtype=torch.int64)
    columns = groups.replica.all_gather(row).t().tolist()
    units = [combine(column) for column in columns]
    table = groups.sync.all_gather(torch.tensor(units, dtype=torch.int64))
    differs = (table != table[0]).any(dim=0).tolist()
    names = [name for name, is_off in zip(plan.names, differs, strict=True) if is_off]
    return names, combine(units)


def check(plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, int], when: str) -> int:
    """The digest of all replicas.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    units, digest = differing_units(plan, groups, mine)
    if units:
        more = f" and {len(units) - 1} more" if len(units) > 1 else ""
        raise DriftError(f"the replicas differ {when} in unit {units[0]}{more}")
    return digest
