"""One unit on its way through a sync: prepare it, launch its exchange, later land it.

    prepare:  D = A - theta, weighted, in a buffer of its own
    launch:   the all-reduce begins                              (nothing waits)
    land:     wait, tie copies, clip, outer step, theta <- A     (the unit is needed now)

Each step depends on the gathered table and on the unit's own numbers alone, so a unit lands
with the same bits whenever it lands, and whatever else is in flight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_edit.engine.decisions import Decision
from megatron_edit.engine.groups import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.state import StagedUnit, pseudo_gradient
from megatron_edit.engine.units import EMBEDDING, UnitShard
from megatron_edit.method.outer import clip_factor, nesterov_step_, weighted_contribution_
from megatron_edit.replica.collectives import Pending


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


@dataclass(frozen=True)
class Landing:
    """What became of a unit: scalars on the unit's device, so that no one has to wait for them.

    Attributes:
        index: the unit's position in the plan.
        clip: float64, c.
        norm: float64, ||average|| before the clip.
        exchange_seconds: how long the host waited for the exchange.
    """

    index: int
    clip: Tensor
    norm: Tensor
    exchange_seconds: float = 0.0


@dataclass(frozen=True)
class Flight:
    """A unit in flight.

    Attributes:
        shard: this rank's part of the unit.
        staged: anchor and momentum, on the device or on their way there.
        average: fp32 [numel], this replica's addend, later the average; None for a roll-back.
        work: the exchange that fills `average`; None before the launch, and for a roll-back.
    """

    shard: UnitShard
    staged: StagedUnit
    average: Tensor | None
    work: Pending | None = None

    @classmethod
    def prepare(
        cls, shard: UnitShard, staged: StagedUnit, groups: EngineGroups, decision: Decision
    ) -> Flight:
        """Compute this replica's addend. Allocates the staging buffer; the host never waits."""
        if bool(decision.rollback[shard.index]):
            return cls(shard, staged, None)
        weight = float(decision.weights[groups.sync.rank, shard.index])
        buffer = torch.empty(shard.numel, dtype=torch.float32, device=groups.sync.device)
        average = weighted_contribution_(
            pseudo_gradient(staged.anchor.ready(), shard, buffer), weight
        )
        return cls(shard, staged, average)

    @property
    def is_over(self) -> bool:
        """Whether nothing of this unit is on the wire any more, or ever will be."""
        return self.average is None or (self.work is not None and self.work.is_completed)

    @property
    def is_launched(self) -> bool:
        """Whether the exchange has begun, where there is one."""
        return self.average is None or self.work is not None

    def launch(self, groups: EngineGroups) -> Flight:
        """Begin the exchange; the flight with its handle. Waits for nothing.

        Collective: the sync group, in forward order of the units.
        """
        assert self.average is not None, f"unit {self.shard.name}: a roll-back is not exchanged"
        return replace(self, work=groups.sync.start_all_reduce(self.average))

    def land(self, groups: EngineGroups, rule: OuterRule) -> Landing:
        """Finish the exchange and move anchor, momentum and main shards.

        Collective: the ranks of the pipeline stage, in forward order of the units.
        """
        device = groups.sync.device
        if self.average is None:
            self.shard.scatter(self.staged.anchor.ready())  # the momentum has no update to remember
            one = torch.ones((), dtype=torch.float64, device=device)
            return Landing(self.shard.index, one, torch.zeros_like(one))
        assert self.work is not None, f"unit {self.shard.name}: landed before it was launched"
        began = time.monotonic()
        self.work.wait()
        waited = time.monotonic() - began
        _tie_copies(self.shard, self.average, groups)
        norm = _norm_over_stage(self.shard, self.average, groups)
        clip = clip_factor(norm, rule.max_norm)
        anchor = self.staged.anchor.ready()
        nesterov_step_(
            anchor,
            self.staged.momentum.ready(),
            self.average,
            clip=clip,
            lr=rule.lr,
            momentum_coefficient=rule.momentum,
        )
        self.shard.scatter(anchor)
        self.staged.put_back()
        return Landing(self.shard.index, clip, norm, waited)


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
        if not chosen or group.size == 1:
            continue
        copies = torch.cat([average[where] for where in chosen])
        group.give(copies)
        parts = copies.split([where.stop - where.start for where in chosen])
        for where, part in zip(chosen, parts, strict=True):
            average[where].copy_(part)


def _norm_over_stage(shard: UnitShard, average: Tensor, groups: EngineGroups) -> Tensor:
    """||average|| of the whole unit, float64 scalar, the same bits on all ranks that hold it."""
    squares = sum_in_rank_order(groups.stage.all_gather(shard.squared_norm(average)))
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and shard.name == EMBEDDING:
        # A stage that holds only a tied copy counts nothing of the unit: the first stage knows.
        stages.give(squares)
    return squares.sqrt()


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Add [ranks, ...] over the ranks, first to last: the same bits on every rank."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
