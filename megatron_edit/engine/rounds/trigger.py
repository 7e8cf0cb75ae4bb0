"""When replicas meet: after a number of steps (EDiT), or by the clock (A-EDiT).

Triggers have no state of their own: they read and change `RunState`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_edit.engine.host import Host
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.engine.units import FragmentPlan, Selection
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.schedule import Schedule


@dataclass(frozen=True)
class MeetingPlan:
    """A meeting of the replicas.

    Attributes:
        selection: the units that sync.
        is_last: whether all units sync and land at once, as where local training ends with it.
        chooses_again: whether the settings of the rounds are chosen again after its sync.
    """

    selection: Selection
    is_last: bool
    chooses_again: bool = False


def first_block_of(host: Host) -> int:
    """Blocks of the training before block 0 of the ledger, which begins anew where a run resumes
    with other replicas."""
    start = host.samples_of(0)
    return start // (host.samples_of(1) - start)


class SyncTrigger(Protocol):
    """Decides when this replica meets the others, alike on all its ranks."""

    def begin_warmup(self) -> None:
        """Begin or resume the warm-up after the last step."""

    def begin_rounds(self) -> None:
        """Begin local training, after the anchor was taken."""

    def meeting_after(self, step: int, *, is_requested: bool) -> MeetingPlan | None:
        """The meeting right after step `step`, the one being attempted; None if there is none.

        Args:
            step: s, from 1.
            is_requested: whether rank 0 of the replica requested it after the step before.
        """

    def next_meeting(self) -> MeetingPlan:
        """The meeting after the last step, without another step in between."""

    @property
    def has_empty_round(self) -> bool:
        """Whether this replica makes no step in the round that begins."""

    @property
    def is_over(self) -> bool:
        """Whether all assigned samples have been consumed: no replica makes another local step."""

    @property
    def ends_rounds(self) -> bool:
        """Whether the final synchronous phase follows the meeting that has just been held."""


@dataclass(frozen=True)
class StepTrigger:
    """Every tau steps (EDiT).

    Attributes:
        schedule: warm-up and interval.
        fragments: units by fragment.
        host: tells which step is the last.
    """

    schedule: Schedule
    fragments: FragmentPlan
    host: Host
    state: RunState

    def begin_warmup(self) -> None:
        """Do nothing: samples are consumed in Megatron's own order."""

    def begin_rounds(self) -> None:
        """Do nothing: the schedules of the replicas are at the same position."""

    def meeting_after(self, step: int, *, is_requested: bool) -> MeetingPlan | None:
        """A meeting of the fragments that are due after `step`, without a request; of all fragments
        at the end of local training, so that no partial round is lost, and where the settings are
        chosen again."""
        progress, state = self.host.progress(), self.state
        is_last = progress.is_last_step or progress.begins_final_phase
        due: Sequence[int] = range(self.schedule.fragments)
        if not is_last:
            due = self.schedule.fragments_after(step, state.round_start, state.rounds.length)
        if not due:
            return None
        chooses_again = state.rounds.leaves_prediction and not is_last
        if chooses_again:
            due, is_last = range(self.schedule.fragments), True
        units = self.fragments.union(due)
        return MeetingPlan(units, is_last, chooses_again)

    def next_meeting(self) -> MeetingPlan:
        """The meeting that was due after the last step, for a replica that resumes at it."""
        meeting = self.meeting_after(self.state.step, is_requested=False)
        assert meeting is not None, f"no meeting after step {self.state.step}"
        return meeting

    @property
    def has_empty_round(self) -> bool:
        """False: every replica makes all steps of a round."""
        return False

    @property
    def is_over(self) -> bool:
        """False: the meeting after the last step syncs all units, and no other one follows."""
        return False

    @property
    def ends_rounds(self) -> bool:
        """Whether the step before the meeting was the last local one, and a final phase follows."""
        return self.host.progress().begins_final_phase


