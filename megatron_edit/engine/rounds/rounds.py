"""The rounds of local training: from the switch on, this replica's part in every sync."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.checks import drift
from megatron_edit.engine.checks.equal import zero_nonfinite_moments_of_excluded
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.rounds.buffers import average
from megatron_edit.engine.rounds.meeting import Meetings
from megatron_edit.engine.rounds.plan import decide
from megatron_edit.engine.rounds.trigger import Outcome, SyncTrigger
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.fragments import FragmentPlan, Selection
from megatron_edit.engine.sync.inflight import InflightSync, partial_squares
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.unit_sync import Rules, sum_in_rank_order
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.landing import PLAIN


@dataclass
class Rounds:
    """What a rank knows of the rounds.

    Attributes:
        trigger: when the replicas meet.
        meetings: how they do.
        count: syncs so far.
        start: the step after which the round began.
        state: anchor and momentum; None before the switch.
        detectors: of all replicas and units; the same on every rank.
        unit_steps: int64 [N, U], steps of each replica since a unit's own last sync, as they were
            at the last meeting.
        replicas_identical: whether all replicas held the anchor in all units when the round began.
        has_left: whether a meeting was the last one, because a replica obeyed a stop.
        last_records: of the last meeting, by replica.
        digests: of units that have landed late, by position, until they meet again.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    reporter: Reporter
    trigger: SyncTrigger
    meetings: Meetings
    count: int = 0
    start: int = 0
    state: OuterState | None = None
    detectors: DetectorState = field(init=False)
    unit_steps: Tensor = field(init=False)
    replicas_identical: bool = True
    has_left: bool = False
    last_records: Sequence[ControlRecord] = ()
    digests: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        replicas, units = self.groups.sync.size, len(self.host.plan.names)
        self.detectors = DetectorState.fresh(replicas, units)
        self.unit_steps = torch.zeros(replicas, units, dtype=torch.int64)
        self._selections = FragmentPlan.of(self.host.plan, self.settings.schedule.fragments)

    def begin(self, step: int) -> None:
        """Take the anchor after step `step`: the replicas part."""
        self.state = self.new_state()
        self.host.attach_outer_state(self.state)
        self.start = step
        self.last_records = ()  # of evaluations in warm-up
        self.trigger.begin(step)

    def new_state(self) -> OuterState:
        """Outer state whose anchor is the parameters as they are now."""
        return OuterState.take(
            self.host.plan,
            self.groups.sync.device,
            offload=self.settings.offload,
            wire=self.settings.wire,
            num_replicas=self.groups.sync.size,
        )

    def selection(self, step: int) -> Selection:
        """The units that sync at a meeting after step `step`."""
        return self._selections.union(self.trigger.groups_after(step, self.count))

    def meet(self, step: int, selection: Selection) -> InflightSync | None:
        """Come to a meeting after step `step`.

        Returns:
            The sync that begins; None where the meeting is none: the round goes on, or a replica
            obeys a stop.
        """
        assert self.state is not None, "a meeting before the switch"
        began = time.monotonic()
        squares = partial_squares(selection.plan, self.state, self.groups.sync.device)
        norms = sum_in_rank_order(self.groups.replica.all_gather(squares)).sqrt().tolist()
        is_last = self.trigger.is_last
        waiting = time.monotonic()
        records = self._hold(step, dict(zip(selection.indices, norms, strict=True)))
        waited = time.monotonic() - waiting
        self.last_records = records
        self.has_left = any(record.is_leaving for record in records)
        if self.has_left or self.trigger.after_meeting(records) is Outcome.EXTEND:
            return None
        drift.check_records(records, self.host.plan.names, self.count)
        for index in selection.indices:
            self.digests.pop(index, None)
        return self._decide(selection, records, step, is_last=is_last, times=(began, waited))

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
            self.trigger.losses.report(records, self.reporter)

    def _hold(
        self, step: int, norms: Mapping[int, float] | None = None, *, is_leaving: bool = False
    ) -> list[ControlRecord]:
        landed = {i: self.digests[i] for i in norms or () if i in self.digests}
        return self.meetings.hold(
            round=self.count,
            step=step,
            inner_steps=step - self.start,
            norms=norms,
            digests=landed,
            is_leaving=is_leaving,
        )

    def _decide(
        self,
        selection: Selection,
        records: list[ControlRecord],
        step: int,
        *,
        is_last: bool,
        times: tuple[float, float],
    ) -> InflightSync:
        assert self.state is not None
        self.count, self.start = self.count + 1, step
        self.trigger.losses.report(records, self.reporter)
        units = list(selection.indices)
        self.unit_steps += torch.tensor([[record.inner_steps] for record in records])
        steps = self.unit_steps[:, units]
        self.unit_steps[:, units] = 0
        table = torch.tensor([record.norms for record in records], dtype=torch.float64)[:, units]
        decision, learned = decide(
            table, self.detectors.of_units(units), self.settings.penalty, steps
        )
        self.detectors = self.detectors.with_units(units, learned)
        zero_nonfinite_moments_of_excluded(
            self.host, selection.plan, decision, self.groups.sync.rank, self.reporter
        )
        average(self.host, records, decision, units)
        landing = PLAIN if is_last else self.settings.landing
        self.replicas_identical = selection.is_whole and landing.is_direct_copy
        late = None if landing.at_next_meeting else step + landing.delay
        run = InflightSync(
            round=self.count,
            step=step,
            due=late,
            selection=selection,
            state=self.state,
            groups=self.groups,
            decision=decision,
            records=records,
            rules=Rules(
                self.settings.outer,
                self.settings.max_norm,
                landing,
                max(record.inner_lr for record in records),
            ),
            wire=self.settings.wire,
            depth=self.settings.prefetch_units if self.settings.overlap else 1,
            began=times[0],
            waited=times[1],
        )
        if not self.settings.landing.is_immediate:  # also at the end: another may land before it
            run.take_off()
        return run
