"""One sync, from the gathered decisions to the last landing.

Units start and land in forward order on every rank. A sync that lands at once keeps at most
`depth` of them in flight: blocking mode lands them all together, overlap mode each when the forward
pass needs it. A delayed sync takes all its units at once and lands them steps later. All do the
same arithmetic on the same messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.wire import Wire
from megatron_edit.engine.checks.finite import finite_units
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.rounds.plan import Decision
from megatron_edit.engine.sync.fragments import Selection
from megatron_edit.engine.sync.offload import one_ahead
from megatron_edit.engine.sync.outer_state import OuterState, StagedUnit, pseudo_gradient
from megatron_edit.engine.sync.unit_sync import Outcome, Rules, UnitSync
from megatron_edit.engine.sync.units import UnitPlan, UnitShard
from megatron_edit.errors import ReplicaLostError


@dataclass
class InflightSync:
    """A sync that is under way on this rank.

    Attributes:
        round: which sync, from 1.
        step: s at which it began.
        due: the own step after which it lands; None is at the next meeting of its units.
        selection: its units.
        state: anchor and momentum.
        groups: who communicates.
        decision: what the gathered table decided; columns are the selected units.
        records: control records by replica.
        rules: what becomes of the averages.
        wire: type on the wire.
        depth: units in flight at most, where it lands at once.
        waited: seconds spent at the meeting.
        exposed: seconds in which this rank did nothing but this sync.
        is_reported: whether the reporter knows what became of it.
    """

    round: int
    step: int
    due: int | None
    selection: Selection
    state: OuterState
    groups: EngineGroups
    decision: Decision
    records: Sequence[ControlRecord]
    rules: Rules
    wire: Wire
    depth: int
    began: float
    waited: float
    exposed: float = 0.0
    digests: dict[int, Tensor] = field(default_factory=dict)
    ended: float = 0.0
    is_reported: bool = False
    _flying: deque[UnitSync] = field(default_factory=deque)
    _outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    _finite: list[bool] | None = None
    _num_landed: int = 0
    _started: int = 0
    _stages: Iterator[tuple[UnitShard, StagedUnit]] = field(init=False)

    def __post_init__(self) -> None:
        units = self.state.units
        self._stages = one_ahead(self.plan.shards, lambda shard: units[shard.name].stage())
        self.ended = self.began

    @property
    def plan(self) -> UnitPlan:
        """The selected units, and this rank's shards of them."""
        return self.selection.plan

    @property
    def flights(self) -> Sequence[UnitSync]:
        """Of the units that have not landed and are under way."""
        return tuple(self._flying)

    def bring_back(self, flights: Sequence[UnitSync]) -> None:
        """Go on with units that were in flight when a checkpoint was written: with all of them."""
        self._flying.extend(flights)
        self._started = len(flights)

    @property
    def is_done(self) -> bool:
        """Whether every unit of this rank's stage has landed."""
        return self._num_landed == len(self.plan.shards)

    def needs(self, num_shards: int) -> bool:
        """Whether a unit among the first `num_shards` shards of the stage has not landed yet."""
        return not self.is_done and self.selection.positions[self._num_landed] < num_shards

    def take_off(self) -> None:
        """Of a delayed sync: compute all addends, before training changes the parameters."""
        units, landing = self.state.units, self.rules.landing
        for shard in self.plan.shards:
            home = units[shard.name]
            self._flying.append(
                UnitSync.prepare(shard, home, None, self.groups, self.decision, landing)
            )
            self._started += 1

    def advance(self) -> bool:
        """Prepare as many units as the depth allows, and launch them. Waits for nothing.

        Where exchanges share the link, the next is launched when the one before is over: two at
        a time would delay the unit that is needed first, and be slower together. A delayed sync
        needs none first, and is looked after only now and then: its units are launched together.

        Returns:
            Whether nothing of this sync is, or will be, on the wire.
        """
        while self._started < len(self.plan.shards) and len(self._flying) < self.depth:
            shard, staged = next(self._stages)
            self._flying.append(
                UnitSync.prepare(
                    shard,
                    self.state.units[shard.name],
                    staged,
                    self.groups,
                    self.decision,
                    self.rules.landing,
                )
            )
            del staged  # it lives as long as its flight
            self._started += 1
        is_over = self._started == len(self.plan.shards)
        for flight in self._flying:
            with _naming(flight.shard):
                if not flight.is_launched:
                    flight.launch(self.groups, self.wire)
                if not flight.advance():
                    is_over = False
                    if not self.goes_together:
                        break
        return is_over

    @property
    def goes_together(self) -> bool:
        """Whether all units in flight are launched at once."""
        return self.groups.sync.runs_in_order or not self.rules.landing.is_immediate

    def finish_exchange(self) -> None:
        """Wait until nothing of a delayed sync is on the wire. Its result lands later."""
        for flight in self._flying:
            self.advance()
            with _naming(flight.shard):
                flight.await_average()
        self.advance()

    def finish_steps(self) -> None:
        """Move anchor and momentum of all units. Parameters take them later.

        Collective: the ranks of the pipeline stage.
        """
        for flight in self._flying:
            self.advance()
            self._step(flight)
            flight.unstage()
        self.ended = time.monotonic()

    def check_finite(self) -> None:
        """Before a landing of what was trained on, or is kept in part: are parameters finite?

        Collective: the ranks of the pipeline stage.
        """
        if not self.rules.landing.is_direct_copy:
            self._finite = finite_units(self.plan, self.groups)

    @property
    def is_finite(self) -> bool:
        """Whether this replica's parameters of the units were finite, as far as this stage knows.

        Of a sync that lands at once the gathered norms tell, which all ranks have.
        """
        if self.rules.landing.is_immediate:
            return self.had_finite_norms
        return self._finite is None or all(self._finite)

    @property
    def had_finite_norms(self) -> bool:
        """Whether this replica's parameters of the units were finite at the meeting."""
        return bool(self.decision.norms[self.groups.sync.rank].isfinite().all())

    def land_next(self) -> tuple[UnitShard, bool]:
        """Land the next unit in forward order, and start another in its place.

        Returns:
            The unit, and whether its inner moments need healing.
        """
        self.advance()
        flight = self._flying[0]
        self._step(flight)
        self._flying.popleft()
        shard = flight.shard
        is_finite = self._finite is None or self._finite[shard.index]
        with _naming(shard):
            has_bad_moments = flight.land(self.rules.landing, is_finite=is_finite)
        self._num_landed += 1
        del flight  # its buffers make room for the unit that starts now
        self.advance()
        if self.is_done:
            self.ended = time.monotonic()
        return shard, has_bad_moments

    def clip_factors(self) -> Tensor:
        """float64 [U] on the CPU; NaN for units of other stages. Waits for the device."""
        return self._table([(index, outcome.clip) for index, outcome in self._outcomes])

    def update_norms(self) -> Tensor:
        """Like `clip_factors`: norms of the weighted averages, before the clip."""
        return self._table([(index, outcome.norm) for index, outcome in self._outcomes])

    def seconds(self) -> dict[str, float]:
        """Durations for `sync.jsonl`."""
        exchange = sum(outcome.exchange_seconds for _, outcome in self._outcomes)
        return {
            "wait": self.waited,
            "exchange": exchange,
            "outer": max(0.0, self.exposed - self.waited - exchange),
            "exposed": self.exposed,
            "total": self.ended - self.began,
        }

    def _step(self, flight: UnitSync) -> None:
        if not flight.is_stepped:
            with _naming(flight.shard):
                self._outcomes.append((flight.shard.index, flight.step(self.groups, self.rules)))

    def _table(self, values: Sequence[tuple[int, Tensor]]) -> Tensor:
        table = torch.full((len(self.plan.names),), torch.nan, dtype=torch.float64)
        for index, value in values:
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


def partial_squares(plan: UnitPlan, state: OuterState, device: torch.device) -> Tensor:
    """This rank's share of every unit's squared pseudo-gradient norm, float64 [U] on `device`."""
    scratch = torch.empty(plan.largest_numel, dtype=torch.float32, device=device)
    squares = torch.zeros(len(plan.names), dtype=torch.float64, device=device)
    state.begin_sync()
    for shard, anchor in one_ahead(plan.shards, lambda s: state.units[s.name].stage_anchor()):
        delta = pseudo_gradient(anchor.ready(), shard, scratch)
        squares[shard.index] = shard.squared_norm(delta)
        del anchor  # the next but one takes its place
    return squares
