"""One sync under way, from the plan of its round to its last landing.

Units start and land in forward order on every rank. `ForwardSync` lands immediately: it has at most
`depth` units in flight, and each lands when the forward pass needs it, or in blocking mode all
together. `DelayedSync` computes the addends of all its units at the start and lands them steps
later; `CheckedSync` does the same, and is applied after all replicas have compared their results,
at once or later. All do the same arithmetic on the same messages (`unit_sync.py`).
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.streams import Mark, Span
from megatron_edit.comm.wire import Wire, progress_exchanges, start_exchange
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.plan import Decision, SyncPlan, SyncRules
from megatron_edit.engine.saved import PendingState
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.checks import finite_units, is_finite_on_all_stages
from megatron_edit.engine.sync.moments import UnitMoments
from megatron_edit.engine.sync.outer_state import OuterState, StagedUnit, UnitState
from megatron_edit.engine.sync.unit_sync import UnitResult, UnitSync, naming_unit
from megatron_edit.engine.units import UnitPlan, UnitShard, batch_numbers, select_units
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.detector import Verdict
from megatron_edit.method.digest import tensor_digest
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.method.moments import MomentRule
from megatron_edit.method.norms import num_parts, projection, sum_differs
from megatron_edit.saved_state import PendingSync


@dataclass(frozen=True)
class SyncContext:
    """Objects shared by all syncs of a rank.

    Attributes:
        depth: maximum number of batches with units that have started and made no outer step, of an
            immediate sync.
        outer: anchor and momentum.
        unit_numels: elements of the largest shard of each unit, the same on all ranks.
        together_numel: of consecutive units that are exchanged together, at most; 0: each alone.
    """

    host: Host
    groups: EngineGroups
    wire: Wire
    depth: int
    outer: OuterState
    unit_numels: Sequence[int] = ()
    together_numel: int = 0


class Sync(ABC):
    """A sync that is under way on this rank.

    Args:
        began: start time, seconds on a monotonic clock.
        waited: seconds spent at the meeting.

    Attributes:
        plan: see above.
        units: the selected units, and this rank's shards of them.
        digests: of units that have landed, by position, for the drift check.
        is_reported: whether it has been reported.
        is_committed: whether its outer steps may be run.
        digest: of all replicas, where it is known without a drift check; else None.
    """

    is_committed = True

    def __init__(self, plan: SyncPlan, context: SyncContext, began: float, waited: float) -> None:
        self.plan = plan
        self.units: UnitPlan = plan.selection.plan
        self.digests: dict[int, Tensor] = {}
        self.is_reported = False
        self.digest: int | None = None
        self._context, self._groups, self._outer = context, context.groups, context.outer
        self._began, self._waited, self._ended = began, waited, began
        self._streams = context.groups.sync.streams
        # Where the sync begins both host and device have waited for the norms.
        self._start, self._seconds_before = self._streams.mark(), time.monotonic() - began
        self._exposed_before, self._exposed = 0.0, list[Span]()
        self._inflight: deque[UnitSync] = deque()
        self._results: dict[int, UnitResult] = {}
        self._finite: list[bool] | None = None
        self._num_started = self._num_landed = 0

    # ---- the exchange

    def prepare(self, snapshots: Mapping[str, Tensor]) -> None:
        """Compute the addends of all units, before training changes the parameters.

        Args:
            snapshots: fp32 [numel] by unit, parameters that it has changed already.
        """
        for shard in self.units.shards:
            self._prepare_unit(shard, None, snapshots.get(shard.name))

    @abstractmethod
    def advance(self) -> bool:
        """Launch the exchanges that may begin, without blocking.

        Returns:
            Whether all exchanges of this sync are done.
        """

    def advance_and_step(self) -> bool:
        """Like `advance`, and run the outer steps that the sync allows before its landing.

        Collective: the ranks of the pipeline stage.

        Returns:
            As `advance`.
        """
        return self.advance()

    @property
    @abstractmethod
    def launches_together(self) -> bool:
        """Whether all units in flight are launched at once."""

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for; None if it can do nothing more."""
        works = (unit.on_wire for unit in self._inflight)
        return next((work for work in works if work is not None), None)

    @property
    def inflight_units(self) -> Sequence[UnitSync]:
        """Units that have started and not landed."""
        return tuple(self._inflight)

    # ---- the landing

    def check_finite(self) -> None:
        """Check whether parameters are finite, before a landing that is not a direct copy.

        Collective: the ranks of the pipeline stage.
        """
        if not self.plan.rules.landing.is_direct_copy:
            self._finite = finite_units(self.units, self._groups)

    @abstractmethod
    def is_finite_on_replica(self) -> bool:
        """Whether this replica's parameters of the units were finite, on all its stages.

        Collective: the ranks of the replica, where the sync lands late.
        """

    @property
    def had_finite_norms(self) -> bool:
        """Whether this replica's parameters of the units were finite at the meeting."""
        return bool(self.plan.decision.norms[self._groups.sync.rank].isfinite().all())

    @property
    def is_done(self) -> bool:
        """Whether every unit of this rank's stage has landed."""
        return self._num_landed == len(self.units.shards)

    def land_up_to(self, num_shards: int) -> Iterator[tuple[UnitShard, bool]]:
        """Yield the results of `land_next` for the units among the first `num_shards` shards of the
        stage that have not landed yet."""
        positions = self.plan.selection.positions
        while not self.is_done and positions[self._num_landed] < num_shards:
            yield self.land_next()

    def land_next(self) -> tuple[UnitShard, bool]:
        """Land the next unit in forward order, and start another one in its place.

        Returns:
            The unit, and whether its inner moments may not be finite.
        """
        self.advance()
        unit = self._inflight[0]
        self._step(unit)
        self._inflight.popleft()
        shard = unit.shard
        if unit.staged is None and self._outer.offload_streams is not None:
            # Its outer step was done earlier: the anchor may still be in transfer to host memory.
            self._outer.begin_sync()
        is_finite = self._finite is None or self._finite[shard.index]
        with naming_unit(shard), record_function("edit/landing"):
            has_bad_moments = unit.land(self.plan.rules.landing, is_finite=is_finite)
            if unit.moments is not None:
                unit.moments.land()
        self._num_landed += 1
        del unit  # its buffers make room for the unit that starts now
        if self._groups.sync.runs_in_order:
            # Second phases of units launched before this landing begin behind it in the queue.
            progress_exchanges(self._groups.sync)
        self.advance()
        if self.is_done:
            if self._outer.offload_streams is not None:
                self._outer.end_sync()
            self._ended = time.monotonic()
        return shard, has_bad_moments

    # ---- what is reported

    def count_exposed(self, begin: Mark) -> None:
        """Add the time since a mark, in which this rank did nothing but this sync."""
        self._exposed.append((begin, self._streams.mark()))

    def count_exposed_since_start(self) -> None:
        """Set the exposed time to the time since the sync began."""
        self._exposed_before = self._seconds_before
        self._exposed = [(self._start, self._streams.mark())]

    def seconds(self) -> dict[str, float]:
        """Durations for `sync.jsonl`, in seconds, as the device spent them. Blocks the host until
        the device has landed the sync."""
        waits = (result.exchange for result in self._results.values())
        exchange = sum(self._streams.seconds(wait) for wait in waits if wait is not None)
        exposed = self._exposed_before + sum(map(self._streams.seconds, self._exposed))
        return {
            "wait": self._waited,
            "exchange": exchange,
            "outer": max(0.0, exposed - self._waited - exchange),
            "exposed": exposed,
            "total": self._ended - self._began,
        }

    def clip_factors(self) -> Tensor:
        """Clip factors, float64 [U] on the CPU; NaN for units of other stages. Blocks the host."""
        return self._table({index: result.clip for index, result in self._results.items()})

    def update_norms(self) -> Tensor:
        """Norms of the weighted averages before the clip, in the form of `clip_factors`."""
        return self._table({index: result.norm for index, result in self._results.items()})

    def outer_digests(self) -> dict[int, Tensor]:
        """Digests of anchor and momentum, int64 scalars by the units' position. Does not block."""
        return self._outer.digests(self.units.shards)

    def _table(self, values: Mapping[int, Tensor]) -> Tensor:
        table = torch.full((len(self.units.names),), torch.nan, dtype=torch.float64)
        if values:
            table[list(values)] = torch.stack(list(values.values())).cpu()  # one copy for all
        return table

    # ---- units

    def _prepare_unit(
        self, shard: UnitShard, staged: StagedUnit | None, snapshot: Tensor | None = None
    ) -> None:
        """Compute a unit's addends: of its parameters and of the moments that the plan averages."""
        plan, groups, sync = self.plan, self._groups, self._groups.sync
        resident_state = self._outer.units[shard.name]
        residual = self._residual_of(resident_state)
        unit = UnitSync.prepare(shard, resident_state, staged, groups, plan, snapshot, residual)
        if plan.moments.kinds and unit.average is not None:
            unit.moments = UnitMoments.prepare(
                self._context.host, plan.moments, shard, plan.decision, sync.rank, sync.device
            )
        self._inflight.append(unit)
        self._num_started += 1

    def _residual_of(self, state: UnitState) -> Residual | None:
        """The encoding errors that an exchange of a unit adds back, and replaces."""
        return state.residual

    def _step(self, unit: UnitSync) -> None:
        with naming_unit(unit.shard):
            result = unit.step(self._groups, self.plan.rules)
        self._results[unit.shard.index] = result

    def _launch_units(self) -> bool:
        """Advance the exchanges of units whose outer step is not done; return whether all are
        done."""
        is_over = True
        for unit in (each for each in self._inflight if not each.is_stepped):
            with naming_unit(unit.shard):
                if len(batch := self._batch_of(unit)) > 1:
                    self._launch_as_one(batch)
                if not unit.advance(self._groups, self._context.wire):
                    is_over = False
                    if not self.launches_together:
                        break
        return is_over

    def _batch_of(self, unit: UnitSync) -> Sequence[UnitSync]:
        """The units in flight that are launched with a unit; it is one of them."""
        return (unit,)

    def _launch_as_one(self, units: Iterable[UnitSync]) -> None:
        """Begin the exchanges of these units, as far as they have not begun, in one launch.

        Collective: the sync group; see the note on the order of syncs (`manager.py`).
        """
        waiting = [(unit, unit.addends(self._context.wire)) for unit in units]
        if together := [addend for _, addends in waiting for addend in addends]:
            with record_function("edit/exchange"):
                exchange = start_exchange(self._groups.sync, together)
            for unit, addends in waiting:
                if addends:
                    unit.join_exchange(exchange)


