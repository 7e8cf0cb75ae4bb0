"""The rounds of local training: from the switch on, this replica's part in every sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_edit.engine.buffers import average
from megatron_edit.engine.decisions import decide
from megatron_edit.engine.equal import heal_moments
from megatron_edit.engine.flight import sum_in_rank_order
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.meeting import Meetings
from megatron_edit.engine.pace import Outcome, Pace
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import OuterState
from megatron_edit.engine.sync import SyncRun, partial_squares
from megatron_edit.method.detector import DetectorState
from megatron_edit.replica.control import ControlRecord


@dataclass
class Rounds:
    """What a rank knows of the rounds.

    Attributes:
        pace: when the replicas meet.
        meetings: how they do.
        count: syncs so far.
        start: the step after which the round began.
        state: anchor and momentum; None before the switch.
        detectors: of all replicas and units; the same on every rank.
        has_left: whether a meeting was the last one, because a replica obeyed a stop.
        last_records: of the last meeting, by replica.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    reporter: Reporter
    pace: Pace
    meetings: Meetings
    count: int = 0
    start: int = 0
    state: OuterState | None = None
    detectors: DetectorState = field(init=False)
    has_left: bool = False
    last_records: Sequence[ControlRecord] = ()

    def __post_init__(self) -> None:
        self.detectors = DetectorState.fresh(self.groups.sync.size, len(self.host.plan.names))

    def begin(self, step: int) -> None:
        """Take the anchor after step `step`: the replicas part."""
        self.state = OuterState.take(self.host.plan, self.groups.sync.device, self.settings.offload)
        self.host.attach_outer_state(self.state)
        self.start = step
        self.pace.begin(step)

    def meet(self, step: int) -> SyncRun | None:
        """Come to a meeting after step `step`.

        Returns:
            The sync that begins; None where the meeting is none: the round goes on, or a replica
            obeys a stop.
        """
        assert self.state is not None, "a meeting before the switch"
        began, plan = time.monotonic(), self.host.plan
        squares = partial_squares(plan, self.state, self.groups.sync.device)
        norms = sum_in_rank_order(self.groups.replica.all_gather(squares)).sqrt()
        arrived = time.monotonic()
        records = self._hold(step, norms.tolist())
        waited = time.monotonic() - arrived
        self.last_records = records
        self.has_left = any(record.is_leaving for record in records)
        if self.has_left or self.pace.after_meeting(records) is Outcome.EXTEND:
            return None
        return self._decide(self.state, records, step, began, waited)

    def leave(self, step: int) -> None:
        """Tell the others, who may wait at a meeting, that this replica obeys a stop."""
        self.last_records = self._hold(step, is_leaving=True)
        self.has_left = True

    def check_in(self, step: int) -> bool:
        """Meet without a sync; whether nobody obeys a stop."""
        self.last_records = self._hold(step)
        self.has_left = any(record.is_leaving for record in self.last_records)
        return not self.has_left

    def close(self, step: int) -> None:
        """Exchange the losses that no sync has carried; in vain where a replica has left."""
        if self.has_left:
            return
        records = self._hold(step)
        self.has_left = any(record.is_leaving for record in records)
        if not self.has_left:
            self.pace.losses.report(records, self.reporter)

    def _hold(
        self, step: int, norms: list[float] | None = None, *, is_leaving: bool = False
    ) -> list[ControlRecord]:
        return self.meetings.hold(
            round=self.count,
            step=step,
            inner_steps=step - self.start,
            norms=norms,
            is_leaving=is_leaving,
        )

    def _decide(
        self,
        state: OuterState,
        records: list[ControlRecord],
        step: int,
        began: float,
        waited: float,
    ) -> SyncRun:
        self.count, self.start = self.count + 1, step
        self.pace.losses.report(records, self.reporter)
        table = torch.tensor([record.norms for record in records], dtype=torch.float64)
        steps = [record.inner_steps for record in records]
        decision, self.detectors = decide(table, self.detectors, self.settings.penalty, steps)
        heal_moments(self.host, decision, self.groups.sync.rank, self.reporter)
        average(self.host, records, decision)
        return SyncRun(
            round=self.count,
            step=step,
            plan=self.host.plan,
            state=state,
            groups=self.groups,
            decision=decision,
            records=records,
            rule=self.settings.rule,
            depth=self.settings.prefetch_units if self.settings.overlap else 1,
            began=began,
            waited=waited,
        )
