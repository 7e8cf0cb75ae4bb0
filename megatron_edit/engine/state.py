"""Run-long state of the engine, with and without an entry in checkpoints.

`RunState` owns all of it. State that is the same on all replicas is one immutable `RoundState`,
which `apply` replaces by that of a plan; the rest is this rank's own. Anchor and momentum belong to
the syncs (`sync/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine.host import EngineGroups, Progress, Reporter
from megatron_edit.engine.membership import Membership
from megatron_edit.engine.plan import MeetingOutcome, RoundPlan, RoundState
from megatron_edit.engine.saved import EngineState
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.saved_state import PendingSync, ReplicaEntry

# In a record, 8 MiB. A round of more steps reports the losses of its last ones.
MAX_LOSSES = 1 << 20


@dataclass
class StepLosses:
    """The loss of every step is exchanged: all replicas make the same steps.

    Attributes:
        steps: between two meetings.
    """

    steps: int
    last_step: int = 0
    _losses: list[float] = field(default_factory=list)
    _deferred_loss: tuple[int, float] | None = None

    @property
    def capacity(self) -> int:
        """The steps between two meetings, as far as a record may grow."""
        return min(self.steps, MAX_LOSSES)

    def note(self, step: int, loss: float) -> None:
        """Append the loss, also NaN, so that positions correspond to steps."""
        self._losses.append(loss)
        self.last_step = step

    def payload(self) -> tuple[float, ...]:
        """The losses since the last meeting, oldest first."""
        return tuple(self._losses)

    def mean(self) -> float:
        """Mean of the losses that are not NaN."""
        known = [loss for loss in self._losses if not math.isnan(loss)]
        return sum(known) / len(known) if known else math.nan

    def restore(
        self, payload: Sequence[float], last_step: int, *, is_waiting: bool = False
    ) -> None:
        """Restore losses that were stored step by step; a saved mean has no last step and is
        dropped. The loss of the step before a meeting belongs to the round after it."""
        losses = list(payload) if last_step else []
        if is_waiting and losses:
            self._deferred_loss, last_step = (last_step, losses.pop()), last_step - 1
        self._losses, self.last_step = losses, last_step

    def begin_phase(self) -> None:
        """Append the loss that `restore` has deferred to the round that begins now."""
        if self._deferred_loss is not None:
            (step, loss), self._deferred_loss = self._deferred_loss, None
            self.note(step, loss)

    def forget(self) -> float:
        """Drop all losses; return that of the last step."""
        last = self._losses[-1] if self._losses else math.nan
        self._losses.clear()
        return last

    def report(self, records: Sequence[ControlRecord], reporter: Reporter, samples: int) -> None:
        """Report the mean over the replicas of each step. A step's loss is known after its sync."""
        losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
        first = self.last_step - losses.shape[1] + 1
        reporter.on_losses(first, torch.nanmean(losses, dim=0).tolist())
        self._losses.clear()


@dataclass(frozen=True)
class _RoundLosses:
    """Losses by the round of their steps. The last one of a round is known after its meeting.

    Attributes:
        total, count: of the round in progress.
        is_ending: whether the next loss is the last one of the round before.
        step, samples: at which that round ended.
        ended_total, ended_count: of that round, which the next meeting reports.
    """

    total: float = 0.0
    count: float = 0
    is_ending: float = False
    step: float = 0
    samples: float = 0
    ended_total: float = 0.0
    ended_count: float = 0

    def with_loss(self, loss: float) -> _RoundLosses:
        """Return the losses with that of the next step."""
        known, loss = (0, 0.0) if math.isnan(loss) else (1, loss)
        if self.is_ending:
            total, count = self.ended_total + loss, self.ended_count + known
            return replace(self, is_ending=False, ended_total=total, ended_count=count)
        return replace(self, total=self.total + loss, count=self.count + known)


