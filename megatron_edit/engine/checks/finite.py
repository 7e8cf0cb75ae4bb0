"""Are a replica's parameters finite, and how all of a broken one's units come back (method 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.engine.checks.equal import zero_nonfinite_moments
from megatron_edit.engine.checks.norms import sum_of_squares
from megatron_edit.engine.groups import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.unit_sync import UnitSync, sum_in_rank_order
from megatron_edit.engine.sync.units import EMBEDDING, UnitPlan


def finite_units(plan: UnitPlan, groups: EngineGroups) -> list[bool]:
    """Which units of the stage are finite, by their index; those of other stages count as finite.

    Collective: the ranks of the pipeline stage.
    """
    bad = torch.zeros(len(plan.names), dtype=torch.float64, device=groups.sync.device)
    for shard in plan.shards:
        for param in shard.params:
            # It cannot overflow, and takes a quarter of the time of looking at each element.
            bad[shard.index] += ~torch.isfinite(sum_of_squares(param.main))
    total = sum_in_rank_order(groups.stage.all_gather(bad))
    stages = groups.ties.get(TIED_EMBEDDING)
    held = [shard.index for shard in plan.shards if shard.name == EMBEDDING]
    if stages is not None and held:  # all copies of a parameter must land alike
        first = total[held].clone()
        stages.broadcast_nowait(first)
        total[held] = first
    found: list[bool] = (total == 0).tolist()
    return found


def is_finite_on_all_stages(is_finite: bool, groups: EngineGroups) -> bool:
    """Whether all stages of this replica say so.

    Collective: the ranks of the replica.
    """
    mine = torch.tensor([float(not is_finite)], dtype=torch.float64, device=groups.sync.device)
    return not bool(groups.replica.all_gather(mine).any())


def restore_other_units(
    host: Host,
    groups: EngineGroups,
    state: OuterState,
    landing: Sequence[str],
    flights: Sequence[UnitSync],
    reporter: Reporter,
) -> None:
    """Give this replica's broken units, other than those that land, their anchor.

    Where units sync in groups, those of one group would be finite, and broken again by the others
    in the next forward pass: the replica would never come back. No other replica takes part.

    Collective: the ranks of the pipeline stage.

    Args:
        landing: names of the units that get their anchor anyway.
        flights: of units that land later; what they keep of theta is counted from here on.
    """
    sound = finite_units(host.plan, groups)
    later = {flight.shard.name: flight for flight in flights}
    for shard in host.plan.shards:
        if sound[shard.index] or shard.name in landing:
            continue
        anchor = state.units[shard.name].stage_anchor().ready()
        shard.scatter(anchor)
        shard.publish()
        zero_nonfinite_moments(host, shard, reporter)
        flight = later.get(shard.name)
        if flight is not None and flight.snapshot is not None:
            flight.snapshot.copy_(anchor)
