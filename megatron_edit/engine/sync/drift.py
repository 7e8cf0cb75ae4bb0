"""Drift check: replicas must hold the same bits; an error names the unit that differs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_edit.engine.host import EngineGroups
from megatron_edit.engine.units import UnitPlan
from megatron_edit.errors import DriftError
from megatron_edit.method.digest import combine, combine_columns

_EXACT = (1 << 52) - 1  # bits of a digest that a float64 of a record holds


def plan_digests(plan: UnitPlan) -> dict[int, Tensor]:
    """Digests of this rank's shards, by the unit's position."""
    return {shard.index: shard.digest() for shard in plan.shards}


def replica_digests(
    plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor]
) -> tuple[list[int], int]:
    """Digests of all units of this replica, and one digest of them together.

    Collective: the ranks of the replica.

    Args:
        plan: all units.
        groups: the communication groups.
        mine: digests of this rank's shards by position; units of other stages may be missing.
    """
    row = torch.zeros(len(plan.names), dtype=torch.int64)
    for index, digest in mine.items():
        row[index] = digest
    units = combine_columns(groups.replica.all_gather(row).cpu())
    return units, combine(units)


def differing_units(
    plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor]
) -> tuple[list[str], int]:
    """Names of the units that differ between replicas, and the digest of this replica.

    Collective: all ranks of all replicas. Every rank of every replica gets the same list.

    Args:
        plan: all units.
        groups: the communication groups.
        mine: see `replica_digests`.
    """
    units, digest = replica_digests(plan, groups, mine)
    table = groups.meeting.all_gather(torch.tensor(units, dtype=torch.int64))
    differs = (table != table[0]).any(dim=0).tolist()
    return [name for name, is_off in zip(plan.names, differs, strict=True) if is_off], digest


def check(plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor], when: str) -> int:
    """Check that all replicas have the same digests; return the common digest.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    units, digest = differing_units(plan, groups, mine)
    if units:
        raise DriftError.in_units(units, when)
    return digest


def as_number(digest: int) -> float:
    """The low 52 bits of a digest, as a control record holds them."""
    return float(digest & _EXACT)
