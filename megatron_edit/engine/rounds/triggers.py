"""When replicas meet: by count (EDiT), or by the clock (A-EDiT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_edit.checkpoint.manifest import ReplicaEntry
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.losses import Losses, MeanLoss, StepLosses
from megatron_edit.engine.rounds.trigger import Outcome, SyncTrigger
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.ledger import Dealing
from megatron_edit.method.schedule import Schedule


@dataclass
class StepTrigger:
    """Every tau steps (EDiT).

    Attributes:
        schedule: warm-up and interval.
        host: says which step is the last.
        clock: of the inner phase, for the log.
        losses: see `SyncTrigger`.
        start: the step after which the round began.
        round_length: see `SyncTrigger`.
    """

    schedule: Schedule
    host: Host
    clock: PhaseClock
    losses: Losses = field(init=False)
    start: int = 0
    round_length: int = 0
    meets_at_same_step: bool = True
    dealing: Dealing | None = None
    last_step_seconds: float = 0.0
    _held_back: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        is_even = self.schedule.has_fixed_rounds
        self.losses = StepLosses(self.schedule.interval) if is_even else MeanLoss()

    def begin_together(self, step: int) -> None:
        """See `SyncTrigger`. Data come in Megatron's own order: nothing to do."""

    def begin(self, step: int) -> None:
        """See `SyncTrigger`. Replicas have been together so far: their schedules stand alike."""
        self.start = step
        self.round_length = self.schedule.round_length(self.host.progress().next_lr)

    def begin_phase(self) -> None:
        """See `SyncTrigger`."""
        self.clock.restart()
        if self._held_back is not None:
            self.losses.note(*self._held_back)
            self._held_back = None

    def resume(self, entry: ReplicaEntry, dealing: Dealing | None, *, is_rejoined: bool) -> None:
        """See `SyncTrigger`. The loss of the step before a meeting belongs to the next round."""
        losses, last = entry.losses, entry.last_loss_step
        if entry.is_waiting and last and self.schedule.has_fixed_rounds:  # a mean holds them all
            self._held_back, losses, last = (last, losses[-1]), losses[:-1], last - 1
        self.losses.restore(losses, last)
        self.start = entry.step - entry.inner_steps
        self.round_length = entry.round_length or self.schedule.round_length(
            self.host.progress().next_lr
        )

    def groups_after(self, step: int, num_syncs: int) -> Sequence[int]:
        """See `SyncTrigger`. A partial round is synced at the end, so that it is not lost."""
        if self.is_last:
            return range(self.schedule.fragments)
        return self.schedule.groups_after(step, self.start, self.round_length)

    @property
    def is_last(self) -> bool:
        """See `SyncTrigger`."""
        return self.host.progress().is_last_step

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """See `SyncTrigger`."""
        return not self.schedule.is_warmup(step) and bool(self.groups_after(step, 0))

    def after_step(self) -> bool:
        """See `SyncTrigger`."""
        return False

    def after_meeting(self, records: Sequence[ControlRecord]) -> Outcome:
        """See `SyncTrigger`."""
        behind = max(r.schedule_position for r in records) - self.host.progress().schedule_position
        if behind:  # it skipped steps: it catches up with the learning rate of the others
            self.host.advance_schedule(behind)
        self.start = records[0].step
        self.round_length = self.schedule.round_length(max(record.next_lr for record in records))
        return Outcome.SYNC

    @property
    def must_meet_again(self) -> bool:
        """See `SyncTrigger`."""
        return False

    @property
    def is_over(self) -> bool:
        """See `SyncTrigger`: the meeting of the last step is the last."""
        return False


