"""One sync, from the gathered decisions to the last landing.

Units start and land in forward order on every rank, at most `depth` of them in flight. Blocking
mode lands them all at once; overlap mode lands each when the forward pass needs it. Both do the
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

from megatron_edit.engine.decisions import Decision
from megatron_edit.engine.flight import Flight, Landing, OuterRule
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.lanes import one_ahead
from megatron_edit.engine.state import OuterState, StagedUnit, pseudo_gradient
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.errors import ReplicaLostError
from megatron_edit.replica.control import ControlRecord


@dataclass
class SyncRun:
    """A sync that is under way on this rank.

    Attributes:
        round: which sync, from 1.
        step: s at which it began.
        plan: units of the replica and shards of this rank.
        state: anchor and momentum.
        groups: who communicates.
        decision: what the gathered table decided.
        records: control records by replica.
        rule: constants of the outer step.
        depth: units in flight at most.
        waited: seconds spent at the meeting.
        exposed: seconds in which this rank did nothing but this sync.
    """

    round: int
    step: int
    plan: UnitPlan
    state: OuterState
    groups: EngineGroups
    decision: Decision
    records: Sequence[ControlRecord]
    rule: OuterRule
    depth: int
    began: float
    waited: float
    exposed: float = 0.0
    digests: dict[int, int] = field(default_factory=dict)
    ended: float = 0.0
    _flying: deque[Flight] = field(default_factory=deque)
    _landings: list[Landing] = field(default_factory=list)
    _started: int = 0
    _stages: Iterator[tuple[UnitShard, StagedUnit]] = field(init=False)

    def __post_init__(self) -> None:
        units = self.state.units
        self._stages = one_ahead(self.plan.shards, lambda shard: units[shard.name].stage())

    @property
    def num_landed(self) -> int:
        """Shards of the plan that have landed: the first ones, in forward order."""
        return len(self._landings)

    @property
    def is_done(self) -> bool:
        """Whether every unit of this rank's stage has landed."""
        return self.num_landed == len(self.plan.shards)

    def prefetch(self) -> None:
        """Prepare as many units as the depth allows, and launch them. Waits for nothing.

        Where exchanges share the link, the next is launched when the one before is over: two at
        a time would delay the unit that is needed first, and be slower together.
        """
        while self._started < len(self.plan.shards) and len(self._flying) < self.depth:
            shard, staged = next(self._stages)
            self._flying.append(Flight.prepare(shard, staged, self.groups, self.decision))
            del staged  # it lives as long as its flight
            self._started += 1
        for place, flight in enumerate(self._flying):
            if not flight.is_launched:
                with _naming(flight.shard):
                    self._flying[place] = flight = flight.launch(self.groups)
            if not (flight.is_over or self.groups.sync.runs_in_order):
                break

    def land_next(self) -> UnitShard:
        """Land the next unit in forward order, and start another in its place."""
        self.prefetch()
        flight = self._flying.popleft()
        with _naming(flight.shard):
            self._landings.append(flight.land(self.groups, self.rule))
        shard = flight.shard
        del flight  # its buffers make room for the unit that starts now
        self.prefetch()
        if self.is_done:
            self.ended = time.monotonic()
        return shard

    def clip_factors(self) -> Tensor:
        """float64 [U] on the CPU; NaN for units of other stages. Waits for the device."""
        return self._table([(landing.index, landing.clip) for landing in self._landings])

    def update_norms(self) -> Tensor:
        """Like `clip_factors`: norms of the weighted averages, before the clip."""
        return self._table([(landing.index, landing.norm) for landing in self._landings])

    def seconds(self) -> dict[str, float]:
        """Durations for `sync.jsonl`."""
        total = self.ended - self.began
        exchange = sum(landing.exchange_seconds for landing in self._landings)
        return {
            "wait": self.waited,
            "exchange": exchange,
            "outer": max(0.0, self.exposed - self.waited - exchange),
            "exposed": self.exposed,
            "total": total,
        }

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
