"""Checks of a sync: equal bits on all replicas, finite parameters, and one plan before it."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_edit.constants import EMBEDDING
from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups, Host, Reporter
from megatron_edit.engine.plan import RoundPlan
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.errors import DriftError
from megatron_edit.method.digest import combine, combine_columns
from megatron_edit.method.norms import sum_in_rank_order, sum_of_squares

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


# ---- Finiteness: checks whether a replica's parameters are finite, and restores those that are
# not
#
# Method 3.2: a replica that is rejected as not finite takes the new anchor like the others, and
# its inner moments that are not finite are zeroed, so that the next inner step is finite again.


def finite_units(plan: UnitPlan, groups: EngineGroups) -> list[bool]:
    """Whether each unit is finite, by index; units of other stages count as finite.

    Collective: the ranks of the pipeline stage.
    """
    bad = torch.zeros(len(plan.names), dtype=torch.float64, device=groups.sync.device)
    for shard in plan.shards:
        for param in shard.params:
            # The float64 sum cannot overflow: it is finite if all elements are. It takes a quarter
            # of the time that a test of each element takes.
            bad[shard.index] += ~torch.isfinite(sum_of_squares(param.read()))
    total = sum_in_rank_order(groups.stage.all_gather(bad))
    stages = groups.ties.get(TIED_EMBEDDING)
    indices = [shard.index for shard in plan.shards if shard.name == EMBEDDING]
    if stages is not None and indices:  # all copies of a parameter must land alike
        first = total[indices].clone()
        stages.broadcast_nowait(first)
        total[indices] = first
    found: list[bool] = (total == 0).tolist()
    return found


def is_finite_on_all_stages(is_finite: bool, groups: EngineGroups) -> bool:
    """Whether `is_finite` is true on all ranks of this replica.

    Collective: the ranks of the replica.
    """
    mine = torch.tensor([float(not is_finite)], dtype=torch.float64, device=groups.sync.device)
    return not bool(groups.replica.all_gather(mine).any())


def restore_other_units(
    host: Host,
    groups: EngineGroups,
    state: OuterState,
    landing: Sequence[str],
    snapshots: Mapping[str, Tensor],
    reporter: Reporter,
) -> None:
    """Restore this replica's units that are not finite, except those that land, to their anchor.

    Where units sync in fragments, one fragment would land finite and turn non-finite again because
    of the others in the next forward pass: the replica would never recover. No other replica takes
    part.

    Collective: the ranks of the pipeline stage.

    Args:
        landing: names of the units that take their anchor anyway.
        snapshots: of units that land later, fp32 [numel] by unit; set to the anchor, too.
        reporter: receives a message.
    """
    finite = finite_units(host.plan, groups)
    for shard in host.plan.shards:
        if finite[shard.index] or shard.name in landing:
            continue
        staged = state.units[shard.name].stage_anchor()
        anchor = staged.ready()
        shard.scatter(anchor)
        shard.publish()
        zero_nonfinite_moments(host, shard, reporter)
        if shard.name in snapshots:
            snapshots[shard.name].copy_(anchor)
        staged.release()


def zero_nonfinite_moments(host: Host, shard: UnitShard, reporter: Reporter) -> None:
    """Zero the inner moments of a unit that are not finite, and report it."""
    zeroed = host.zero_nonfinite_moments(shard)
    reporter.on_local_message(
        f"unit {shard.name} was not finite, or trained on after a rejection; "
        f"zeroed {zeroed} moments of the inner optimizer on this rank"
    )


# ---- Check before a sync is applied: all replicas have the same plan, and will get the same
# anchor
#
# The drift check (`check`) finds a difference after it has landed. This check finds it before
# parameters, anchor, momentum and the state of the rounds change, so that they are still good.


def plan_digest(plan: RoundPlan) -> int:
    """64 bits of a plan, the same on rank i of all replicas that have the same plan.

    Fields that do not compare, as scores, decide nothing and are left out. Ranks of one replica
    differ: records hold losses and buffers that only some of them know.
    """
    found = hashlib.sha256()
    _add(plan, found.update)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def check_before_commit(
    plan: UnitPlan, groups: EngineGroups, digests: Mapping[int, Tensor], plan_digest: int, when: str
) -> None:
    """Compare the replicas' plans, and digests of anchor and momentum as they will be.

    Collective: all ranks of all replicas; all raise, or none.

    Args:
        plan: the units that sync.
        digests: of this rank's shards by unit position; see `CheckedSync.preview`.
        plan_digest: of the round's plan.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    of_ranks = groups.replica.all_gather(torch.tensor([plan_digest])).flatten().tolist()
    plans = groups.meeting.all_gather(torch.tensor([combine(of_ranks)]))
    if bool((plans != plans[0]).any()):
        raise DriftError(f"the replicas differ {when} in their plans of the round")
    check(plan, groups, digests, when)


def _add(value: Any, update: Callable[[bytes], object]) -> None:
    """Hash a value: fields by name, numbers and tensors by their bits."""
    if isinstance(value, Tensor):
        kept = value.detach().cpu().contiguous()
        update(f"{kept.dtype}{tuple(kept.shape)}".encode())
        update(kept.view(torch.uint8).numpy().tobytes() if kept.numel() else b"")
    elif dataclasses.is_dataclass(value):
        update(type(value).__name__.encode())
        for field in filter(lambda field: field.compare, dataclasses.fields(value)):
            update(field.name.encode())
            _add(getattr(value, field.name), update)
    elif isinstance(value, Enum):
        update(value.name.encode())
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    elif isinstance(value, list | tuple):
        update(f"[{len(value)}".encode())
        for each in value:
            _add(each, update)
    else:
        update(repr(value).encode())
