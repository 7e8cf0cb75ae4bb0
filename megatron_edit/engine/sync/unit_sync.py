"""One unit of a sync, from its addend to its landing.

    prepare:  D = A - theta, weighted, in a buffer of its own
    launch:   the exchange begins                                 (non-blocking)
    step:     wait, tie copies, clip, outer step on the anchor
    land:     theta takes the anchor, or moves towards it         (the unit is needed now)

Each stage depends only on the gathered records and the unit's own values, so a unit lands with the
same bits whenever the host needs it, and whatever else is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.compressed_all_reduce import Addend, Residual
from megatron_edit.comm.streams import Span
from megatron_edit.comm.wire import Exchange, Wire, start_exchange
from megatron_edit.engine.host import EngineGroups
from megatron_edit.engine.plan import SyncPlan, SyncRules
from megatron_edit.engine.sync.averages import agree_on_average
from megatron_edit.engine.sync.moments import UnitMoments
from megatron_edit.engine.sync.offload import DeviceCopy
from megatron_edit.engine.sync.outer_state import StagedUnit, UnitState
from megatron_edit.engine.units import UnitShard
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.digest import tensor_digest
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.outer import clip_factor, weighted_contribution_


@dataclass(frozen=True)
class UnitResult:
    """Result of a unit's outer step: scalars on the unit's device, so that no host read blocks.

    Attributes:
        clip: float64, c.
        norm: float64, ||average|| before the clip.
        exchange: the wait for the exchange; None if there was none.
    """

    clip: Tensor
    norm: Tensor
    exchange: Span | None = None


@dataclass
class UnitSync:
    """The sync of one unit.

    Attributes:
        shard: this rank's shard of the unit.
        resident_state: anchor and momentum, where they live between syncs.
        is_excluded: whether this replica takes the anchor unmerged: it was rejected, or the unit
            is rolled back.
        staged: the state on the device, or in transfer to it; None until it is needed.
        average: fp32 [numel], this replica's addend, later the average; None for a roll-back, and
            when the outer step is done.
        snapshot: fp32 [numel], theta when the sync began; None where it is not needed.
        result: of the outer step; None before it.
        is_exchanged: whether `average` is already the average, so that no exchange is needed.
        moments: of the inner optimizer that are exchanged with the unit; None if there are none.
        agreed: norm and clip of the average, once the replica's ranks have computed them.
        residual: encoding errors that the exchange adds back and replaces: those of
            `resident_state`, or a copy of them until the outer step; None for a lossless wire.
    """

    shard: UnitShard
    resident_state: UnitState
    is_excluded: bool
    staged: StagedUnit | None
    average: Tensor | None
    snapshot: Tensor | None = None
    result: UnitResult | None = None
    is_exchanged: bool = False
    moments: UnitMoments | None = None
    agreed: tuple[Tensor, Tensor] | None = None
    residual: Residual | None = None
    _exchange: Exchange | None = None

    @classmethod
    def prepare(
        cls,
        shard: UnitShard,
        resident_state: UnitState,
        staged: StagedUnit | None,
        groups: EngineGroups,
        plan: SyncPlan,
        snapshot: Tensor | None = None,
        residual: Residual | None = None,
    ) -> UnitSync:
        """Compute this replica's addend. Allocates its buffers; never blocks the host.

        Args:
            staged: the unit's state, where it stays on the device until the landing.
            plan: of the sync.
            snapshot: fp32 [numel], the parameters where training may have changed them since; None
                where it has not.
            residual: encoding errors that the exchange adds back; None for a lossless wire.
        """
        replica, device, decision = groups.sync.rank, groups.sync.device, plan.decision
        is_excluded = bool(decision.excluded[replica, shard.index])
        unit = cls(shard, resident_state, is_excluded, staged, None, residual=residual)
        if not is_excluded and plan.rules.landing.needs_snapshot:
            if snapshot is None:
                snapshot = shard.gather(torch.empty(shard.numel, device=device))
            unit.snapshot = snapshot
        if not bool(decision.rollback[shard.index]):
            buffer = torch.empty(shard.numel, dtype=torch.float32, device=device)
            anchor = resident_state.stage_anchor() if staged is None else staged.anchor
            weight = float(decision.weights[replica, shard.index])
            with record_function("edit/addend"):
                if snapshot is None:
                    delta = shard.pseudo_gradient(anchor.ready(), buffer)
                else:
                    delta = torch.sub(anchor.ready(), snapshot, out=buffer)
                unit.average = weighted_contribution_(delta, weight)
            if staged is None:
                anchor.release()
        return unit

    @classmethod
    def restore(
        cls,
        shard: UnitShard,
        resident_state: UnitState,
        device: torch.device,
        average: Tensor | None,
        snapshot: Tensor | None,
        *,
        is_excluded: bool,
        is_stepped: bool,
    ) -> UnitSync:
        """Restore a unit that had not landed when a checkpoint was written; its exchange was done.

        Args:
            shard: this rank's shard of the unit.
            resident_state: anchor and momentum.
            average: fp32 [numel]; None for a roll-back, and when the outer step is done.
            snapshot: fp32 [numel]; None where it is not needed.
            is_excluded: whether this replica takes the anchor unmerged.
            is_stepped: whether the outer step is done.
        """
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)
        return cls(
            shard,
            resident_state,
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
        """Begin the exchange without blocking.

        Collective: the sync group; see the note on the order of syncs (`manager.py`).
        """
        assert self.average is not None, f"unit {self.shard.name}: a roll-back is not exchanged"
        with record_function("edit/exchange"):
            self._exchange = start_exchange(groups.sync, self.addends(wire))

    def advance(self, groups: EngineGroups, wire: Wire) -> bool:
        """Launch the exchange if necessary, and advance it without blocking.

        Returns:
            Whether the exchange is done.
        """
        if self.average is None or self.is_exchanged:
            return True
        if self._exchange is None:
            self.launch(groups, wire)
        assert self._exchange is not None
        return self._exchange.advance()

    @property
    def on_wire(self) -> Work | None:
        """The collective that the exchange waits for; None if there is none."""
        return None if self._exchange is None else self._exchange.on_wire

    def join_exchange(self, exchange: Exchange) -> None:
        """Use an exchange in which the unit's addends were launched with those of other units."""
        self._exchange = exchange

    def addends(self, wire: Wire) -> list[Addend]:
        """Addends that are not launched yet: of the parameters, then of the moments."""
        if self.average is None or self.is_exchanged or self._exchange is not None:
            return []
        moments = [] if self.moments is None else self.moments.addends
        own = Addend(self.average, self.residual, self.is_excluded, wire.codec)
        return [own, *moments]

    def await_average(self) -> None:
        """Wait until the average has arrived."""
        if self.average is not None and not self.is_exchanged:
            assert self._exchange is not None, f"unit {self.shard.name}: never launched"
            self._exchange.wait()

    def step(self, groups: EngineGroups, rules: SyncRules) -> UnitResult:
        """Finish the exchange, and run the outer step on anchor and momentum.

        Collective: the ranks of the pipeline stage, in forward order of the units.
        """
        if self.result is not None:
            return self.result
        device = groups.sync.device
        if self.average is None:  # a roll-back: anchor and momentum do not change
            one = torch.ones((), dtype=torch.float64, device=device)
            self.result = UnitResult(one, torch.zeros_like(one))
            return self.result
        streams = groups.sync.streams
        began = streams.mark()
        with record_function("edit/exchange"):
            self.await_average()
        waited = began, streams.mark()
        norm, clip = self._agree(groups, rules)
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
        if self.residual is not None and self.resident_state.residual is not None:
            self.resident_state.residual.replace_by(self.residual)
        self.average = self._exchange = None
        self.result = UnitResult(clip, norm, waited)
        return self.result

    def preview(self, groups: EngineGroups, rules: SyncRules, scratch: Sequence[Tensor]) -> Tensor:
        """Digest of anchor and momentum as `step` will leave them, int64 scalar.

        Nothing but `average` and means of moments changes: copies of a parameter become identical
        in them, as in `step`.

        Collective: as `step`.

        Args:
            scratch: three fp32 tensors of at least [numel]; overwritten.
        """
        anchor, momentum, average = (each[: self.shard.numel] for each in scratch)
        anchor.copy_(self.resident_state.anchor)
        momentum.copy_(self.resident_state.momentum)
        if self.average is not None:
            self.await_average()
            _, clip = self._agree(groups, rules)
            average.copy_(self.average)
            rules.outer.step_(anchor, momentum, average, clip=clip, inner_lr=rules.inner_lr)
        return tensor_digest([anchor, momentum])

    def _agree(self, groups: EngineGroups, rules: SyncRules) -> tuple[Tensor, Tensor]:
        """Norm and clip of the average, the same on all ranks that hold the unit."""
        if self.agreed is None:
            assert self.average is not None, f"unit {self.shard.name}: a roll-back has no average"
            with record_function("edit/norms"):
                means = () if self.moments is None else tuple(self.moments.means.values())
                norm = agree_on_average(self.shard, self.average, means, groups)
                self.agreed = norm, clip_factor(norm, rules.max_norm)
        return self.agreed

    def land(self, landing: LandingRule, *, is_finite: bool) -> bool:
        """Set theta to the anchor, or merge both by the rule. After `step`. No communication.

        Args:
            is_finite: whether this replica's parameters of the unit are finite.

        Returns:
            Whether the unit was trained on after the replica was rejected, or is not finite: its
            inner moments may then not be finite either.
        """
        assert self.is_stepped, f"unit {self.shard.name}: landed before its outer step"
        # If the outer step was done earlier, nothing is staged; the momentum is not needed again.
        staged_anchor = (
            self.resident_state.stage_anchor() if self.staged is None else self.staged.anchor
        )
        anchor = staged_anchor.ready()
        is_dropped = self.is_excluded or not is_finite
        if is_dropped or not landing.merges:
            self.shard.scatter(anchor)
            self._unstage_landed(staged_anchor)
            return is_dropped and not landing.is_direct_copy
        for param, where in zip(self.shard.params, self.shard.slices, strict=True):
            before = None if self.snapshot is None else self.snapshot[where]
            param.write(landing.merge_(param.read(), anchor[where], before))
        self._unstage_landed(staged_anchor)
        self.snapshot = None
        return False

    def _unstage_landed(self, anchor: DeviceCopy) -> None:
        if self.staged is None:
            anchor.release()
        self.unstage()

    def unstage(self) -> None:
        """Release the staged state, after the landing or an outer step long before it."""
        if self.staged is not None and self.resident_state.offload_streams is not None:
            self.staged.release()
        self.staged = None

    def _stage(self) -> StagedUnit:
        if self.staged is None:
            self.staged = self.resident_state.stage()
        return self.staged


@contextmanager
def naming_unit(shard: UnitShard) -> Iterator[None]:
    """Add the name of the unit to errors."""
    try:
        yield
    except ReplicaLostError as error:
        raise ReplicaLostError(f"unit {shard.name}: {error}") from error
    except Exception as error:
        error.add_note(f"in the exchange of unit {shard.name}")
        raise
