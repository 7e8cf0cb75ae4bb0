"""Drift: replicas that must hold the same bits, and a check that names the unit where not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_edit.engine.host import EngineGroups
from megatron_edit.engine.units import UnitPlan
from megatron_edit.errors import DriftError
from megatron_edit.method.digest import combine

_EXACT = (1 << 52) - 1  # bits of a digest that a float64 of a record holds


def plan_digests(plan: UnitPlan) -> dict[int, Tensor]:
    """Digest of every shard of this rank, by the unit's position."""
    return {shard.index: shard.digest() for shard in plan.shards}


def replica_digests(
    plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor]
) -> tuple[list[int], int]:
    """A digest of every unit of this replica, and one of all of them.

    Collective: the ranks of the replica.

    Args:
        plan: all units.
        groups: who communicates.
        mine: digests of this rank's shards by position; units of other stages may be missing.
    """
    row = torch.zeros(len(plan.names), dtype=torch.int64)
    for index, digest in mine.items():
        row[index] = digest
    columns = groups.replica.all_gather(row).t().tolist()
    units = [combine(column) for column in columns]
    return units, combine(units)


def differing_units(
    plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor]
) -> tuple[list[str], int]:
    """Units that are not the same on all replicas, and one digest of this replica.

    Collective: all ranks of all replicas. Every rank of every replica gets the same list.

    Args:
        plan: all units.
        groups: who communicates.
        mine: see `replica_digests`.
    """
    units, digest = replica_digests(plan, groups, mine)
    table = groups.meeting.all_gather(torch.tensor(units, dtype=torch.int64))
    differs = (table != table[0]).any(dim=0).tolist()
    return [name for name, is_off in zip(plan.names, differs, strict=True) if is_off], digest


def check(plan: UnitPlan, groups: EngineGroups, mine: Mapping[int, Tensor], when: str) -> int:
    """The digest of all replicas.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    units, digest = differing_units(plan, groups, mine)
    if units:
        raise DriftError.in_units(units, when)
    return digest


def as_number(digest: int) -> float:
    """What a control record carries of a digest."""
    return float(digest & _EXACT)
