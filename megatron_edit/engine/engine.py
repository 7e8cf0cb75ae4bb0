"""The engine: start, warm-up, switch, rounds (method section 2). One per rank.

The host calls `start` once; `before_gradients` and `average_gradients` around each reduction of
gradients; `before_step` and `after_step` around each attempted optimizer step; `apply_up_to` before
it gathers parameters; `leave` to obey a stop from outside; and `finish` at the end. All ranks of
a replica make the same calls in the same order; only `progress` is called whenever it suits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.comm.error_context import error_context
from megatron_edit.comm.flags import DelayedFlags, Flag
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.accounting import Accounts
from megatron_edit.engine.checks import drift
from megatron_edit.engine.checks.equal import broadcast_first_replica, broadcast_if_different
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.rounds.buffers import average_in_warmup, sum_counts
from megatron_edit.engine.rounds.controller import SyncController
from megatron_edit.engine.rounds.meeting import Meetings, open_board
from megatron_edit.engine.rounds.rounds import Rounds
from megatron_edit.engine.rounds.trigger import SyncTrigger
from megatron_edit.engine.rounds.triggers import trigger_of
from megatron_edit.engine.rounds.warmup import CommonStop, average_gradients
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.queue import SyncQueue
from megatron_edit.engine.sync.streams import HomeStream
from megatron_edit.method.clock import PhaseClock


@dataclass
class EditEngine:
    """Keeps one rank of one replica in step with the others.

    Attributes:
        clock: of the inner phase.
        step: s, attempted optimizer steps so far.
        trigger: when the replicas meet.
        rounds: what this rank knows of the rounds.
        board: where a stop from outside is announced and seen.
        is_stopping: whether this replica must end here, because a replica obeys a stop.
        is_waiting: whether it came to a meeting that did not take place, as a replica left.
        quiet_until: the step until which replicas do nothing together but sync: they were stopped
            at different steps, and some have passed what others come to only now.
        flags: what rank 0 tells the ranks of the replica.
        adaptive_timeout: how long others are waited for.
        traffic: the syncs that are under way.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    world: ReplicaWorld
    reporter: Reporter
    clock: PhaseClock = field(default_factory=PhaseClock)
    step: int = 0
    is_stopping: bool = False
    is_waiting: bool = False
    quiet_until: int = 0
    trigger: SyncTrigger = field(init=False)
    rounds: Rounds = field(init=False)
    board: StopBoard = field(init=False)
    flags: DelayedFlags = field(init=False)
    adaptive_timeout: AdaptiveTimeout = field(init=False)
    traffic: SyncQueue = field(init=False)

    def __post_init__(self) -> None:
        sync = self.groups.sync
        self.board = open_board(self.groups, self.world, lambda: self.step)
        self.trigger = trigger_of(self.settings, self.host, self.clock, sync.rank, sync.size)
        meetings = Meetings(
            self.host,
            self.groups,
            self.board,
            self.trigger,
            has_digests=not self.settings.landing.is_immediate,
        )
        self.rounds = Rounds(
            self.settings, self.host, self.groups, self.reporter, self.trigger, meetings
        )
        accounts = Accounts.open(self.groups, self.host.plan, self.settings, meetings.record_bytes)
        self.traffic = meetings.traffic = SyncQueue(
            self.host,
            self.groups,
            accounts,
            self.reporter,
            self.settings.digest_interval,
            self.settings.schedule.fragments,
            self.rounds.digests,
        )
        self._home = HomeStream(sync.device)
        self.flags = DelayedFlags(self.groups.control)
        self._common_stop = CommonStop(sync)
        self.adaptive_timeout = AdaptiveTimeout(
            (sync, self.groups.meeting), self.settings.fixed_timeout
        )
        self._syncs = SyncController(
            self.settings, self.host, self.trigger, self.rounds, self.traffic, self.adaptive_timeout
        )

    # ---- what the host calls

    def start(self, step: int = 0) -> None:
        """Give every replica the parameters of replica 0, and check that they hold the same.

        Args:
            step: steps that all replicas, or stock Megatron, have made together before.
        """
        self.step = step
        broadcast_first_replica(self.host, self.groups)
        plan = self.host.plan
        drift.check(plan, self.groups, drift.plan_digests(plan), "at the start")
        if self.settings.schedule.is_warmup(step + 1):
            self.trigger.begin_together(step)
        else:
            self._switch()

    def settle(self) -> None:
        """Before anybody reads this replica's state: land what lands (then collective), and let
        nothing be on the wire. What is to land later does not land now."""
        with torch.no_grad(), error_context(self):
            self.traffic.settle()
            self.traffic.finish_exchanges()

    def catch_up(self) -> bool:
        """Come to the meeting at which this replica waited; whether nobody obeys a stop there."""
        if self.is_waiting:
            self.is_waiting = False
            with torch.no_grad(), error_context(self):
                self._meet()
                # The host's loop has not begun, and takes the parameters as gathered when it does.
                self.traffic.settle()
        return not self.is_stopping

    def before_gradients(self) -> None:
        """In warm-up, before the host moves what it does not leave to its optimizer."""
        if self.is_warmup:
            with error_context(self):
                sum_counts(self.host, self.groups)

    def average_gradients(self, num_tokens: Tensor | None = None) -> None:
        """In warm-up, average the gradient shards over the replicas; see `warmup`."""
        if self.is_warmup:
            with error_context(self):
                average_in_warmup(self.host, self.groups)
                average_gradients(self.host, self.groups, num_tokens)

    @property
    def is_sync_due(self) -> bool:
        """Whether a meeting follows the step being attempted now."""
        if self.is_warmup:
            return False
        is_asked = Flag.MEET in self.flags.read()
        return self.trigger.is_due(self.step + 1, is_asked=is_asked)

    @property
    def is_landing_due(self) -> bool:
        """Whether the result of a sync replaces parameters right after the step being attempted."""
        is_meeting, step = self.is_sync_due, self.step + 1
        return not self.is_warmup and self._syncs.replaces_parameters(step, is_meeting=is_meeting)

    @property
    def is_warmup(self) -> bool:
        """Whether the replicas have not parted yet: they make the same steps."""
        return self.rounds.state is None

    @property
    def was_warmup_step(self) -> bool:
        """Whether the last step was one of the warm-up."""
        return self.settings.schedule.is_warmup(self.step)

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas may differ: they have made steps since the last sync of all units,
        or it keeps something of their parameters."""
        replicas_identical = self.step == self.rounds.start and self.rounds.replicas_identical
        return not self.is_warmup and not replicas_identical

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the last sync have still to land."""
        return self.traffic.has_pending_units

    @property
    def is_stop_seen(self) -> bool:
        """Whether a stop from outside has come to this replica; the same on all its ranks."""
        return Flag.STOP in self.flags.latest

    def before_step(self) -> None:
        """Close the sync that lands: it may not once the inner optimizer has moved on."""
        with torch.no_grad(), error_context(self):
            self.traffic.settle()
            self.traffic.poll()

    def after_step(self) -> None:
        """Count an attempted step, whether it was applied or skipped, and do what is due."""
        is_sync, was_warmup = self.is_sync_due, self.is_warmup
        is_owed, landings = self.is_landing_due, self.traffic.num_landings
        self.step += 1
        self._home.remember()
        with torch.no_grad(), error_context(self):
            is_asking = not was_warmup and self.trigger.after_step() and not is_sync
            self._syncs.land_due(self.step)
            if is_sync:
                self._meet()
            elif was_warmup:
                self.is_stopping = self._common_stop.after_step(self.is_stop_seen)
                if self.settings.schedule.is_switch(self.step):
                    self._switch()
            if is_owed and self.traffic.num_landings == landings:
                self.host.gather_parameters()  # the step left that to a sync, which there was not
            self.traffic.poll()
            self.flags.post(
                (Flag.MEET if is_asking else Flag.NONE)
                | (Flag.STOP if self.board.is_seen else Flag.NONE)
            )

    def apply_up_to(self, num_shards: int) -> None:
        """Land the first `num_shards` shards of the plan, if a sync lands; let the others go on."""
        if self.traffic.is_busy:
            with torch.no_grad(), error_context(self), self._home.entered():
                self.traffic.apply_up_to(num_shards)
                self.traffic.poll()

    def progress(self) -> None:
        """Begin what exchanges can begin now; in order, all has begun. Waits for nothing."""
        if self.traffic.is_busy and not self.groups.sync.runs_in_order:
            with torch.no_grad(), error_context(self), self._home.entered():
                self.traffic.poll()

    def record_loss(self, loss: float) -> None:
        """Note the training loss of the step just made; NaN on ranks that do not know it.

        In warm-up it must be the mean over the replicas already: gradients cross at every step
        there, so may a number. In a round it waits for the next meeting.
        """
        if self.was_warmup_step:
            self.reporter.on_losses(self.step, [loss])
        else:
            self.trigger.losses.note(self.step, loss)

    def check_in(self) -> bool:
        """Before an evaluation: whether all replicas come to it, so that none waits there alone.

        Collective: all ranks of all replicas that have not left.
        """
        if not self.is_stopping:
            with torch.no_grad(), error_context(self, "the meeting before an evaluation or an end"):
                self.traffic.settle()
                self.is_stopping = not self.rounds.check_in(self.step)
        return not self.is_stopping

    def leave(self) -> None:
        """Obey a stop: end at this step, in the middle of the round.

        The others may wait at a meeting: the record that says so releases them.
        """
        if self.is_stopping:
            return
        self.is_stopping = True
        with torch.no_grad(), error_context(self):
            self.traffic.settle()
            self.rounds.leave(self.step)

    def finish(self) -> None:
        """Land and report what is left, losses too. All replicas must come, or have left."""
        with torch.no_grad(), error_context(self):
            self.traffic.settle()
            self.rounds.close(self.step)
            self.traffic.finish_exchanges()

    # ---- phases

    def _switch(self) -> None:
        """End the warm-up: make sure that the replicas agree, then take the anchor (method 2.3)."""
        self._common_stop.drain()
        broadcast_if_different(self.host, self.groups, self.reporter)
        self.rounds.begin(self.step)
        self.trigger.begin_phase()
        self.adaptive_timeout.begin()
        self.reporter.on_message(f"warm-up is over after step {self.step}: the replicas part")

    def _meet(self) -> None:
        self.clock.pause()  # to wait for others is no inner training
        self.is_stopping = self.is_waiting = not self._syncs.meet(self.step)
        self.trigger.begin_phase()

    @property
    def current_round(self) -> int:
        """The round whose sync is under way, or comes next."""
        run = self.traffic.landing
        return run.round if run is not None else self.rounds.count + 1