@dataclass
class MeanLoss:
    """One mean per round, weighted by steps: replicas make different numbers of steps."""

    last_step: int = 0
    _total: float = 0.0
    _count: int = 0
    _before: tuple[float, int] = (0.0, 0)  # sum and count without the last step
    _last: float = math.nan
    _deferred_loss: float | None = None
    _rounds: _RoundLosses = _RoundLosses()
    _rounds_before: _RoundLosses = _RoundLosses()  # without the last step

    @property
    def capacity(self) -> int:
        """Two: a sum and a count."""
        return 2

    def note(self, step: int, loss: float) -> None:
        """Add the loss to the mean. A NaN (fp16 skipped the step, or another rank knows the loss)
        does not count."""
        self._before, self._last = (self._total, self._count), loss
        self._rounds_before, self._rounds = self._rounds, self._rounds.with_loss(loss)
        if not math.isnan(loss):
            self._total += loss
            self._count += 1

    def payload(self) -> tuple[float, ...]:
        """The loss of the last step; sum and count of the losses since the last meeting without
        it; sum and count with it; the fields of `_RoundLosses` without it, and with it."""
        found = (self._last, *self._before, self._total, self._count)
        return tuple(map(float, (*found, *astuple(self._rounds_before), *astuple(self._rounds))))

    def mean(self) -> float:
        """Sum of the losses since the last meeting divided by their count."""
        return self._total / self._count if self._count else math.nan

    def restore(
        self, payload: Sequence[float], last_step: int, *, is_waiting: bool = False
    ) -> None:
        """Restore a `payload`, the sum and count of older versions, or the losses of a run with
        rounds of fixed length, which has one for each step. The loss of the step before a meeting
        belongs to the round after it."""
        if last_step:
            for loss in payload:
                self.note(last_step, loss)
        elif payload:
            self._restore(payload)
        if is_waiting and (last_step or len(payload) > 2):
            self._deferred_loss = self._last
            (self._total, self._count), self._rounds = self._before, self._rounds_before

    def _restore(self, payload: Sequence[float]) -> None:
        mean, rounds = payload[:5], payload[5:]
        self._total, self._count = mean[-2], int(mean[-1])
        if len(mean) > 2:
            self._last, self._before = mean[0], (mean[1], int(mean[2]))
        half = len(rounds) // 2  # none in older versions, which did not separate the rounds
        self._rounds_before = _RoundLosses(*rounds[:half] or self._before)
        self._rounds = _RoundLosses(*rounds[half:] or mean[-2:])

    def begin_phase(self) -> None:
        """Add the loss that `restore` has deferred to the round that begins now."""
        if self._deferred_loss is not None:
            loss, self._deferred_loss = self._deferred_loss, None
            self.note(0, loss)

    def forget(self) -> float:
        """Drop the losses since the last meeting; return that of the last step."""
        last, self._rounds = self._last, self._rounds_before
        self._clear()
        return last

    def report(self, records: Sequence[ControlRecord], reporter: Reporter, samples: int) -> None:
        """Report one mean over all steps of all replicas of the round before the one that ends at
        this meeting, at the step of replica 0."""
        total, count = (sum(column) for column in zip(*(r.losses for r in records), strict=True))
        ended = self._rounds
        if count:
            reporter.on_losses(int(ended.step), [total / count], int(ended.samples))
        self._rounds = _RoundLosses(
            0.0, 0, True, records[0].step, samples, ended.total, ended.count
        )
        self._clear()

    def _clear(self) -> None:
        self._total, self._count, self._before, self._last = 0.0, 0, (0.0, 0), math.nan


# Losses of this replica that the next control record reports.
type Losses = StepLosses | MeanLoss


def _timeout(settings: EngineSettings, groups: EngineGroups) -> AdaptiveTimeout:
    """The time-outs between replicas. Replicas together make the least steps of a timed round."""
    used, meetings = settings.used, settings.used.fragments
    is_fixed = used.timeout_seconds is not None
    found = AdaptiveTimeout((groups.sync, groups.meeting), is_fixed, meetings)
    if settings.is_timed:
        found.timed_seconds = meetings * settings.round_seconds
        found.timed_steps = meetings * settings.min_round_steps / groups.sync.size
    elif settings.assigns_blocks:
        found.timed_steps = used.sync_interval
    return found


