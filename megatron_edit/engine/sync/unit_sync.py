"""One unit in flight: prepare it, launch its exchange, later land it.

    prepare:  D = A - theta, weighted, in a buffer of its own
    launch:   the exchange begins                                 (nothing waits)
    step:     wait, tie copies, clip, outer step on the anchor
    land:     theta takes the anchor, or moves towards it         (the unit is needed now)

Each part depends on the gathered table and on the unit's own numbers alone, so a unit lands
with the same bits whenever the host comes to it, and whatever else is in flight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.wire import Exchange, Wire
from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.rounds.plan import Decision, SyncRules
from megatron_edit.engine.sync.outer_state import StagedUnit, UnitState, pseudo_gradient
from megatron_edit.engine.sync.units import EMBEDDING, UnitShard
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.norms import sum_in_rank_order
from megatron_edit.method.outer import clip_factor, weighted_contribution_


@dataclass(frozen=True)
class UnitResult:
    """What became of a unit: scalars on the unit's device, so that no one has to wait for them.

    Attributes:
        clip: float64, c.
        norm: float64, ||average|| before the clip.
        exchange_seconds: how long the host waited for the exchange.
    """

    clip: Tensor
    norm: Tensor
    exchange_seconds: float = 0.0


@dataclass
class UnitSync:
    """A unit in flight.

    Attributes:
        shard: this rank's part of the unit.
        home: anchor and momentum, where they live.
        is_excluded: whether this replica takes the anchor as it is: it was left out, or all were.
        staged: the state on the device, or on its way there; None until it is needed.
        average: fp32 [numel], this replica's addend, later the average; None for a roll-back, and
            when the outer step is done.
        snapshot: fp32 [numel], theta when the sync began; None where nothing needs it.
        result: of the outer step; None before it.
        is_exchanged: whether `average` is the average, and no exchange is left to be made.
    """

    shard: UnitShard
    home: UnitState
    is_excluded: bool
    staged: StagedUnit | None
    average: Tensor | None
    snapshot: Tensor | None = None
    result: UnitResult | None = None
    is_exchanged: bool = False
    _exchange: Exchange | None = None

    @classmethod
    def prepare(
        cls,
        shard: UnitShard,
        home: UnitState,
        staged: StagedUnit | None,
        groups: EngineGroups,
        decision: Decision,
        landing: LandingRule,
    ) -> UnitSync:
        """Compute this replica's addend. Allocates its buffers; the host never waits.

        Args:
            staged: the unit's state, where it is to stay on the device until the landing.
        """
        replica, device = groups.sync.rank, groups.sync.device
        is_excluded = decision.excludes(replica, shard.index)
        unit = cls(shard, home, is_excluded, staged, None)
        if not is_excluded and landing.needs_snapshot:
            unit.snapshot = shard.gather(torch.empty(shard.numel, device=device))
        if not bool(decision.rollback[shard.index]):
            buffer = torch.empty(shard.numel, dtype=torch.float32, device=device)
            anchor = home.stage_anchor() if staged is None else staged.anchor
            weight = float(decision.weights[replica, shard.index])
            if unit.snapshot is None:
                delta = pseudo_gradient(anchor.ready(), shard, buffer)
            else:
                delta = torch.sub(anchor.ready(), unit.snapshot, out=buffer)
            unit.average = weighted_contribution_(delta, weight)
        return unit

    @classmethod
    def restore(
        cls,
        shard: UnitShard,
        home: UnitState,
        device: torch.device,
        average: Tensor | None,
        snapshot: Tensor | None,
        *,
        is_excluded: bool,
        is_stepped: bool,
    ) -> UnitSync:
        """A unit that was in flight when a checkpoint was written; its exchange was over.

        Args:
            shard: this rank's part of the unit.
            home: anchor and momentum.
            device: of the parameters.
            average: fp32 [numel]; None for a roll-back, and when the outer step is done.
            snapshot: fp32 [numel]; None where nothing needs it.
            is_excluded: whether this replica takes the anchor as it is.
            is_stepped: whether the outer step is done.
        """
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)
        return cls(
            shard,
            home,
            is_excluded,
            staged=None,
            average=None if average is None else average.to(device),
            snapshot=None if snapshot is None else snapshot.to(device),
            result=UnitResult(unknown, unknown) if is_stepped else None,
            is_exchanged=True,
        )

    @property
    def is_stepped(self) -> bool:
        """Whether the outer step is done."""
        return self.result is not None

    def launch(self, groups: EngineGroups, wire: Wire) -> None:
        """Begin the exchange. Waits for nothing.

        Collective: the sync group, in the order of the syncs and of their units.
        """
        assert self.average is not None, f"unit {self.shard.name}: a roll-back is not exchanged"
        with record_function("edit/exchange"):
            self._exchange = wire.start(
                groups.sync, self.average, self.home.residual, is_left_out=self.is_excluded
            )

    def advance(self, groups: EngineGroups, wire: Wire) -> bool:
        """Launch the exchange, if that has not been done, and do what needs no waiting.

        Returns:
            Whether nothing of the unit is on the wire any more.
        """
        if self.average is None or self.is_exchanged:
            return True
        if self._exchange is None:
            self.launch(groups, wire)
        assert self._exchange is not None
        return self._exchange.advance()

    def await_average(self) -> None:
        """Wait until the average is there."""
        if self.average is not None and not self.is_exchanged:
            assert self._exchange is not None, f"unit {self.shard.name}: never launched"
            self._exchange.wait()

    def step(self, groups: EngineGroups, rules: SyncRules) -> UnitResult:
        """Finish the exchange, and move anchor and momentum.

        Collective: the ranks of the pipeline stage, in forward order of the units.
        """
        if self.result is not None:
            return self.result
        device = groups.sync.device
        if self.average is None:  # the momentum has no update to remember
            one = torch.ones((), dtype=torch.float64, device=device)
            self.result = UnitResult(one, torch.zeros_like(one))
            return self.result
        began = time.monotonic()
        self.await_average()
        waited = time.monotonic() - began
        _tie_copies(self.shard, self.average, groups)
        norm = _norm_over_stage(self.shard, self.average, groups)
        clip = clip_factor(norm, rules.max_norm)
        staged = self._stage()
        with record_function("edit/outer-step"):
            rules.outer.step_(
                staged.anchor.ready(),
                staged.momentum.ready(),
                self.average,
                clip=clip,
                inner_lr=rules.inner_lr,
            )
        staged.put_back()
        self.average = self._exchange = None
        self.result = UnitResult(clip, norm, waited)
        return self.result

    def land(self, landing: LandingRule, *, is_finite: bool) -> bool:
        """Give theta the anchor, or what the rule makes of both. After `step`. No communication.

        Args:
            landing: the rule.
            is_finite: whether this replica's parameters of the unit are finite.

        Returns:
            Whether they were trained on while the replica was left out, or broke: then its inner
            moments may be broken, too.
        """
        assert self.is_stepped, f"unit {self.shard.name}: landed before its outer step"
        anchor = self._stage().anchor.ready()
        self.staged = None
        is_dropped = self.is_excluded or not is_finite
        if is_dropped or not landing.merges:
            self.shard.scatter(anchor)
            return is_dropped and not landing.is_direct_copy
        for param, where in zip(self.shard.params, self.shard.slices, strict=True):
            before = None if self.snapshot is None else self.snapshot[where]
            landing.merge_(param.main, anchor[where], before)
        self.snapshot = None
        return False

    def unstage(self) -> None:
        """After the outer step, long before the landing: keep nothing on the device."""
        self.staged = None

    def _stage(self) -> StagedUnit:
        if self.staged is None:
            self.staged = self.home.stage()
        return self.staged


def _tie_copies(shard: UnitShard, average: Tensor, groups: EngineGroups) -> None:
    """Give all copies of a parameter the bits of the first one.

    Copies on several TP ranks or stages are averaged by different sync groups, whose sums may
    round differently; after this, equal anchors stay equal.
    """
    for tie, group in groups.ties.items():
        chosen = [
            where
            for param, where in zip(shard.params, shard.slices, strict=True)
            if param.tie == tie
        ]
        if not chosen or group.size == 1:
            continue
        copies = torch.cat([average[where] for where in chosen])
        group.broadcast_nowait(copies)
        parts = copies.split([where.stop - where.start for where in chosen])
        for where, part in zip(chosen, parts, strict=True):
            average[where].copy_(part)


def _norm_over_stage(shard: UnitShard, average: Tensor, groups: EngineGroups) -> Tensor:
    """||average|| of the whole unit, float64 scalar, the same bits on all ranks that hold it."""
    squares = sum_in_rank_order(groups.stage.all_gather(shard.squared_norm(average)))
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and shard.name == EMBEDDING:
        # A stage that holds only a tied copy counts nothing of the unit: the first stage knows.
        stages.broadcast_nowait(squares)
    return squares.sqrt()
