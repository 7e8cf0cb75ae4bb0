"""All run-long state of the engine: what a checkpoint brings back, and what ends with the process.

It has one owner, `RunState`. What all replicas know alike is one immutable value (`RoundState`),
which `apply` replaces by what a plan says; the rest is this rank's own. Things that live as long as
an exchange (`InflightSync`) are told to a checkpoint as `PendingState`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, Protocol, Required, TypedDict

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine.host import EngineGroups, EngineSettings, Progress, Reporter
from megatron_edit.engine.rounds.plan import MeetingOutcome, RoundPlan, RoundState
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.ledger import Dealing
from megatron_edit.method.loss_check import LossHistory


class PendingState(TypedDict):
    """A sync that has begun and not landed. Nothing of it is on the wire.

    Keys:
        round: which.
        step: after which it began. `due`: after which it lands; None is at the next meeting.
        units: that sync, in forward order; columns of the tables.
        excluded: whether this replica takes the anchor as it is, by unit.
        is_stepped: whether the outer step is done.
        has_snapshot: whether this replica's parameters at its start are kept.
        landing: fields of `method.landing.LandingRule`.
        inner_lr: of the inner optimizer at the sync.
        tables: what was decided, lists [N][units], and `rollback` [units].
        inner_steps: of each replica. `samples`: consumed by each.
        averages: fp32 [numel] of this rank's shards by unit; without the outer step.
        snapshots: the same, of the parameters at its start.
        moments: fp32 [numel] by kind and unit, means of moments of the inner optimizer; a kind has
            an entry on every rank, also where none of its units has.
    """

    round: int
    step: int
    due: int | None
    units: tuple[str, ...]
    excluded: tuple[bool, ...]
    is_stepped: bool
    has_snapshot: bool
    landing: Mapping[str, Any]
    inner_lr: float
    tables: Mapping[str, Any]
    inner_steps: tuple[int, ...]
    samples: tuple[int, ...]
    averages: Mapping[str, Tensor]
    snapshots: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]


class UnitTensors(TypedDict, total=False):
    """Outer state of this rank's shard of one unit, fp32. Missing ones are as after the switch.

    Keys:
        anchor: [numel]; missing where it is the parameters.
        momentum: [numel].
        sent: [numel], error-feedback residual of this replica's addends.
        summed: [>= owned], the same of the sums of the chunk that this rank encodes.
    """

    anchor: Tensor
    momentum: Required[Tensor]
    sent: Tensor
    summed: Tensor


class EngineState(TypedDict):
    """Everything that `EditEngine.load_state_dict` needs to go on. Tensors are not copied.

    Keys:
        step: s, attempted optimizer steps.
        inner_steps: of them since the last sync.
        round: syncs so far.
        is_warmup: whether the replicas train in step, in the warm-up or in the final phase; then
            nothing else counts but `step` and `round`.
        detectors, unit_steps, loss_history, replicas_identical, round_length, dealing,
            is_rejoined, first_loss: fields of `RoundState`.
        outer: anchor, momentum and residuals of this rank's shards, by unit.
        pending: syncs that have not landed.
        losses, last_loss_step: not reported yet.
        phase_seconds, last_step_seconds: of the clock of the inner phase.
        is_asking: whether this replica has asked for a meeting.
        is_waiting: whether it had come to a meeting that never took place: it goes there first.
        suppressed_until_step: up to which evaluations, saves and exits are suppressed, because
            replicas were stopped at different steps and some have passed them already.
        round_seconds: how long the last round was.
        is_at_sync: whether no replica has made a step since the last sync of all units: what a
            checkpoint knows of them all, and `state_dict` does not say.
    """

    step: int
    inner_steps: int
    round: int
    is_warmup: bool
    detectors: DetectorState
    unit_steps: Tensor
    loss_history: LossHistory
    replicas_identical: bool
    round_length: int
    dealing: Dealing | None
    is_rejoined: bool
    first_loss: float | None
    outer: Mapping[str, UnitTensors]
    pending: Sequence[PendingState]
    losses: tuple[float, ...]
    last_loss_step: int
    phase_seconds: float
    last_step_seconds: float
    is_asking: bool
    is_waiting: bool
    suppressed_until_step: int
    round_seconds: float
    is_at_sync: NotRequired[bool]


class Losses(Protocol):
    """What a replica has to tell of its losses at the next meeting.

    Attributes:
        capacity: numbers that a record has room for. Records of one run are all of one size.
    """

    @property
    def capacity(self) -> int:
        """How many numbers a record has room for, the same in all records of a run."""

    def note(self, step: int, loss: float) -> None:
        """Keep the loss of a step; NaN where this rank does not know it."""

    def payload(self) -> tuple[float, ...]:
        """What this replica has to tell; the last `capacity` numbers go into the next record."""

    def mean(self) -> float:
        """Nats per token, mean loss since the last meeting; NaN where no loss is known."""

    @property
    def last_step(self) -> int:
        """The step of the last loss; 0 where that does not matter."""

    def restore(
        self, payload: Sequence[float], last_step: int, *, is_waiting: bool = False
    ) -> None:
        """Come back to what `payload` and `last_step` said.

        Args:
            payload: as told.
            last_step: as told.
            is_waiting: whether the replica goes to the meeting that it waited at before it makes
                another step.
        """

    def begin_phase(self) -> None:
        """A meeting and what it led to are over."""

    def forget(self) -> float:
        """Keep nothing any more; the loss of the last step, NaN where it is not known."""

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """Report what all replicas told, and forget what has been reported."""


@dataclass
class StepLosses:
    """Every loss travels: all replicas make the same steps.

    Attributes:
        capacity: steps between two meetings.
    """

    capacity: int
    last_step: int = 0
    _losses: list[float] = field(default_factory=list)
    _held_back: tuple[int, float] | None = None

    def note(self, step: int, loss: float) -> None:
        """Append the loss, NaN too: every step has its place."""
        self._losses.append(loss)
        self.last_step = step

    def payload(self) -> tuple[float, ...]:
        """The losses since the last meeting, oldest first."""
        return tuple(self._losses)

    def mean(self) -> float:
        """Of the losses that are not NaN."""
        known = [loss for loss in self._losses if not math.isnan(loss)]
        return sum(known) / len(known) if known else math.nan

    def restore(
        self, payload: Sequence[float], last_step: int, *, is_waiting: bool = False
    ) -> None:
        """Take over losses that were kept step by step; a mean, which has no last step, cannot be
        told so. The loss of the step before a meeting belongs to the round after it."""
        losses = list(payload) if last_step else []
        if is_waiting and losses:
            self._held_back, last_step = (last_step, losses.pop()), last_step - 1
        self._losses, self.last_step = losses, last_step

    def begin_phase(self) -> None:
        """Append the loss that `restore` has kept for the round that begins now."""
        if self._held_back is not None:
            (step, loss), self._held_back = self._held_back, None
            self.note(step, loss)

    def forget(self) -> float:
        """Keep nothing any more; the loss of the last step."""
        last = self._losses[-1] if self._losses else math.nan
        self._losses.clear()
        return last

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """The mean over the replicas of each step. A step's loss is known after its sync."""
        losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
        first = self.last_step - losses.shape[1] + 1
        reporter.on_losses(first, torch.nanmean(losses, dim=0).tolist())
        self._losses.clear()


