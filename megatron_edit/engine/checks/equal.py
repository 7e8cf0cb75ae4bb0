"""Making replicas sound and equal: at the start, after warm-up, after numbers that broke."""

from __future__ import annotations

import math

import torch

from megatron_edit.engine.checks import drift
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.rounds.plan import Decision
from megatron_edit.engine.sync.units import UnitPlan, UnitShard


def broadcast_first_replica(host: Host, groups: EngineGroups) -> float:
    """Give every replica the main shards of replica 0, and the rest of the model with them.

    Inner moments are not touched: they belong to each replica's own training.

    Collective: all ranks of all replicas.
    Mutates: main shards and model parameters.

    Returns:
        The largest difference that this healed, on any rank of any replica.
    """
    for tensor in host.replicated_tensors():
        groups.sync.broadcast(tensor)
    device = groups.sync.device
    largest = torch.zeros((), device=device)
    for shard in host.plan.shards:
        mine = shard.gather(torch.empty(shard.numel, dtype=torch.float32, device=device))
        agreed = mine.clone()
        groups.sync.broadcast(agreed)
        if agreed.numel():
            largest = torch.maximum(largest, (agreed - mine).abs().max())
        shard.scatter(agreed)
        shard.publish()
    host.gather_parameters()
    everywhere = groups.meeting.all_gather(groups.replica.all_gather(largest).max())
    return float(everywhere.max())


def broadcast_if_different(host: Host, groups: EngineGroups, reporter: Reporter) -> None:
    """After warm-up: where the replicas differ after all, give them the parameters of replica 0.

    Collective: all ranks of all replicas.
    """
    if drift.differing_units(host.plan, groups, drift.plan_digests(host.plan))[0]:
        largest = broadcast_first_replica(host, groups)
        reporter.on_message(
            f"the replicas had rounded differently in warm-up (by up to {largest:.3e}); "
            "all now hold the parameters of replica 0"
        )


def zero_nonfinite_moments_of_excluded(
    host: Host, plan: UnitPlan, decision: Decision, replica: int, reporter: Reporter
) -> None:
    """Heal the moments of the units that this replica was left out of as not finite.

    Its parameters become finite with the new anchor; without this the next inner step would break
    them again (method 3.2).

    Args:
        plan: the units of the decision.
    """
    for shard in plan.shards:
        if not math.isfinite(float(decision.norms[replica, shard.index])):
            zero_nonfinite_moments(host, shard, reporter)


def zero_nonfinite_moments(host: Host, shard: UnitShard, reporter: Reporter) -> None:
    """Zero what is not finite in the inner moments of a unit."""
    zeroed = host.zero_nonfinite_moments(shard)
    reporter.on_local_message(
        f"unit {shard.name} was not finite, or trained on while it was left out; "
        f"zeroed {zeroed} moments of the inner optimizer here"
    )
