"""Rounds of a run without a hub: the replicas are those of the start, and all meet at each round.

Each kind of round is one function: what it does between the decision of its meeting and the next
step. `_kind_of` chooses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_edit.comm.control import check_same_digests
from megatron_edit.engine.plan import MeetingOutcome, RoundPlan, RoundState, SyncPlan, plan_round
from megatron_edit.engine.rounds.completion import Outcomes
from megatron_edit.engine.rounds.meeting import Meetings
from megatron_edit.engine.rounds.trigger import MeetingPlan
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.syncs import Sync


@dataclass(frozen=True)
class HeldMeeting:
    """A meeting that has decided on a sync.

    Attributes:
        plan: of the round.
        sync: plan of its sync.
        began: seconds on a monotonic clock.
        waited: seconds for the other replicas.
    """

    plan: RoundPlan
    sync: SyncPlan
    began: float
    waited: float


@dataclass
class FixedRounds:
    """Runs the meetings of a run without a hub on one rank; see `ElasticRounds`.

    Attributes:
        settings, state: of the engine.
        syncs: with anchor and momentum.
        meetings: makes and reads records.
        outcomes: applies plans of rounds.
        is_joining, is_ending: as of `ElasticRounds`, always False.
    """

    settings: EngineSettings
    state: RunState
    syncs: SyncManager
    meetings: Meetings
    outcomes: Outcomes
    is_joining = False
    is_ending = False

    def use(self, settings: EngineSettings, meetings: Meetings, outcomes: Outcomes) -> None:
        """Use other settings from the next round on."""
        self.settings, self.meetings, self.outcomes = settings, meetings, outcomes

    def begins_with(self, rounds: RoundState) -> RoundState:
        """The state of a checkpoint for the replicas of this run, which have numbers."""
        return rounds.numbered()

    def begin(self) -> None:
        """Do nothing: no other replica copies the state."""

    def join(self) -> None:
        """Do nothing: every replica has its own state."""

    def report_progress(self, batches: int) -> None:
        """Do nothing: the heartbeat has the progress."""

    def settle(self) -> None:
        """Do nothing: no round stays open after its meeting."""

    def leave(self, reason: str) -> None:
        """Release the replicas that wait at a meeting: this one stops on request.

        Collective: the sync group.
        """
        records = self.meetings.exchange_records(self.meetings.pack(is_stopping=True))
        self.state.note_meeting(records)

    def go_on(self) -> None:
        """Land the syncs that are due after a step.

        Collective: the ranks of the replica.
        """
        for sync in self.syncs.due(self.state.step):
            self.syncs.begin_landing(sync)
            self._land_unless_in_forward()

    def meet(self, meeting: MeetingPlan) -> bool:
        """Meet the other replicas, and sync, if the meeting decides so; return whether it does.

        Collective: all ranks of all replicas.
        """
        # At the next meeting: the results of the last one land after the addends of this one.
        if not self.settings.landing.at_next_meeting:
            self.syncs.land(self.syncs.of_units(meeting.selection))
        began = time.monotonic()
        plan, waited = self._plan_round(meeting)
        if plan.outcome is not MeetingOutcome.SYNC:
            self.state.apply(plan, self.outcomes.reporter, plan.samples)
            return False
        sync = self.outcomes.sync_plan(plan, meeting.selection, self.state.step)
        self._kind_of(plan)(HeldMeeting(plan, sync, began, waited))
        return True

    # ---- kinds of rounds

    def _kind_of(self, plan: RoundPlan) -> Callable[[HeldMeeting], None]:
        if not plan.landing.is_immediate:
            return self._at_next_meeting if plan.landing.at_next_meeting else self._delayed
        if self._lands_in_forward:
            return self._in_forward
        return self._checked if self.settings.checks_commit else self._blocking

    def _blocking(self, held: HeldMeeting) -> None:
        """The sync lands before the next step; an exchange that fails leaves the state of the
        rounds as it was."""
        self.syncs.start(self._prepare(held))
        self.syncs.land_all()
        self.outcomes.commit(held.plan)

    def _checked(self, held: HeldMeeting) -> None:
        """The same, after all replicas have compared what they will apply."""
        sync = self._prepare(held, checks_commit=True)
        self.syncs.start(sync)
        self.syncs.check_commit(sync, held.plan)
        self.syncs.land_all()
        self.outcomes.commit(held.plan)

    def _in_forward(self, held: HeldMeeting) -> None:
        """Each unit lands when the next forward pass needs it, in the round that has begun."""
        self.outcomes.commit(held.plan)
        self.syncs.start(self._prepare(held))
        self._land_unless_in_forward()

    def _delayed(self, held: HeldMeeting) -> None:
        """All units land after more steps of the round that begins; see `go_on`."""
        self.outcomes.commit(held.plan)
        self.syncs.start(self._prepare(held))

    def _at_next_meeting(self, held: HeldMeeting) -> None:
        """All units land at their next meeting. The round that begins goes on from the result of
        the last one, at the first meeting from the anchor: never from the parameters trained in
        the round that ends."""
        is_first = not self.syncs.of_units(held.sync.selection)
        self.outcomes.commit(held.plan)
        sync = self._prepare(held)
        if is_first:
            self.syncs.restore_anchor(sync)
        self.syncs.start(sync)

    # ---- steps of a round

    def _plan_round(self, meeting: MeetingPlan) -> tuple[RoundPlan, float]:
        """Exchange records and plan the round; return the plan and the seconds waited."""
        state, syncs, selection = self.state, self.syncs, meeting.selection
        norms, loss, exposed = syncs.norms(selection, state.losses.mean())
        waiting = time.monotonic()
        late = syncs.late_digests(selection)
        mine = self.meetings.pack(norms, late, round_loss=loss, exposed=exposed)
        records = self.meetings.exchange_records(mine)
        waited = time.monotonic() - waiting
        plan = plan_round(
            state.rounds, records, selection.indices, self.settings, is_last=meeting.is_last
        )
        if plan.outcome is MeetingOutcome.SYNC and self.meetings.has_digests:
            check_same_digests(records, self.meetings.host.plan.names, state.rounds.count)
        return plan, waited

    def _prepare(self, held: HeldMeeting, *, checks_commit: bool = False) -> Sync:
        """Take the addends, and then land what has waited for them; only `start` is left to do."""
        plan = held.sync
        sync = self.syncs.prepare(plan, held.began, held.waited, checks_commit=checks_commit)
        self.syncs.land(self.syncs.of_units(plan.selection))
        self.state.timeout.after_round()
        return sync

    @property
    def _lands_in_forward(self) -> bool:
        """Whether the next forward pass will land the units of a sync that lands now."""
        return self.settings.overlap and self.outcomes.host.lands_in_forward

    def _land_unless_in_forward(self) -> None:
        """Land the landing sync now, unless the next forward pass will: none may follow."""
        if not self._lands_in_forward or self.outcomes.meets_again:
            self.syncs.land_all()