@dataclass
class ClockTrigger:
    """Every tau_time seconds, each replica after as many steps as it has made by then (A-EDiT).

    It also keeps the data ledger: which blocks of samples this round deals to whom.

    Attributes:
        replica: r.
        min_round_steps: of all replicas together; a round with fewer goes on.
        fragments: F.
        timer: asks for meetings.
        host: learns where training stands.
        dealing: of the round that is under way.
        epoch: how many dealings there were before it; data prefetched under another is void.
        steps: of this replica in this round.
        is_rejoined: whether a replica comes to the next meeting outside of a step, as it had come
            to it before a checkpoint.
    """

    replica: int
    min_round_steps: float
    fragments: int
    timer: TimeTrigger
    host: Host
    dealing: Dealing
    epoch: int = 0
    steps: int = 0
    is_rejoined: bool = False
    round_length: int = 0
    losses: Losses = field(default_factory=MeanLoss)
    meets_at_same_step: bool = False

    @property
    def last_step_seconds(self) -> float:
        """See `SyncTrigger`."""
        return self.timer.last

    def begin_together(self, step: int) -> None:
        """See `SyncTrigger`. In warm-up every replica consumed a block at each step; a run that
        loads more steps than it is to make is over."""
        replicas, target = self.dealing.num_replicas, self.dealing.target
        consumed = step * replicas
        self._deal(Dealing(replicas, max(target, consumed), consumed))

    def begin(self, step: int) -> None:
        """See `SyncTrigger`."""
        self.begin_together(step)
        self.host.begin_local(is_over=self.dealing.is_over)

    def begin_phase(self) -> None:
        """See `SyncTrigger`."""
        self.timer.restart()

    def resume(self, entry: ReplicaEntry, dealing: Dealing | None, *, is_rejoined: bool) -> None:
        """See `SyncTrigger`."""
        assert dealing is not None, "replicas with clocks resume without a ledger"
        self._deal(dealing)
        self.steps, self.timer.last = entry.inner_steps, entry.last_step_seconds
        self.is_rejoined = is_rejoined
        self.losses.restore(entry.losses, entry.last_loss_step)

    def groups_after(self, step: int, num_syncs: int) -> Sequence[int]:
        """See `SyncTrigger`: in turn; meetings j = 1, 2, ... are for the groups j mod F."""
        if self.is_last:
            return range(self.fragments)
        return [(num_syncs + 1) % self.fragments]

    @property
    def is_last(self) -> bool:
        """See `SyncTrigger`: after a final round, or where its share was nothing."""
        return self.dealing.is_final or self.dealing.is_over

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """See `SyncTrigger`: the clock says so, or no block is left for another step. In the final
        round each replica makes the run that it was given (method 5): no clock cuts it."""
        is_cut = is_asked and not self.dealing.is_final
        return is_cut or self.dealing.is_exhausted(self.replica, self.steps + 1)

    def after_step(self) -> bool:
        """See `SyncTrigger`."""
        self.steps += 1
        return self.timer.after_step()

    def after_meeting(self, records: Sequence[ControlRecord]) -> Outcome:
        """See `SyncTrigger`."""
        if self.dealing.is_over:  # only units that have not landed brought the replicas here
            return Outcome.SYNC
        counts = [record.inner_steps for record in records]
        is_cut = self.dealing.is_final or any(
            self.dealing.is_exhausted(replica, count) for replica, count in enumerate(counts)
        )
        if not is_cut and sum(counts) < self.min_round_steps:
            self.is_rejoined = False  # it goes on, and comes to the next meeting in a step
            return Outcome.EXTEND
        self._deal(self.dealing.settle(counts))
        self.host.end_round(
            sum(record.samples for record in records),
            is_over=self.dealing.is_over,
            is_followed=self.is_rejoined or any(map(self._is_idle, range(len(records)))),
        )
        self.is_rejoined = False
        return Outcome.SYNC

    @property
    def must_meet_again(self) -> bool:
        """See `SyncTrigger`: the final round gives nothing to a replica that was very slow."""
        return self._is_idle(self.replica)

    @property
    def is_over(self) -> bool:
        """See `SyncTrigger`."""
        return self.dealing.is_over

    def _is_idle(self, replica: int) -> bool:
        """Whether the round that begins gives a replica nothing."""
        return not self.dealing.is_over and self.dealing.is_exhausted(replica, 0)

    def _deal(self, dealing: Dealing) -> None:
        self.dealing, self.epoch, self.steps = dealing, self.epoch + 1, 0


def trigger_of(
    settings: EngineSettings, host: Host, clock: PhaseClock, replica: int, num_replicas: int
) -> SyncTrigger:
    """The trigger that the settings ask for.

    Args:
        settings: of the engine.
        host: says and learns where training stands.
        clock: of the inner phase.
        replica: r.
        num_replicas: N.
    """
    if (timed := settings.timed) is None:
        return StepTrigger(settings.schedule, host, clock)
    timer = TimeTrigger(timed.length, clock)
    dealing = Dealing(num_replicas, timed.target)
    return ClockTrigger(replica, timed.min_steps, settings.schedule.fragments, timer, host, dealing)
