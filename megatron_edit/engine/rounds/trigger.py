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
from megatron_edit.method.ledger import Dealing
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

    def fragments_after(self, step: int) -> Sequence[int]:
        """The fragments that sync at a meeting after step `step`."""

    @property
    def is_last(self) -> bool:
        """Whether local training is over with the meeting that this replica comes to next, or is
        at."""

    @property
    def ends_rounds(self) -> bool:
        """Whether the final synchronous phase follows that meeting."""

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether a meeting follows step `step`, the one being attempted; not in warm-up.

        Args:
            step: s, from 1.
            is_asked: whether rank 0 of the replica asked for it after the step before.
        """

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
        host: says which step is the last.
        state: of the run.
    """

    schedule: Schedule
    host: Host
    state: RunState

    def begin_warmup(self) -> None:
        """Do nothing: data come in Megatron's own order."""

    def begin_rounds(self) -> None:
        """Do nothing: replicas were in step so far, and so are their schedules."""

    def fragments_after(self, step: int) -> Sequence[int]:
        """Those whose turn it is; all of them at the end, so that no partial round is lost."""
        if self.is_last:
            return range(self.schedule.fragments)
        return self.schedule.fragments_after(step, self.state.round_start, self.state.rounds.length)

    @property
    def is_last(self) -> bool:
        """Whether local training ends with the step being attempted."""
        progress = self.host.progress()
        return progress.is_last_step or progress.begins_final_phase

    @property
    def ends_rounds(self) -> bool:
        """Whether the step being attempted is the last before the final synchronous phase."""
        return self.host.progress().begins_final_phase

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether a fragment's turn comes after step `step`; nobody has to ask for it."""
        return bool(self.fragments_after(step))

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

    Attributes:
        replica: r.
        fragments: F.
        target: blocks of samples to consume, one per step of a replica.
        host: learns where training stands.
        state: of the run; it has the data ledger.
    """

    replica: int
    fragments: int
    target: int
    host: Host
    state: RunState

    @property
    def dealing(self) -> Dealing:
        """Which blocks of samples the round that is under way deals to whom."""
        dealing = self.state.rounds.dealing
        assert dealing is not None, "replicas at their own speeds without a ledger"
        return dealing

    def begin_warmup(self) -> None:
        """Deal the blocks of samples that are left: in warm-up every replica consumed one at each
        step. A run that loads more steps than it is to make is over."""
        replicas = self.dealing.num_replicas
        consumed = self.state.step * replicas
        self.state.deal(Dealing(replicas, max(self.target, consumed), consumed))

    def begin_rounds(self) -> None:
        """Deal the blocks that warm-up has left; the host goes on at its own speed."""
        self.begin_warmup()
        self.host.begin_local(is_over=self.dealing.is_over)

    def fragments_after(self, step: int) -> Sequence[int]:
        """In turn: meetings j = 1, 2, ... are for the fragments j mod F, the last one for all."""
        if self.is_last:
            return range(self.fragments)
        return [(self.state.rounds.count + 1) % self.fragments]

    @property
    def is_last(self) -> bool:
        """Whether the round under way is the final one, or every block has been consumed."""
        return self.dealing.is_final or self.dealing.is_over

    @property
    def ends_rounds(self) -> bool:
        """False: a final synchronous phase is refused where replicas run at their own speeds."""
        return False

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether the clock says so, or no block is left for another step. In the final round each
        replica makes the run that it was given (method 5): no clock cuts it."""
        is_cut = is_asked and not self.dealing.is_final
        return is_cut or self.dealing.is_exhausted(self.replica, self.state.inner_steps + 1)

    @property
    def has_empty_round(self) -> bool:
        """Whether the ledger has no block for it: a final round gives none to a very slow one."""
        return not self.is_over and self.dealing.is_exhausted(self.replica, 0)

    @property
    def is_over(self) -> bool:
        """Whether every block of the training has been consumed."""
        return self.dealing.is_over


def plan_meeting(trigger: SyncTrigger, fragments: FragmentPlan, step: int) -> MeetingPlan:
    """The meeting after step `step`, s from 1."""
    selection = fragments.union(trigger.fragments_after(step))
    return MeetingPlan(selection, trigger.is_last, trigger.ends_rounds)


def trigger_of(settings: EngineSettings, host: Host, replica: int, state: RunState) -> SyncTrigger:
    """What decides when replicas meet.

    Args:
        settings: of the engine.
        host: says and learns where training stands.
        replica: r.
        state: of the run.
    """
    if (timed := settings.timed) is None:
        return StepTrigger(settings.schedule, host, state)
    return ClockTrigger(replica, settings.schedule.fragments, timed.target, host, state)