@dataclass
class MeanLoss:
    """One mean per round, weighted by steps: replicas make different numbers of them."""

    last_step: int = 0
    _total: float = 0.0
    _count: int = 0
    _before: tuple[float, int] = (0.0, 0)  # sum and count without the last step
    _last: float = math.nan
    _held_back: float | None = None

    @property
    def capacity(self) -> int:
        """A sum and a count."""
        return 2

    def note(self, step: int, loss: float) -> None:
        """Add the loss to the mean. A step without one (fp16 skipped it, or another rank knows it)
        does not count."""
        self._before, self._last = (self._total, self._count), loss
        if not math.isnan(loss):
            self._total += loss
            self._count += 1

    def payload(self) -> tuple[float, ...]:
        """The loss of the last step, sum and count of the losses before it since the last meeting,
        and sum and count with it."""
        total, count = self._before
        return (self._last, total, float(count), self._total, float(self._count))

    def mean(self) -> float:
        """The sum of the losses by how many they are."""
        return self._total / self._count if self._count else math.nan

    def restore(
        self, payload: Sequence[float], last_step: int, *, is_waiting: bool = False
    ) -> None:
        """Take over what `payload` said, or the sum and count of older versions; a run with rounds
        of fixed length has left a loss for each step. That of the step before a meeting belongs to
        the round after it."""
        if last_step:
            for loss in payload:
                self.note(last_step, loss)
        elif payload:
            self._total, self._count = payload[-2], int(payload[-1])
            if len(payload) > 2:
                self._last, self._before = payload[0], (payload[1], int(payload[2]))
        if is_waiting and (last_step or len(payload) > 2):
            self._held_back = self._last
            self._total, self._count = self._before

    def begin_phase(self) -> None:
        """Add the loss that `restore` has kept for the round that begins now."""
        if self._held_back is not None:
            loss, self._held_back = self._held_back, None
            self.note(0, loss)

    def forget(self) -> float:
        """Keep nothing any more; the loss of the last step."""
        last = self._last
        self._clear()
        return last

    def report(self, records: Sequence[ControlRecord], reporter: Reporter) -> None:
        """One line: the step of replica 0, and the mean over all steps of all replicas."""
        total, count = (sum(column) for column in zip(*(r.losses for r in records), strict=True))
        if count:
            samples = sum(record.samples for record in records)
            reporter.on_losses(records[0].step, [total / count], samples)
        self._clear()

    def _clear(self) -> None:
        self._total, self._count, self._before, self._last = 0.0, 0, (0.0, 0), math.nan


