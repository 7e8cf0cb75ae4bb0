"""When replicas meet: after a count of steps (EDiT), or when the clock says so (A-EDiT).

Triggers keep nothing themselves: what they ask, and change, is in `RunState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_edit.engine.host import EngineSettings, Host
from megatron_edit.engine.state import RunState
from megatron_edit.engine.units import FragmentPlan, Selection
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.schedule import Schedule


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


class SyncTrigger(Protocol):
    """Decides when this replica meets the others. All ranks of a replica answer alike."""

    def begin_warmup(self) -> None:
        """Warm-up goes on after the last step."""

    def begin_rounds(self) -> None:
        """The anchor was taken after the last step: each replica trains alone from here on."""

    def meeting_after(self, step: int, *, is_asked: bool) -> MeetingPlan | None:
        """The meeting right after step `step`, the one being attempted; None where there is none.

        Args:
            step: s, from 1.
            is_asked: whether rank 0 of the replica asked for it after the step before.
        """

    def next_meeting(self) -> MeetingPlan:
        """The meeting that follows after the last step, without another one."""

    @property
    def has_empty_round(self) -> bool:
        """Whether this replica has nothing to do in the round that begins."""

    @property
    def is_over(self) -> bool:
        """Whether all has been consumed: nobody makes another step."""


@dataclass(frozen=True)
class StepTrigger:
    """Every tau steps (EDiT).

    Attributes:
        schedule: warm-up and interval.
        fragments: units by fragment.
        host: says which step is the last.
        state: of the run.
    """

    schedule: Schedule
    fragments: FragmentPlan
    host: Host
    state: RunState

    def begin_warmup(self) -> None:
        """Do nothing: data come in Megatron's own order."""

    def begin_rounds(self) -> None:
        """Do nothing: replicas were in step so far, and so are their schedules."""

    def meeting_after(self, step: int, *, is_asked: bool) -> MeetingPlan | None:
        """Where the turn of a fragment comes, nobody has to ask for it; of all fragments at the
        end of local training, so that no partial round is lost."""
        progress, state = self.host.progress(), self.state
        is_last = progress.is_last_step or progress.begins_final_phase
        due: Sequence[int] = range(self.schedule.fragments)
        if not is_last:
            due = self.schedule.fragments_after(step, state.round_start, state.rounds.length)
        if not due:
            return None
        return MeetingPlan(self.fragments.union(due), is_last, progress.begins_final_phase)

    def next_meeting(self) -> MeetingPlan:
        """The meeting that was due after the last step, for a replica that goes back to it."""
        meeting = self.meeting_after(self.state.step, is_asked=False)
        assert meeting is not None, f"no meeting after step {self.state.step}"
        return meeting

    @property
    def has_empty_round(self) -> bool:
        """False: every replica makes all steps of a round."""
        return False

    @property
    def is_over(self) -> bool:
        """False: the meeting after the last step syncs all units at once, and no other follows."""
        return False


@dataclass(frozen=True)
class ClockTrigger:
    """Every tau_time seconds, each replica after as many steps as it has made by then (A-EDiT).

    A final synchronous phase is refused where replicas run at their own speeds.

    Attributes:
        replica: r.
        fragments: units by fragment.
        target: blocks of samples to consume, one per step of a replica.
        host: learns where training stands.
        state: of the run; it has the data ledger.
    """

    replica: int
    fragments: FragmentPlan
    target: int
    host: Host
    state: RunState

    @property
    def assignment(self) -> BlockAssignment:
        """Which blocks of samples the round that is under way deals to whom."""
        assignment = self.state.rounds.assignment
        assert assignment is not None, "replicas at their own speeds without a ledger"
        return assignment

    def begin_warmup(self) -> None:
        """Deal the blocks of samples that are left: in warm-up every replica consumed one at each
        step. A run that loads more steps than it is to make is over."""
        replicas = self.assignment.num_replicas
        consumed = self.state.step * replicas
        self.state.assign_blocks(BlockAssignment(replicas, max(self.target, consumed), consumed))

    def begin_rounds(self) -> None:
        """Deal the blocks that warm-up has left; the host goes on at its own speed."""
        self.begin_warmup()
        self.host.begin_local(is_over=self.assignment.is_over)

    def meeting_after(self, step: int, *, is_asked: bool) -> MeetingPlan | None:
        """Where the clock says so, or no block is left for another step. In the final round each
        replica makes the run that it was given (method 5): no clock cuts it."""
        is_cut = is_asked and not self.assignment.is_final
        if is_cut or self.assignment.is_exhausted(self.replica, self.state.inner_steps + 1):
            return self.next_meeting()
        return None

    def next_meeting(self) -> MeetingPlan:
        """Meetings j = 1, 2, ... are for the fragments j mod F in turn, the last one for all."""
        is_last = self.assignment.is_final or self.assignment.is_over
        num_fragments = len(self.fragments.selections)
        due = (self.state.rounds.count + 1) % num_fragments
        return MeetingPlan(
            self.fragments.union(range(num_fragments) if is_last else [due]), is_last
        )

    @property
    def has_empty_round(self) -> bool:
        """Whether the ledger has no block for it: a final round gives none to a very slow one."""
        return not self.is_over and self.assignment.is_exhausted(self.replica, 0)

    @property
    def is_over(self) -> bool:
        """Whether every block of the training has been consumed."""
        return self.assignment.is_over


def trigger_of(settings: EngineSettings, host: Host, replica: int, state: RunState) -> SyncTrigger:
    """What decides when replicas meet.

    Args:
        settings: of the engine.
        host: says and learns where training stands.
        replica: r.
        state: of the run.

    Raises:
        UsageError: there are more fragments than units.
    """
    fragments = FragmentPlan.of(host.plan, settings.schedule.fragments)
    if (timed := settings.timed) is None:
        return StepTrigger(settings.schedule, fragments, host, state)
    return ClockTrigger(replica, fragments, timed.target, host, state)