class ForwardSync(Sync):
    """A sync that lands immediately, unit by unit, as the forward pass needs them."""

    def __init__(self, plan: SyncPlan, context: SyncContext, began: float, waited: float) -> None:
        super().__init__(plan, context, began, waited)
        shards = self.units.shards
        self._prefetched = self._outer.prefetch(shards, UnitState.stage)
        self._batches: Sequence[int] = range(len(shards))
        if context.together_numel:
            indices = [plan.selection.indices[shard.index] for shard in shards]
            numels = [context.unit_numels[index] for index in indices]
            self._batches = batch_numbers(numels, context.together_numel)
        self._batch_numbers = dict(zip((s.name for s in shards), self._batches, strict=True))

    @property
    def launches_together(self) -> bool:
        """True where the device keeps their order. Over sockets, which share a link, a unit is
        launched when the one before is done: two at a time would delay the unit that is needed
        first, and be slower together."""
        return self._groups.sync.runs_in_order

    def advance(self) -> bool:
        """Prepare as many units as the depth allows, and launch them; see `Sync.advance`."""
        num_units = len(self.units.shards)
        while self._num_started < num_units and self._has_room:
            shard, staged = next(self._prefetched)
            self._prepare_unit(shard, staged)
            del staged  # the unit in flight has the only reference
        has_all = self._num_started == num_units
        return self._launch_units() and has_all

    def advance_and_step(self) -> bool:
        """Run the outer step of each unit whose average has arrived, in forward order, and start
        other units in their place.

        Collective: the ranks of the pipeline stage.

        Returns:
            As `advance`. If work remains for later, `on_wire` is set: no average has arrived
            unnoticed.
        """
        is_over = self.advance()
        while (unit := self._first_unstepped) is not None:
            with naming_unit(unit.shard):
                if not unit.advance(self._groups, self._context.wire):
                    return False
            self._step(unit)
            if unit.resident_state.offload_streams is not None:
                unit.unstage()
            is_over = self.advance()
        return is_over

    def is_finite_on_replica(self) -> bool:
        """As the gathered norms show, which all ranks have. No communication."""
        return self.had_finite_norms

    @property
    def _first_unstepped(self) -> UnitSync | None:
        """The first unit in flight whose outer step is not done."""
        return next((unit for unit in self._inflight if unit.result is None), None)

    @property
    def _has_room(self) -> bool:
        """Whether another unit may start."""
        oldest, following = len(self._results), self._num_started
        return self._batches[following] - self._batches[oldest] < self._context.depth

    def _batch_of(self, unit: UnitSync) -> Sequence[UnitSync]:
        numbers, number = self._batch_numbers, self._batch_numbers[unit.shard.name]
        return [each for each in self._inflight if numbers[each.shard.name] == number]