@dataclass
class RunState:
    """Run-long state of one rank.

    Attributes:
        rounds: what all replicas know alike.
        losses: not reported yet.
        clock: of the inner phase.
        timeout: how long other replicas are waited for.
        timer: asks for meetings where replicas run at their own speeds; else None.
        step: s, attempted optimizer steps so far.
        launch_steps: those of them that were made in this launch.
        round_start: the own step after which the round began.
        outer: anchor, momentum and residuals; None in warm-up, as no anchor has been taken.
        records: of the last meeting, by replica.
        accepted: bool [N, U], which replicas the last sync of a unit accepted.
        landed_digests: of units that have landed late, by position, until they meet again.
        num_dealings: how often samples were dealt; data prefetched under another dealing is void.
        has_left: whether a meeting was the last one, because a replica obeyed a stop.
        is_stopping: whether this replica must end here, because a replica obeys a stop.
        is_waiting: whether it came to a meeting that did not take place, as a replica left.
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
    outer: OuterState | None = None
    records: Sequence[ControlRecord] = ()
    accepted: Tensor = field(init=False)
    landed_digests: dict[int, float] = field(default_factory=dict)
    num_dealings: int = 0
    has_left: bool = False
    is_stopping: bool = False
    is_waiting: bool = False
    suppressed_until_step: int = 0
    last_local_step: int | None = None

    def __post_init__(self) -> None:
        self.accepted = torch.ones_like(self.rounds.unit_steps, dtype=torch.bool)

    @classmethod
    def fresh(
        cls, settings: EngineSettings, groups: EngineGroups, num_units: int, clock: PhaseClock
    ) -> RunState:
        """Before the first step.

        Args:
            settings: of the run.
            groups: whose time-outs follow the rounds.
            num_units: U.
            clock: of the inner phase.
        """
        replicas, timed = groups.sync.size, settings.timed
        is_even = timed is None and settings.schedule.has_fixed_rounds
        dealing = None if timed is None else Dealing(replicas, timed.target)
        return cls(
            rounds=RoundState.fresh(replicas, num_units, dealing),
            losses=StepLosses(settings.schedule.interval) if is_even else MeanLoss(),
            clock=clock,
            timeout=AdaptiveTimeout((groups.sync, groups.meeting), settings.fixed_timeout),
            timer=None if timed is None else TimeTrigger(timed.length, clock),
        )

    @property
    def inner_steps(self) -> int:
        """Steps of this replica in the round that is under way."""
        return self.step - self.round_start

    @property
    def replicas_identical(self) -> bool:
        """Whether all replicas hold the same: no step was made since a sync of all units."""
        return self.step == self.round_start and self.rounds.replicas_identical

    def begin_rounds(self, outer: OuterState, round_length: int) -> None:
        """The anchor is taken: the first round begins."""
        self.outer, self.round_start = outer, self.step
        self.records = ()  # those of evaluations in warm-up are of no meeting of the rounds
        self.rounds = replace(self.rounds, length=round_length)

    def end_rounds(self) -> None:
        """Local training is over. Anchor and outer momentum are not needed any more."""
        self.outer, self.last_local_step = None, self.step
        self.landed_digests.clear()

    def deal(self, dealing: Dealing) -> None:
        """Samples are dealt anew, where replicas run at their own speeds."""
        self.rounds = replace(self.rounds, dealing=dealing)
        self.num_dealings += 1
        self.round_start = self.step

    def record(self, progress: Progress, **rest: Any) -> ControlRecord:
        """What this replica tells at a meeting now.

        Args:
            progress: where training stands.
            rest: fields of the record that the engine does not keep.
        """
        return ControlRecord(
            round=self.rounds.count,
            step=self.step,
            inner_steps=self.inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            # A round that was resumed may have been longer than a record has room for.
            losses=self.losses.payload()[-self.losses.capacity :],
            inner_lr=progress.inner_lr,
            next_lr=progress.next_lr,
            **rest,
        )

    def note_meeting(self, records: Sequence[ControlRecord]) -> bool:
        """A meeting without a sync is over; whether nobody obeys a stop."""
        self.records = records
        self.has_left = any(record.is_leaving for record in records)
        return not self.has_left

    def apply(self, plan: RoundPlan, reporter: Reporter) -> None:
        """Take over the plan of a meeting. The only place where a plan changes run-long state.

        Args:
            plan: of the meeting.
            reporter: learns of the losses that its records told.
        """
        self.rounds, self.records = plan.after, plan.records
        self.has_left = plan.outcome is MeetingOutcome.LEAVE
        if plan.outcome is not MeetingOutcome.SYNC:
            return
        self.round_start = self.step
        self.num_dealings += plan.is_dealt
        assert plan.decision is not None
        self.accepted[:, list(plan.units)] = ~plan.decision.verdict.anomalous
        for unit in plan.units:
            self.landed_digests.pop(unit, None)
        self.losses.report(plan.records, reporter)

    def begin_phase(self) -> None:
        """Inner training goes on: a meeting and what it led to are over."""
        if self.timer is not None:
            self.timer.restart()
        else:
            self.clock.restart()
        self.losses.begin_phase()

    def state_dict(self, *, is_asking: bool, pending: Sequence[PendingState]) -> EngineState:
        """All run-long state of this rank. Waits until what was offloaded is on the host.

        Args:
            is_asking: whether rank 0 of the replica has asked for a meeting.
            pending: syncs that have not landed.
        """
        rounds, is_warmup = self.rounds, self.outer is None
        return EngineState(
            step=self.step,
            inner_steps=0 if is_warmup else self.inner_steps,
            round=rounds.count,
            is_warmup=is_warmup,
            detectors=rounds.detectors,
            unit_steps=rounds.unit_steps,
            loss_history=rounds.loss_history,
            replicas_identical=rounds.replicas_identical,
            round_length=rounds.length,
            dealing=None if is_warmup else rounds.dealing,
            is_rejoined=rounds.is_rejoined,
            first_loss=rounds.first_loss,
            outer=_tensors_of(self.outer),
            pending=pending,
            losses=self.losses.payload(),
            last_loss_step=self.losses.last_step,
            phase_seconds=self.clock.seconds,
            last_step_seconds=0.0 if self.timer is None else self.timer.last,
            is_asking=is_asking,
            is_waiting=self.is_waiting,
            suppressed_until_step=self.suppressed_until_step,
            round_seconds=self.timeout.length,
        )

    def load_state_dict(
        self,
        saved: EngineState,
        outer: OuterState,
        detectors: DetectorState,
        round_length: int,
    ) -> None:
        """Stand where a checkpoint was written, after the switch.

        Args:
            saved: what `state_dict` told.
            outer: anchor, momentum and residuals as they were.
            detectors: of the replicas of this run.
            round_length: of the round that is under way, where the checkpoint does not say it.
        """
        self.outer, self.step = outer, saved["step"]
        self.round_start = saved["step"] - saved["inner_steps"]
        self.rounds = RoundState(
            count=saved["round"],
            detectors=detectors,
            unit_steps=saved["unit_steps"],
            loss_history=saved["loss_history"],
            replicas_identical=saved["replicas_identical"],
            length=saved["round_length"] or round_length,
            dealing=saved["dealing"],
            is_rejoined=saved["is_rejoined"],
            first_loss=saved["first_loss"],
        )
        self.num_dealings += 1
        self.is_waiting = saved["is_waiting"]
        self.losses.restore(saved["losses"], saved["last_loss_step"], is_waiting=self.is_waiting)
        if self.timer is not None:
            self.timer.last = saved["last_step_seconds"]
        self.clock.set(saved["phase_seconds"])
        self.suppressed_until_step = saved["suppressed_until_step"]


def _tensors_of(outer: OuterState | None) -> dict[str, UnitTensors]:
    if outer is None:
        return {}
    outer.wait()
    tensors = {}
    for name, unit in outer.units.items():
        tensors[name] = UnitTensors(anchor=unit.anchor, momentum=unit.momentum)
        if unit.residual is not None:
            tensors[name]["sent"] = unit.residual.sent
            tensors[name]["summed"] = unit.residual.summed
    return tensors