@dataclass(frozen=True)
class ClockTrigger:
    """Rounds of assigned blocks: every tau_time seconds, each replica after as many steps as it has
    made by then (A-EDiT), or every tau steps, in a run with a hub.

    Without a hub only the blocks before a final synchronous phase are assigned.

    Attributes:
        fragments: units by fragment.
        settings: when a round ends, and how many blocks of samples there are.
        state: of the run; it has the data ledger.
    """

    fragments: FragmentPlan
    settings: EngineSettings
    host: Host
    state: RunState

    @property
    def assignment(self) -> BlockAssignment:
        """The assignment of blocks to replicas in the current round."""
        assignment = self.state.rounds.assignment
        assert assignment is not None, "replicas at their own speeds without a ledger"
        return assignment

    def begin_warmup(self) -> None:
        """Assign the remaining blocks: in steps that all made together every replica consumed one.
        A run that loads more steps than its target is over."""
        replicas, first = self.assignment.num_replicas, first_block_of(self.host)
        consumed = self.state.step * (self.settings.used.nominal_replicas or replicas) - first
        target = max(self.settings.target_blocks - first, consumed)
        self.state.assign_blocks(BlockAssignment(replicas, target, consumed), first)

    def begin_rounds(self) -> None:
        """Assign the blocks that remain after warm-up, and begin local training on the host."""
        self.begin_warmup()
        self.host.begin_local(is_over=self.assignment.is_over)

    def meeting_after(self, step: int, *, is_requested: bool) -> MeetingPlan | None:
        """A meeting if the clock requests it, the steps of the round are made, or no block is left
        for another step. In the final round each replica consumes all its blocks (method 5): the
        clock does not end it."""
        steps = self.state.inner_steps + 1
        is_due = is_requested and self.settings.is_timed and not self.assignment.is_final
        if is_due or steps >= self._most_steps or self.state.block(steps) is None:
            return self.next_meeting()
        return None

    def next_meeting(self) -> MeetingPlan:
        """Meeting j = 1, 2, ... syncs fragment j mod F, the last meeting all fragments."""
        is_last = self.assignment.is_final or self.assignment.is_over or self._is_synchronous
        num_fragments = len(self.fragments.selections)
        due = (self.state.rounds.count + 1) % num_fragments
        return MeetingPlan(
            self.fragments.union(range(num_fragments) if is_last else [due]), is_last
        )

    @property
    def _is_synchronous(self) -> bool:
        return self.state.rounds.is_synchronous(self.settings)

    @property
    def _most_steps(self) -> float:
        """Steps after which the round ends: where they are counted, those of F rounds are tau, as
        in `StepSchedule.fragments_after`. With a hub none goes on in the final phase."""
        settings, most = self.settings, math.inf
        if self._is_synchronous:
            return 1
        if not settings.is_timed:
            used, count = settings.used, self.state.rounds.count
            first, most = (k * used.sync_interval // used.fragments for k in (count, count + 1))
            most -= first
        if settings.local_blocks < settings.target_blocks:
            left = settings.local_blocks - self.state.rounds.num_consumed
            most = min(most, -(-left // self.assignment.num_replicas))
        return most

    @property
    def has_empty_round(self) -> bool:
        """Whether no block is assigned to it: a very slow replica gets none in a final round."""
        return not self.is_over and self.state.block(0) is None

    @property
    def is_over(self) -> bool:
        """Whether every block of the rounds has been consumed."""
        return self.assignment.is_over

    @property
    def ends_rounds(self) -> bool:
        """Whether every block before the final phase has been consumed."""
        return self.settings.has_final_phase and self.is_over


def create_trigger(settings: EngineSettings, host: Host, state: RunState) -> SyncTrigger:
    """Create the trigger that decides when replicas meet.

    Raises:
        UsageError: there are more fragments than units.
    """
    fragments = FragmentPlan.of(host.plan, settings.used.fragments)
    if settings.assigns_blocks:
        return ClockTrigger(fragments, settings, host, state)
    return StepTrigger(settings.schedule, fragments, host, state)