class DelayedSync(Sync):
    """A sync that lands after more steps, or at the next meeting of its units."""

    @property
    def launches_together(self) -> bool:
        """Always true: no unit is needed first, and the sync is polled rarely."""
        return True

    def advance(self) -> bool:
        """Launch all prepared units without blocking; return whether all exchanges are done."""
        if self._groups.sync.runs_in_order:
            # Launched one by one, each would wait in the device's queue until the one before is
            # done, and with a single hardware queue so would all work behind it.
            self._launch_as_one(self._inflight)
        return self._launch_units()

    def is_finite_on_replica(self) -> bool:
        """Whether the parameters that land are finite on all stages.

        Collective: the ranks of the replica.
        """
        is_finite = self._finite is None or all(self._finite)
        return is_finite_on_all_stages(is_finite, self._groups)

    def finish_exchange(self) -> None:
        """Wait until no exchange is in flight. Lands nothing."""
        for unit in self._inflight:
            self.advance()
            with naming_unit(unit.shard):
                unit.await_average()
        self.advance()

    def finish_steps(self) -> None:
        """Run the outer steps of all units. The parameters take the anchor later.

        Collective: the ranks of the pipeline stage.
        """
        for unit in self._inflight:
            self.advance()
            self._step(unit)
            unit.unstage()
        self._outer.end_sync()
        self._ended = time.monotonic()

    # ---- checkpoints

    def state_dict(self) -> PendingState:
        """Its state for a checkpoint. No exchange may be in flight; no tensor is copied."""
        plan, decision, units = self.plan, self.plan.decision, self._inflight
        about = PendingSync(
            round=plan.round,
            step=plan.step,
            due=plan.due,
            units=self.units.names,
            excluded=tuple(decision.excluded[self._groups.sync.rank].tolist()),
            is_stepped=plan.due is not None,
            has_snapshot=plan.rules.landing.needs_snapshot,
            landing=dataclasses.asdict(plan.rules.landing),
            inner_lr=plan.rules.inner_lr,
            tables={
                "norms": decision.norms.tolist(),
                "scores": decision.verdict.scores.tolist(),
                "anomalous": decision.verdict.anomalous.tolist(),
                "weights": decision.weights.tolist(),
                "rollback": decision.rollback.tolist(),
                "round_loss": decision.loss.losses.tolist(),
                "loss_scores": decision.loss.scores.tolist(),
                "loss_rejected": decision.loss.rejected.tolist(),
            },
            inner_steps=plan.inner_steps,
            samples=plan.samples,
            moments=plan.moments.kinds,
        )
        return PendingState(
            about,
            averages={u.shard.name: u.average for u in units if u.average is not None},
            snapshots={u.shard.name: u.snapshot for u in units if u.snapshot is not None},
            moments={
                kind: {u.shard.name: u.moments.means[kind] for u in units if u.moments is not None}
                for kind in plan.moments.kinds
            },
        )

    @classmethod
    def restore(
        cls, saved: PendingState, context: SyncContext, settings: EngineSettings
    ) -> DelayedSync:
        """Restore a sync that had not landed when a checkpoint was written.

        Args:
            saved: result of `state_dict` on this replica; the order of units may differ in this
                run.
        """
        sync = cls(_plan_of(saved.sync, context.host, settings), context, time.monotonic(), 0.0)
        sync.is_reported = saved.sync.is_stepped  # it is reported after the outer steps
        for shard in sync.units.shards:
            sync._inflight.append(sync._restored_unit(shard, saved))
        sync._num_started = len(sync.units.shards)
        return sync

    def _restored_unit(self, shard: UnitShard, saved: PendingState) -> UnitSync:
        device, about = self._groups.sync.device, saved.sync
        unit = UnitSync.restore(
            shard,
            self._outer.units[shard.name],
            device,
            saved.averages.get(shard.name),
            saved.snapshots.get(shard.name),
            is_excluded=about.excluded[about.units.index(shard.name)],
            is_stepped=about.is_stepped,
        )
        means = {
            kind: units[shard.name].to(device)
            for kind, units in saved.moments.items()
            if shard.name in units
        }
        if means:
            host, rule = self._context.host, self.plan.moments
            unit.moments = UnitMoments(host, shard, means, rule, unit.is_excluded)
        return unit