@dataclass
class RunState:
    """Run-long state of one rank.

    Attributes:
        rounds: state that is the same on all replicas.
        losses: not reported yet.
        timeout: longest wait for other replicas.
        timer: requests meetings where replicas run at their own speeds; else None.
        step: s, attempted optimizer steps so far.
        launch_steps: those of them that were made in this launch.
        round_start: this replica's step after which the round began.
        records: of the last meeting, by replica.
        accepted: bool [N, U], which replicas the last sync of a unit accepted.
        assignment_epoch: number of assignments so far; data prefetched under an earlier one is
            invalid.
        has_replica_stopped: whether a meeting was the last one, because a replica stopped.
        is_stopping: whether this replica must stop here, because a replica stops.
        is_waiting: whether it reached a meeting without a sync, because another replica stopped.
        suppressed_until_step: see `EngineState`.
        last_local_step: the step after which the final synchronous phase began; None before.
    """

    rounds: RoundState
    losses: Losses
    clock: PhaseClock
    timeout: AdaptiveTimeout
    timer: TimeTrigger | None = None
    step: int = 0
    launch_steps: int = 0
    round_start: int = 0
    records: Sequence[ControlRecord] = ()
    accepted: Tensor = field(init=False)
    assignment_epoch: int = 0
    has_replica_stopped: bool = False
    is_stopping: bool = False
    is_waiting: bool = False
    suppressed_until_step: int = 0
    name: str = "0"
    last_local_step: int | None = None

    def __post_init__(self) -> None:
        self.accepted = torch.ones_like(self.rounds.unit_steps, dtype=torch.bool)

    @classmethod
    def fresh(
        cls,
        settings: EngineSettings,
        groups: EngineGroups,
        num_units: int,
        clock: PhaseClock,
        membership: Membership | None = None,
    ) -> RunState:
        """The state before the first step.

        Args:
            groups: whose time-outs adapt to the rounds.
            num_units: U.
            membership: of a run with a hub; else None.
        """
        replicas, assigns_blocks = groups.sync.size, settings.assigns_blocks
        has_step_losses = not assigns_blocks and settings.schedule.has_fixed_rounds
        assignment = BlockAssignment(replicas, settings.target_blocks) if assigns_blocks else None
        members = () if membership is None else membership.members
        return cls(
            rounds=RoundState.fresh(replicas, num_units, assignment, members),
            losses=StepLosses(settings.used.sync_interval) if has_step_losses else MeanLoss(),
            clock=clock,
            timeout=_timeout(settings, groups),
            timer=TimeTrigger(settings.round_seconds, clock) if assigns_blocks else None,
            name=str(groups.sync.rank) if membership is None else membership.name,
        )

    def block(self, step: int) -> int | None:
        """The block that this replica consumes in a step of the round, from 0; None where none is
        left for it, or none was assigned to it."""
        rounds = self.rounds
        assert rounds.assignment is not None, "rounds without assigned blocks"
        if self.name not in rounds.assigned_to:
            return None
        return rounds.assignment.block(rounds.assigned_to.index(self.name), step)

    @property
    def makes_no_exchange(self) -> bool:
        """Whether no exchange can be in flight: outside of the steps of training, as in a save."""
        return self.is_stopping or not self.timeout.is_in_steps

    @property
    def inner_steps(self) -> int:
        """Steps of this replica in the current round."""
        return self.step - self.round_start

    @property
    def replicas_identical(self) -> bool:
        """Whether all replicas are identical: no step was made since a sync of all units."""
        return self.step == self.round_start and self.rounds.replicas_identical

    def begin_rounds(self, round_length: int) -> None:
        """Begin the first round, after the anchor was taken."""
        self.round_start = self.step
        self.records = ()  # those of evaluations in warm-up belong to no round
        self.rounds = replace(self.rounds, length=round_length)

    def use(self, settings: EngineSettings) -> None:
        """Use chosen settings from the next round on.

        Args:
            settings: of the engine, with the choice.
        """
        length = 0 if settings.assigns_blocks else settings.used.sync_interval
        self.rounds = replace(
            self.rounds, choice=settings.choice, length=length, exposed=(), leaves_prediction=False
        )
        self.timeout.meetings = settings.used.fragments
        if self.timer is not None:
            self.timer.length = settings.round_seconds
        if settings.is_timed:
            self.timeout.timed_seconds = settings.used.sync_seconds
        elif settings.assigns_blocks:
            self.timeout.timed_steps = settings.used.sync_interval
        if isinstance(self.losses, StepLosses):
            self.losses.steps = length

    def assign_blocks(self, assignment: BlockAssignment, first_block: int = 0) -> None:
        """Replace the assignment of blocks, where replicas run at their own speeds.

        Args:
            first_block: see `RoundState`.
        """
        self.rounds = replace(self.rounds, assignment=assignment, first_block=first_block)
        self.assignment_epoch += 1
        self.round_start = self.step

    def count_from(self, step: int) -> None:
        """Count the steps from `step` on, the same on all replicas, where the rounds have ended."""
        self.step = self.round_start = step

    def record(self, progress: Progress, **rest: Any) -> ControlRecord:
        """The control record of this replica now.

        Args:
            rest: fields of the record that are not in this state.
        """
        return ControlRecord(
            round=self.rounds.count,
            step=self.step,
            inner_steps=self.inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            # A resumed round may have been longer than a record has room for.
            losses=self.losses.payload()[-self.losses.capacity :],
            inner_lr=progress.inner_lr,
            next_lr=progress.next_lr,
            **rest,
        )

    def join(self, rounds: RoundState, step: int) -> None:
        """Take the state of the rounds from other replicas; this one has made no step in them."""
        self.rounds, self.step = rounds, max(self.step, step)
        self.round_start = self.step
        self.assignment_epoch += 1
        self.accepted = torch.ones_like(rounds.unit_steps, dtype=torch.bool)

    def note_meeting(self, records: Sequence[ControlRecord]) -> bool:
        """Store the records of a meeting without a sync; return whether no replica stops."""
        self.records = records
        self.has_replica_stopped = any(record.is_stopping for record in records)
        return not self.has_replica_stopped

    def apply(self, plan: RoundPlan, reporter: Reporter, samples: int) -> None:
        """Apply the plan of a meeting. Only here and in `take` a plan changes run-long state.

        Args:
            reporter: receives the losses in its records.
            samples: consumed by all replicas so far.
        """
        self.take(plan)
        self.has_replica_stopped = plan.outcome is MeetingOutcome.STOP
        if plan.outcome is MeetingOutcome.SYNC:
            self.round_start = self.step
            self.assignment_epoch += plan.is_assigned
            self.losses.report(plan.records, reporter, samples)

    def take(self, plan: RoundPlan) -> None:
        """Take the state that all replicas share after a plan; with a hub that of the commit, which
        may be of fewer replicas than the one that the round has begun with."""
        self.rounds, self.records = plan.after, plan.records
        if plan.decision is not None:
            if len(self.accepted) != len(plan.records):
                self.accepted = torch.ones_like(plan.after.unit_steps, dtype=torch.bool)
            self.accepted[:, list(plan.units)] = ~plan.decision.verdict.anomalous

    def report_losses(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """Report the losses in the records of all replicas, of a meeting without a sync."""
        self.losses.report(records, reporter, sum(record.samples for record in records))

    def begin_phase(self) -> None:
        """Resume inner training after a meeting and its sync."""
        if self.timer is not None:
            self.timer.restart()
        else:
            self.clock.restart()
        self.losses.begin_phase()

    def replica_entry(
        self,
        progress: Progress,
        pending: Sequence[PendingSync],
        *,
        is_asking: bool,
        is_warmup: bool,
    ) -> ReplicaEntry:
        """The entry of this replica in a checkpoint's manifest.

        Args:
            pending: syncs that have not landed.
            is_asking: whether rank 0 of the replica has requested a meeting.
            is_warmup: whether gradients are averaged at every step.
        """
        return ReplicaEntry(
            step=self.step,
            inner_steps=0 if is_warmup else self.inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            losses=self.losses.payload(),
            last_loss_step=self.losses.last_step,
            phase_seconds=self.clock.seconds,
            last_step_seconds=0.0 if self.timer is None else self.timer.last,
            is_asking=is_asking,
            is_waiting=self.is_waiting,
            pending_schedule=progress.pending_schedule,
            round_length=self.rounds.length,
            pending=tuple(pending),
        )

    def load_state_dict(self, saved: EngineState) -> None:
        """Restore the state of a checkpoint that was written after the switch."""
        replica = saved.replica
        self.step, self.rounds = replica.step, saved.rounds
        self.round_start = replica.step - replica.inner_steps
        self.assignment_epoch += 1
        self.is_waiting = replica.is_waiting
        self.losses.restore(replica.losses, replica.last_loss_step, is_waiting=self.is_waiting)
        if self.timer is not None:
            self.timer.last = replica.last_step_seconds
        self.clock.set(replica.phase_seconds)
        self.suppressed_until_step = saved.suppressed_until_step
