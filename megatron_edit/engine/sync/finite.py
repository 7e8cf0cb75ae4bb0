"""Finiteness: checks whether a replica's parameters are finite, and restores those that are not.

Method 3.2: a replica that is rejected as not finite takes the new anchor like the others, and its
inner moments that are not finite are zeroed, so that the next inner step is finite again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_edit.constants import EMBEDDING
from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups, Host, Reporter
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.method.norms import sum_in_rank_order, sum_of_squares


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
        host: has the parameters.
        groups: the communication groups.
        state: has the anchors.
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