def _plan_of(saved: PendingSync, host: Host, settings: EngineSettings) -> SyncPlan:
    """The plan of a saved sync, for the units of this run in their order."""
    units = host.plan
    selection = select_units(units, [units.names.index(name) for name in saved.units])
    order = [saved.units.index(name) for name in selection.plan.names]

    def table(name: str) -> Tensor:
        return torch.tensor(saved.tables[name], dtype=torch.float64)[..., order]

    verdict = Verdict(table("anomalous").bool(), table("scores"))
    rollback, loss = table("rollback").bool(), _loss_verdict_of(saved.tables)
    # Checkpoints may be older than a field of the rule.
    landing = dataclasses.replace(DIRECT_COPY, **saved.landing)
    return SyncPlan(
        saved.round,
        saved.step,
        saved.due,
        selection,
        Decision(table("norms"), verdict, table("weights"), rollback, loss),
        SyncRules(settings.outer, settings.max_norm, landing, saved.inner_lr),
        saved.inner_steps,
        saved.samples,
        sum(saved.samples),
        MomentRule(saved.moments),
        is_checked=settings.checks_drift_after(saved.round),
    )


def _loss_verdict_of(tables: Mapping[str, Any]) -> LossVerdict:
    """The loss verdict in the tables of a pending sync; older checkpoints have none."""
    if "round_loss" not in tables:
        norms = torch.tensor(tables["norms"], dtype=torch.float64)
        return LossVerdict.without_check(torch.full_like(norms[:, 0], torch.nan))
    losses, scores, rejected = (
        torch.tensor(tables[name], dtype=torch.float64)
        for name in ("round_loss", "loss_scores", "loss_rejected")
    )
    return LossVerdict(rejected.bool(), losses, scores)


