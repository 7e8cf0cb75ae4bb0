"""One sync in blocking mode: norms, decisions, then exchange and outer step unit by unit.

Blocking mode is the oracle for every faster one. All ranks of all replicas walk the same units
in the same order, whatever their own numbers are; what they do with a unit follows from the
gathered table alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.engine.decisions import Decision
from megatron_edit.engine.groups import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.state import OuterState, UnitState
from megatron_edit.engine.units import EMBEDDING, UnitPlan, UnitShard
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.outer import clip_factor, nesterov_step_, weighted_contribution


@dataclass(frozen=True)
class OuterRule:
    """Constants of the outer step.

    Attributes:
        lr: nu.
        momentum: mu_o.
        max_norm: phi of the clip; None is off.
    """

    lr: float
    momentum: float
    max_norm: float | None


@dataclass
class UnitOutcomes:
    """What happened to the units of this rank's stage; NaN for units of other stages.

    Attributes:
        clip: float64 [U], clip factors.
        update_norm: float64 [U], norms of the weighted averages, before the clip.
        exchange_seconds: time spent in exchanges between replicas.
        outer_seconds: time spent in everything after the exchange.
    """

    clip: Tensor
    update_norm: Tensor
    exchange_seconds: float = 0.0
    outer_seconds: float = 0.0
    _mark: float = field(default_factory=time.monotonic)

    @classmethod
    def blank(cls, num_units: int) -> UnitOutcomes:
        """Nothing has happened yet."""
        return cls(*(torch.full((num_units,), torch.nan, dtype=torch.float64) for _ in range(2)))

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._mark = self._mark, time.monotonic()
        return self._mark - before


def partial_squares(plan: UnitPlan, state: OuterState, scratch: Tensor) -> Tensor:
    """This rank's share of every unit's squared pseudo-gradient norm, float64 [U] on the CPU."""
    squares = torch.zeros(len(plan.names), dtype=torch.float64)
    for shard in plan.shards:
        delta = state.units[shard.name].pseudo_gradient(shard, scratch)
        squares[shard.index] = shard.squared_norm(delta).cpu()
    return squares


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Add [ranks, ...] over the ranks, first to last: the same bits on every rank."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def exchange_units(
    plan: UnitPlan,
    state: OuterState,
    groups: EngineGroups,
    decision: Decision,
    rule: OuterRule,
) -> UnitOutcomes:
    """Exchange every unit in forward order and move anchor, momentum and parameters.

    Collective: all ranks of all replicas.
    Mutates: outer state and the optimizer's main shards.
    """
    outcomes = UnitOutcomes.blank(len(plan.names))
    scratch = _scratch(plan, groups)
    for shard in plan.shards:
        try:
            _exchange_unit(
                shard, state.units[shard.name], groups, decision, rule, outcomes, scratch
            )
        except ReplicaLostError as error:
            raise ReplicaLostError(f"unit {shard.name}: {error}") from error
    return outcomes


def _scratch(plan: UnitPlan, groups: EngineGroups) -> Tensor:
    return torch.empty(plan.largest_numel, dtype=torch.float32, device=groups.sync.device)


def _exchange_unit(
    shard: UnitShard,
    unit: UnitState,
    groups: EngineGroups,
    decision: Decision,
    rule: OuterRule,
    outcomes: UnitOutcomes,
    scratch: Tensor,
) -> None:
    if bool(decision.rollback[shard.index]):
        shard.scatter(unit.anchor)  # momentum is left alone: there is no update to remember
        outcomes.clip[shard.index], outcomes.update_norm[shard.index] = 1.0, 0.0
        return
    outcomes.lap()
    weight = float(decision.weights[groups.sync.rank, shard.index])
    average = weighted_contribution(unit.pseudo_gradient(shard, scratch), weight)
    groups.sync.all_reduce(average)
    outcomes.exchange_seconds += outcomes.lap()
    _tie_copies(shard, average, groups)
    norm = _norm_over_stage(shard, average, groups)
    if not bool(norm.isfinite()):  # finite addends whose sum overflowed; all ranks see it alike
        shard.scatter(unit.anchor)
        outcomes.clip[shard.index], outcomes.update_norm[shard.index] = 0.0, float(norm)
        return
    clip = float(clip_factor(norm, rule.max_norm))
    nesterov_step_(
        unit.anchor,
        unit.momentum,
        average,
        clip=clip,
        lr=rule.lr,
        momentum_coefficient=rule.momentum,
    )
    shard.scatter(unit.anchor)
    outcomes.clip[shard.index], outcomes.update_norm[shard.index] = clip, float(norm)
    outcomes.outer_seconds += outcomes.lap()


def _tie_copies(shard: UnitShard, average: Tensor, groups: EngineGroups) -> None:
    """Give all copies of a parameter the bits of the first one.

    Copies on several TP ranks or stages are averaged by different sync groups, whose sums may
    round differently; after this, equal anchors stay equal.
    """
    for tie, group in groups.ties.items():
        chosen = [
            where
            for fragment, where in zip(shard.fragments, shard.slices, strict=True)
            if fragment.tie == tie
        ]
        if not chosen:
            continue
        copies = torch.cat([average[where] for where in chosen])
        group.broadcast(copies)
        for where, part in zip(chosen, copies.split([w.stop - w.start for w in chosen]),
                               strict=True):  # fmt: skip
            average[where].copy_(part)


def _norm_over_stage(shard: UnitShard, average: Tensor, groups: EngineGroups) -> Tensor:
    """||average|| of the whole unit, float64 scalar on the CPU, the same bits on all its ranks."""
    rows = groups.stage.all_gather(shard.squared_norm(average).cpu())
    squares = sum_in_rank_order(rows)
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and shard.name == EMBEDDING:
        # A stage that holds only a tied copy counts nothing of the unit: the first stage knows.
        on_wire = squares.to(stages.device)
        stages.broadcast(on_wire)
        squares = on_wire.cpu()
    return squares.sqrt()
