"""One sync in flight, from the plan of its round to the last landing, and its units.

Units start and land in forward order on every rank, each like this:

    prepare:  D = A - theta, weighted, in a buffer of its own
    launch:   the exchange begins                                 (nothing waits)
    step:     wait, tie copies, clip, outer step on the anchor
    land:     theta takes the anchor, or moves towards it         (the unit is needed now)

Each part depends on the gathered table and on the unit's own numbers alone, so a unit lands with
the same bits whenever the host comes to it, and whatever else is in flight. A sync that lands at
once keeps at most `depth` units in flight: blocking mode lands them all together, overlap mode each
when the forward pass needs it. A delayed sync takes all its units at once and lands them steps
later. All do the same arithmetic on the same messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.compressed_all_reduce import Addend
from megatron_edit.comm.wire import Exchange, Wire, progress_exchanges, start_exchange
from megatron_edit.engine.checks.finite import finite_units
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.rounds.plan import Decision, SyncRules
from megatron_edit.engine.sync.averages import agree_on_average
from megatron_edit.engine.sync.moments import UnitMoments
from megatron_edit.engine.sync.offload import DeviceCopy
from megatron_edit.engine.sync.outer_state import OuterState, StagedUnit, UnitState
from megatron_edit.engine.sync.units import Selection, UnitPlan, UnitShard
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import NO_MOMENTS, MomentRule
from megatron_edit.method.outer import clip_factor, weighted_contribution_


@dataclass(frozen=True)
class SyncPlan:
    """What is synced, and how: settled before the first message.

    Attributes:
        round: which sync, from 1.
        step: s at which it began.
        due: the own step after which it lands; None is at the next meeting of its units.
        selection: its units.
        decision: what the gathered table decided; columns are the selected units.
        rules: what becomes of the averages.
        inner_steps: of the round, by replica.
        samples: consumed so far, by replica.
        moments: of the inner optimizer that are averaged, too.
    """

    round: int
    step: int
    due: int | None
    selection: Selection
    decision: Decision
    rules: SyncRules
    inner_steps: tuple[int, ...]
    samples: tuple[int, ...]
    moments: MomentRule = NO_MOMENTS


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
        moments: of the inner optimizer that travel with the unit; None where none do.
    """

    shard: UnitShard
    home: UnitState
    is_excluded: bool
    staged: StagedUnit | None
    average: Tensor | None
    snapshot: Tensor | None = None
    result: UnitResult | None = None
    is_exchanged: bool = False
    moments: UnitMoments | None = None
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
        is_excluded = bool(decision.excluded[replica, shard.index])
        unit = cls(shard, home, is_excluded, staged, None)
        if not is_excluded and landing.needs_snapshot:
            unit.snapshot = shard.gather(torch.empty(shard.numel, device=device))
        if not bool(decision.rollback[shard.index]):
            buffer = torch.empty(shard.numel, dtype=torch.float32, device=device)
            anchor = home.stage_anchor() if staged is None else staged.anchor
            weight = float(decision.weights[replica, shard.index])
            with record_function("edit/addend"):
                if unit.snapshot is None:
                    delta = shard.pseudo_gradient(anchor.ready(), buffer)
                else:
                    delta = torch.sub(anchor.ready(), unit.snapshot, out=buffer)
                unit.average = weighted_contribution_(delta, weight)
            if staged is None:
                anchor.release()
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

        Collective: the sync group; see the note on the order of syncs (`queue.py`).
        """
        assert self.average is not None, f"unit {self.shard.name}: a roll-back is not exchanged"
        with record_function("edit/exchange"):
            self._exchange = start_exchange(groups.sync, self.addends(wire))

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

    @property
    def on_wire(self) -> Work | None:
        """What must be over before the exchange can go on; None where there is nothing."""
        return None if self._exchange is None else self._exchange.on_wire

    def addends(self, wire: Wire) -> list[Addend]:
        """What is still to be launched: of the parameters, then of the moments."""
        if self.average is None or self.is_exchanged or self._exchange is not None:
            return []
        moments = [] if self.moments is None else self.moments.addends
        own = Addend(self.average, self.home.residual, self.is_excluded, wire.codec)
        return [own, *moments]

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
        if self.average is None:  # a roll-back: anchor and momentum stay as they are
            one = torch.ones((), dtype=torch.float64, device=device)
            self.result = UnitResult(one, torch.zeros_like(one))
            return self.result
        began = time.monotonic()
        with record_function("edit/exchange"):
            self.await_average()
        waited = time.monotonic() - began
        with record_function("edit/norms"):
            means = () if self.moments is None else tuple(self.moments.means.values())
            norm = agree_on_average(self.shard, self.average, means, groups)
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
        # After an outer step taken earlier nothing is staged; the momentum is not needed again.
        staged_anchor = self.home.stage_anchor() if self.staged is None else self.staged.anchor
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
        """After the landing, or the outer step long before it: keep nothing on the device."""
        if self.staged is not None and self.home.offload_streams is not None:
            self.staged.release()
        self.staged = None

    def _stage(self) -> StagedUnit:
        if self.staged is None:
            self.staged = self.home.stage()
        return self.staged


@dataclass
class InflightSync:
    """A sync that is under way on this rank.

    Attributes:
        plan: what is synced, and how.
        state: anchor and momentum.
        groups: who communicates.
        wire: type on the wire.
        depth: units at most whose outer steps are not done, where it lands at once.
        began: when, seconds on a monotonic clock.
        waited: seconds spent at the meeting.
        exposed: seconds in which this rank did nothing but this sync.
        digests: of units that have landed, by position, for the drift check.
        ended: when its last unit landed, or where that was earlier, took its outer step.
        is_reported: whether the reporter knows what became of it.
        units: the selected units, and this rank's shards of them.
        launches_together: whether all units in flight are launched at once.
        host: keeps the moments of the inner optimizer; None where the plan averages none.
    """

    plan: SyncPlan
    state: OuterState
    groups: EngineGroups
    wire: Wire
    depth: int
    began: float
    waited: float
    host: Host | None = None
    exposed: float = 0.0
    digests: dict[int, Tensor] = field(default_factory=dict)
    ended: float = 0.0
    is_reported: bool = False
    _inflight: deque[UnitSync] = field(default_factory=deque)
    _results: dict[int, UnitResult] = field(default_factory=dict)
    _finite: list[bool] | None = None
    _num_landed: int = 0
    _started: int = 0
    _stages: Iterator[tuple[UnitShard, StagedUnit]] = field(init=False)
    units: UnitPlan = field(init=False)
    launches_together: bool = field(init=False)

    def __post_init__(self) -> None:
        self.units = self.plan.selection.plan
        in_order = self.groups.sync.runs_in_order
        self.launches_together = in_order or not self.plan.rules.landing.is_immediate
        self._stages = self.state.stages(self.units.shards, UnitState.stage)
        self.ended = self.began

    @property
    def inflight_units(self) -> Sequence[UnitSync]:
        """Units that have not landed and are under way."""
        return tuple(self._inflight)

    @property
    def is_done(self) -> bool:
        """Whether every unit of this rank's stage has landed."""
        return self._num_landed == len(self.units.shards)

    def prepare_all(self) -> None:
        """Of a delayed sync: compute all addends, before training changes the parameters."""
        units, landing = self.state.units, self.plan.rules.landing
        for shard in self.units.shards:
            unit = UnitSync.prepare(
                shard, units[shard.name], None, self.groups, self.plan.decision, landing
            )
            self._take_moments(unit)
            self._inflight.append(unit)
            self._started += 1

    def advance(self) -> bool:
        """Prepare as many units as the depth allows, and launch them. Waits for nothing.

        Where exchanges share the link, the next is launched when the one before is over: two at
        a time would delay the unit that is needed first, and be slower together. A delayed sync
        needs none first, and is polled only now and then: its units are launched together.

        Returns:
            Whether nothing of this sync is, or will be, on the wire.
        """
        plan, shards = self.plan, self.units.shards
        while self._started < len(shards) and self._num_open < self.depth:
            shard, staged = next(self._stages)
            home = self.state.units[shard.name]
            unit = UnitSync.prepare(
                shard, home, staged, self.groups, plan.decision, plan.rules.landing
            )
            self._take_moments(unit)
            self._inflight.append(unit)
            del staged, unit  # it lives as long as its unit is in flight
            self._started += 1
        if self.groups.sync.runs_in_order and not plan.rules.landing.is_immediate:
            # Launched one by one, each would wait in the device's queue until the one before is
            # over, and with a single hardware queue so would all work behind it.
            self._launch_as_one()
        is_over = self._started == len(shards)
        for unit in self._inflight:
            with _naming(unit.shard):
                if not unit.advance(self.groups, self.wire):
                    is_over = False
                    if not self.launches_together:
                        break
        return is_over

    def _take_moments(self, unit: UnitSync) -> None:
        """Let moments of the inner optimizer travel with a unit, where the plan says so."""
        plan, sync = self.plan, self.groups.sync
        if plan.moments.kinds and unit.average is not None:
            assert self.host is not None, "moments of no host"
            unit.moments = UnitMoments.prepare(
                self.host, plan.moments, unit.shard, plan.decision, sync.rank, sync.device
            )

    def step_exchanged(self) -> bool:
        """Like `advance`; and of a sync that lands at once, take the outer step of each unit whose
        average is there, in forward order, and start others in their place.

        Collective: the ranks of the pipeline stage.

        Returns:
            As `advance`. Where more of a sync that lands at once can only be done later, something
            of it is `on_wire`: no average has arrived unseen.
        """
        is_over = self.advance()
        if not self.plan.rules.landing.is_immediate:
            return is_over
        while (unit := self._first_open) is not None:
            with _naming(unit.shard):
                if not unit.advance(self.groups, self.wire):
                    return False
            self._step(unit)
            if unit.home.offload_streams is not None:
                unit.unstage()
            is_over = self.advance()
        return is_over

    @property
    def on_wire(self) -> Work | None:
        """What must be over before `advance` can do more; None where it can do nothing more."""
        works = (unit.on_wire for unit in self._inflight)
        return next((work for work in works if work is not None), None)

    def _launch_as_one(self) -> None:
        """Begin the exchanges of all units, as one.

        Collective: the sync group; see the note on the order of syncs (`queue.py`).
        """
        units = [(unit, unit.addends(self.wire)) for unit in self._inflight]
        if together := [addend for _, addends in units for addend in addends]:
            with record_function("edit/exchange"):
                exchange = start_exchange(self.groups.sync, together)
            for unit, addends in units:
                unit._exchange = exchange if addends else unit._exchange

    def finish_exchange(self) -> None:
        """Wait until nothing of a delayed sync is on the wire. Its result lands later."""
        for unit in self._inflight:
            self.advance()
            with _naming(unit.shard):
                unit.await_average()
        self.advance()

    def finish_steps(self) -> None:
        """Move anchor and momentum of all units. Parameters take them later.

        Collective: the ranks of the pipeline stage.
        """
        for unit in self._inflight:
            self.advance()
            self._step(unit)
            unit.unstage()
        self.state.end_sync()
        self.ended = time.monotonic()

    def check_finite(self) -> None:
        """Before a landing of what was trained on, or is kept in part: are parameters finite?

        Collective: the ranks of the pipeline stage.
        """
        if not self.plan.rules.landing.is_direct_copy:
            self._finite = finite_units(self.units, self.groups)

    @property
    def is_finite(self) -> bool:
        """Whether this replica's parameters of the units were finite, as far as this stage knows.

        Of a sync that lands at once the gathered norms tell, which all ranks have.
        """
        if self.plan.rules.landing.is_immediate:
            return self.had_finite_norms
        return self._finite is None or all(self._finite)

    @property
    def had_finite_norms(self) -> bool:
        """Whether this replica's parameters of the units were finite at the meeting."""
        return bool(self.plan.decision.norms[self.groups.sync.rank].isfinite().all())

    def land_up_to(self, num_shards: int) -> Iterator[tuple[UnitShard, bool]]:
        """Land the units among the first `num_shards` shards of the stage that have not landed yet,
        one after another as the caller asks for them; see `land_next`."""
        positions = self.plan.selection.positions
        while not self.is_done and positions[self._num_landed] < num_shards:
            yield self.land_next()

    def land_next(self) -> tuple[UnitShard, bool]:
        """Land the next unit in forward order, and start another in its place.

        Returns:
            The unit, and whether its inner moments may not be finite.
        """
        self.advance()
        unit = self._inflight[0]
        self._step(unit)
        self._inflight.popleft()
        shard = unit.shard
        if unit.staged is None and self.state.offload_streams is not None:
            # Its outer step was taken earlier: the new anchor may still be on its way to the host
            # memory that the landing reads it from.
            self.state.begin_sync()
        is_finite = self._finite is None or self._finite[shard.index]
        with _naming(shard), record_function("edit/landing"):
            has_bad_moments = unit.land(self.plan.rules.landing, is_finite=is_finite)
            if unit.moments is not None:
                unit.moments.land()
        self._num_landed += 1
        del unit  # its buffers make room for the unit that starts now
        if self.groups.sync.runs_in_order:
            # Second phases of units that were launched before this landing begin behind it.
            progress_exchanges(self.groups.sync)
        self.advance()
        if self.is_done:
            if self.state.offload_streams is not None:
                self.state.end_sync()
            self.ended = time.monotonic()
        return shard, has_bad_moments

    def clip_factors(self) -> Tensor:
        """float64 [U] on the CPU; NaN for units of other stages. Waits for the device."""
        return self._table({index: result.clip for index, result in self._results.items()})

    def update_norms(self) -> Tensor:
        """Like `clip_factors`: norms of the weighted averages, before the clip."""
        return self._table({index: result.norm for index, result in self._results.items()})

    def seconds(self) -> dict[str, float]:
        """Durations for `sync.jsonl`."""
        exchange = sum(result.exchange_seconds for result in self._results.values())
        return {
            "wait": self.waited,
            "exchange": exchange,
            "outer": max(0.0, self.exposed - self.waited - exchange),
            "exposed": self.exposed,
            "total": self.ended - self.began,
        }

    @property
    def _first_open(self) -> UnitSync | None:
        """The first unit, of those under way, whose outer step is not done."""
        return next((unit for unit in self._inflight if not unit.is_stepped), None)

    @property
    def _num_open(self) -> int:
        return sum(not unit.is_stepped for unit in self._inflight)

    def _step(self, unit: UnitSync) -> None:
        with _naming(unit.shard):
            result = unit.step(self.groups, self.plan.rules)
        self._results[unit.shard.index] = result

    def _table(self, values: Mapping[int, Tensor]) -> Tensor:
        table = torch.full((len(self.units.names),), torch.nan, dtype=torch.float64)
        for index, value in values.items():
            table[index] = value.cpu()
        return table


@contextmanager
def _naming(shard: UnitShard) -> Iterator[None]:
    """Say in which unit it was that something failed."""
    try:
        yield
    except ReplicaLostError as error:
        raise ReplicaLostError(f"unit {shard.name}: {error}") from error
    except Exception as error:
        error.add_note(f"in the exchange of unit {shard.name}")
        raise