class CheckedSync(DelayedSync):
    """A sync that is applied only when all replicas are known to get the same result.

    The averages of all units wait in buffers, 4 bytes per parameter of the rank's shards, and so do
    residuals.

    Attributes:
        failure: of an exchange that others may repeat; None if there is none.
    """

    failure: ReplicaLostError | None = None
    is_committed = False

    def advance(self) -> bool:
        """As before; in an elastic run a lost replica ends only this exchange: see `failure`."""
        if self.failure is not None:
            return False
        try:
            return super().advance()
        except ReplicaLostError as error:
            if not self.plan.members:
                raise
            self.failure = error
            return False

    @property
    def on_wire(self) -> Work | None:
        """As before; None after a failure."""
        return None if self.failure is not None else super().on_wire

    def is_finite_on_replica(self) -> bool:
        """As before; of a sync that lands immediately, whether the gathered norms are finite."""
        is_immediate = self.plan.rules.landing.is_immediate
        return self.had_finite_norms if is_immediate else super().is_finite_on_replica()

    @property
    def num_exchanged(self) -> int:
        """Units whose average has arrived, as far as `advance` knows."""
        return sum(unit.on_wire is None for unit in self._inflight)

    def addend_projections(self) -> Tensor:
        """Projections of what this rank adds to the averages, before they are exchanged: its
        addends, and the encoding errors of earlier exchanges.

        Returns:
            float64 [1 + parts, 2] on the CPU, of all units of the stage, which may have none of
            the sync's, after a row of zeros; zeros where this replica was rejected without such
            errors, or the unit is rolled back.
        """
        return _table_of(self._projections()) + _table_of(self._residual_projections())

    def sent_projections(self, addends: Tensor) -> Tensor:
        """Projections of what this rank has added to the averages: the errors that their encoding
        has left are not in them. After the exchange.

        Args:
            addends: `addend_projections`.
        """
        left = _table_of(self._residual_projections())
        return addends + left * torch.tensor([-1.0, 1.0])  # the second column is a bound

    def corrupt_averages(self, addends: Tensor) -> list[bool]:
        """By unit, whether this rank's average differs from the sum of the replicas' addends by
        more than rounding. After `finish_exchange`.

        Args:
            addends: `sent_projections` of all replicas, float64 [N, 1 + parts, 2].
        """
        averages = self._projections()
        _, *of_units = addends.split([1, *(len(each) for each in averages)], dim=1)
        found, wire = [False] * len(self.units.names), self._context.wire.name
        for unit, sent, average in zip(self._inflight, of_units, averages, strict=True):
            found[unit.shard.index] = sum_differs(sent, average, wire)
        return found

    def _projections(self) -> list[Tensor]:
        """Of what the buffers of all units hold, on the CPU."""
        found = [
            _no_projection(unit) if unit.average is None else projection(unit.average)
            for unit in self._inflight
        ]
        return [each.cpu() for each in found]  # only now: a GPU has all of them to compute

    def _residual_projections(self) -> list[Tensor]:
        """Of the encoding errors of all units that this rank keeps, on the CPU."""
        wire, sync = self._context.wire, self._groups.sync
        found = []
        for unit in self._inflight:
            found.append(_no_projection(unit))
            if unit.residual is not None and unit.average is not None:
                summed = torch.zeros_like(unit.residual.sent)
                own = wire.owned(unit.shard.numel, sync.size, sync.rank)
                summed[own] = unit.residual.summed[: own.stop - own.start]
                found[-1] = projection(unit.residual.sent) + projection(summed)
        return [each.cpu() for each in found]

    def _residual_of(self, state: UnitState) -> Residual | None:
        """A copy: nothing changes before the outer step."""
        if state.residual is None:
            return None
        size = self._groups.sync.size
        owned = self._context.wire.owner_numel(state.residual.sent.numel(), size)
        return state.residual.kept_aside(self.plan.members, owned)

    def preview(self) -> dict[int, Tensor]:
        """Digests of anchor and momentum as the outer steps will leave them, by unit position.

        Collective: the ranks of the pipeline stage.
        """
        self._outer.wait()
        size, device = self.units.largest_numel, self._groups.sync.device
        scratch = [torch.empty(size, dtype=torch.float32, device=device) for _ in range(3)]
        digests = {}
        for unit in self._inflight:
            with naming_unit(unit.shard):
                digests[unit.shard.index] = unit.preview(self._groups, self.plan.rules, scratch)
        return digests

    def mean_digests(self) -> dict[int, Tensor]:
        """Digests of the means of moments, by the position of units that have some. After
        `preview`, which makes copies of a parameter identical in them."""
        return {
            unit.shard.index: tensor_digest(unit.moments.means.values())
            for unit in self._inflight
            if unit.moments is not None
        }


def _table_of(projections: Sequence[Tensor]) -> Tensor:
    """The projections of all units after a row of zeros: a table of nothing cannot be gathered."""
    return torch.cat([torch.zeros(1, 2, dtype=torch.float64), *projections])


def _no_projection(unit: UnitSync) -> Tensor:
    return torch.zeros(num_parts(unit.shard.numel), 2, dtype=torch.float64)
