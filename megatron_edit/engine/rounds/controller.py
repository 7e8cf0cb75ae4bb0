"""The rounds of this rank: come to meetings, apply their plans, land what they began.

    plan_step                                                   (before the optimizer step)
    meeting (records) -> plan_round (pure) -> check drift -> apply -> exchange -> land

One sync begins with each plan of a round. What lands when is the queue's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_edit.comm.control import check_same_digests
from megatron_edit.comm.stop import StopBoard
from megatron_edit.engine.checks.finite import zero_nonfinite_moments
from megatron_edit.engine.host import EngineGroups, EngineSettings, Host, Reporter
from megatron_edit.engine.rounds.meeting import Meetings, average_shared_values, size_of_record
from megatron_edit.engine.rounds.plan import (
    MeetingOutcome,
    RoundPlan,
    RoundRules,
    SyncRules,
    plan_round,
)
from megatron_edit.engine.rounds.trigger import SyncTrigger, trigger_of
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.inflight import InflightSync, SyncPlan
from megatron_edit.engine.sync.outer_state import replica_norms
from megatron_edit.engine.sync.queue import Footprint, SyncQueue
from megatron_edit.engine.sync.units import FragmentPlan, Selection


@dataclass(frozen=True)
class MeetingPlan:
    """A meeting that replicas come to.

    Attributes:
        selection: the units that sync.
        is_last: whether local training is over with it.
        ends_rounds: whether the final synchronous phase follows.
    """

    selection: Selection
    is_last: bool
    ends_rounds: bool = False


@dataclass(frozen=True)
class StepPlan:
    """What follows an optimizer step. Planned before the step, so that the host can obey it.

    Attributes:
        is_warmup: whether replicas train in step: there is no round.
        landing: syncs whose time has come with the step, oldest first.
        meeting: of all replicas right after it; None where there is none.
        is_landing_due: whether the result of a sync replaces parameters right after it.
    """

    is_warmup: bool = False
    landing: tuple[InflightSync, ...] = ()
    meeting: MeetingPlan | None = None
    is_landing_due: bool = False


@dataclass
class SyncController:
    """Leads a rank through its rounds.

    Attributes:
        settings: of the engine.
        host: the training framework.
        groups: who communicates.
        reporter: learns of losses and of broken replicas.
        state: of the run.
        trigger: says when the replicas meet.
        meetings: how they do.
        queue: the syncs that are under way.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    reporter: Reporter
    state: RunState
    trigger: SyncTrigger
    meetings: Meetings
    queue: SyncQueue
    _rules: RoundRules = field(init=False)
    _fragments: FragmentPlan = field(init=False)

    @classmethod
    def build(
        cls,
        settings: EngineSettings,
        host: Host,
        groups: EngineGroups,
        reporter: Reporter,
        state: RunState,
        board: StopBoard,
    ) -> SyncController:
        """Everything that leads a rank through its rounds.

        Collective: the ranks of the replica.

        Args:
            settings: of the engine.
            host: the training framework.
            groups: who communicates.
            reporter: learns of losses and of syncs.
            state: of the run.
            board: where stops are announced and seen.
        """
        has_digests = not settings.landing.is_immediate
        nbytes = size_of_record(host, state, has_digests=has_digests)
        footprint = Footprint.measure(groups, host.plan, settings, nbytes)
        queue = SyncQueue(host, groups, settings, reporter, state, footprint)
        meetings = Meetings(
            host,
            groups,
            board,
            state,
            same_step=settings.timed is None,
            has_digests=has_digests,
            poll_exchanges=queue.poll_if_busy,
        )
        trigger = trigger_of(settings, host, groups.sync.rank, state)
        return cls(settings, host, groups, reporter, state, trigger, meetings, queue)

    def __post_init__(self) -> None:
        settings = self.settings
        min_steps = 0.0 if settings.timed is None else settings.timed.min_steps
        self._rules = RoundRules(
            settings.penalty, settings.landing, settings.schedule, min_steps, settings.moments
        )
        self._fragments = FragmentPlan.of(self.host.plan, settings.schedule.fragments)

    # ---- meetings

    def plan_step(self, *, is_asked: bool) -> StepPlan:
        """What follows the step being attempted, one of a round.

        Args:
            is_asked: whether rank 0 of the replica asked for a meeting after the step before.
        """
        step = self.state.step + 1
        landing = tuple(self.queue.due(step))
        if not self.trigger.is_due(step, is_asked=is_asked):
            return StepPlan(landing=landing, is_landing_due=bool(landing))
        meeting, rule = self.plan_meeting(step), self.settings.landing
        is_landing_due = (
            bool(landing)
            or rule.is_immediate
            or rule.at_next_meeting
            or meeting.is_last
            or bool(self.queue.of_units(meeting.selection))
        )
        return StepPlan(landing=landing, meeting=meeting, is_landing_due=is_landing_due)

    def plan_meeting(self, step: int) -> MeetingPlan:
        """The meeting after step `step`."""
        selection = self._fragments.union(self.trigger.fragments_after(step))
        return MeetingPlan(selection, self.trigger.is_last, self.trigger.ends_rounds)

    def meet(self, meeting: MeetingPlan) -> bool:
        """Come to a meeting and do what it decides; to the next at once, where nothing is left.

        Returns:
            Whether nobody obeys a stop there.
        """
        while True:
            before = self.queue.of_units(meeting.selection)
            takes_addends_first = self.settings.landing.at_next_meeting
            if not takes_addends_first:
                self._land_all(before)
            sync = self._hold_sync_meeting(meeting)
            if sync is None:
                return not self.state.has_left
            if takes_addends_first:
                self._land_all(before)
                if not before:
                    # The first meeting of these units: there is no earlier result to land. The next
                    # round begins from the anchor all the same, not from what this one has trained.
                    self.queue.restore_anchor(sync)
            self.state.timeout.after_round()
            self._start(sync)
            if not (self.trigger.has_empty_round or self._must_equalize):
                return True
            meeting = self.plan_meeting(self.state.step)

    def leave(self) -> None:
        """Tell the others, who may wait at a meeting, that this replica obeys a stop."""
        self.state.note_meeting(self.meetings.hold(is_leaving=True))

    def check_in(self) -> bool:
        """Meet without a sync; whether nobody obeys a stop."""
        return self.state.note_meeting(self.meetings.hold())

    def close(self) -> None:
        """Exchange the losses that no sync has carried; in vain where a replica has left."""
        if self.state.has_left:
            return
        # Not kept as `state.records`: a save after the end of training is to know the records of
        # the last meeting in it.
        records = self.meetings.hold()
        self.state.has_left = any(record.is_leaving for record in records)
        if not self.state.has_left:
            self.state.losses.report(records, self.reporter)

    # ---- landings

    def land_due(self, syncs: Sequence[InflightSync]) -> None:
        """Land the syncs whose time has come; in the forward pass, if nothing comes before it."""
        for sync in syncs:
            self.queue.begin_landing(sync)
            self._land()

    # ---- one round

    def _hold_sync_meeting(self, meeting: MeetingPlan) -> InflightSync | None:
        """The sync that a meeting begins; None where it is none: the round goes on, or ends."""
        state, selection, began = self.state, meeting.selection, time.monotonic()
        assert state.outer is not None, "a meeting before the switch"
        groups, device = self.groups, self.groups.sync.device
        norms, loss = replica_norms(
            selection.plan, state.outer, groups.replica, device, state.losses.mean()
        )
        waiting = time.monotonic()
        by_unit = dict(zip(selection.indices, norms.tolist(), strict=True))
        records = self.meetings.hold(by_unit, round_loss=loss)
        waited = time.monotonic() - waiting
        plan = plan_round(
            state.rounds,
            records,
            selection.indices,
            self._rules,
            is_last=meeting.is_last,
        )
        if plan.outcome is MeetingOutcome.SYNC and self.meetings.has_digests:
            check_same_digests(records, self.host.plan.names, state.rounds.count)
        state.apply(plan, self.reporter)
        if plan.outcome is not MeetingOutcome.SYNC:
            return None
        self._apply_to_host(plan, selection)
        return self._sync_of(plan, selection, began, waited)

    def _apply_to_host(self, plan: RoundPlan, selection: Selection) -> None:
        """What a plan changes outside of the engine: schedules, counters, moments, buffers."""
        assert plan.decision is not None
        if plan.is_dealt:
            self.host.end_round(
                plan.samples, is_over=self.trigger.is_over, is_followed=plan.is_followed
            )
        elif plan.after.dealing is None:
            behind = plan.schedule_position - self.host.progress().schedule_position
            if behind:  # it skipped steps: it catches up with the learning rate of the others
                self.host.advance_schedule(behind)
        norms = plan.decision.norms[self.groups.sync.rank].tolist()
        for shard in selection.plan.shards:
            if not math.isfinite(norms[shard.index]):  # all have left this replica out of the unit
                zero_nonfinite_moments(self.host, shard, self.reporter)
        if rows := [record.buffers for record in plan.records if record.buffers]:
            accepted = ~plan.decision.verdict.anomalous
            average_shared_values(self.host, rows, accepted, plan.units)

    def _sync_of(
        self, plan: RoundPlan, selection: Selection, began: float, waited: float
    ) -> InflightSync:
        assert plan.decision is not None and self.state.outer is not None
        settings, landing, step = self.settings, plan.landing, self.state.step
        sync_plan = SyncPlan(
            round=plan.after.count,
            step=step,
            due=None if landing.at_next_meeting else step + landing.delay,
            selection=selection,
            decision=plan.decision,
            rules=SyncRules(settings.outer, settings.max_norm, landing, plan.inner_lr),
            inner_steps=tuple(record.inner_steps for record in plan.records),
            samples=tuple(record.samples for record in plan.records),
            moments=plan.moments,
        )
        sync = InflightSync(
            sync_plan,
            self.state.outer,
            self.groups,
            settings.wire,
            depth=settings.depth,
            began=began,
            waited=waited,
            host=self.host,
        )
        if not settings.landing.is_immediate:
            # The addends are of the parameters whose norms were gathered. That holds for the last
            # sync of training, too, which lands at once: with CO2 the sync before it lands first,
            # and changes the parameters.
            self.queue.prepare(sync)
        return sync

    def _start(self, sync: InflightSync) -> None:
        """A sync begins."""
        if not sync.plan.rules.landing.is_immediate:
            self.queue.add(sync)
            sync.exposed = time.monotonic() - sync.began
            return
        # Set twice: where a unit is not finite on this replica, `begin_landing` lands and reports
        # the sync itself, and its report must have the time until then.
        sync.exposed = time.monotonic() - sync.began
        self.queue.begin_landing(sync)
        sync.exposed = time.monotonic() - sync.began
        self._land()

    @property
    def _must_equalize(self) -> bool:
        """Whether training is over, and the replicas do not hold the same yet."""
        return self.trigger.is_over and not self.state.rounds.replicas_identical

    def _land(self) -> None:
        """Land what lands now; in the forward pass, if nothing comes before it."""
        is_later = self.settings.overlap and self.host.lands_in_forward
        if not is_later or self.trigger.has_empty_round or self._must_equalize:
            self.queue.settle()

    def _land_all(self, syncs: Sequence[InflightSync]) -> None:
        for sync in syncs:
            self.queue.begin_landing(sync)
            self.queue.settle()
