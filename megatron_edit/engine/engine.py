"""The engine: start, warm-up, switch, rounds (method section 2). One per rank, and the only face.

The host calls `start` or `load_state_dict` once; `before_gradients` and `average_gradients` around
each reduction of gradients; `before_step` and `after_step` around each attempted optimizer step;
`land_up_to` before it gathers parameters; `leave` when it is asked to stop; `finish` and `close` at
the end. All ranks of a replica make the same calls in the same order. What the host may ask is in
`status`.

A round: meeting (records) -> plan_round (pure) -> check drift -> commit -> exchange -> land. Where
training stands still for the exchange, the plan is committed after it: until then only the units
that sync have changed, each when its average is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_edit.comm.control import check_same_digests
from megatron_edit.comm.error_context import located
from megatron_edit.comm.flags import DelayedFlags, Flag
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.host import EngineGroups, EngineSettings, Host, Reporter
from megatron_edit.engine.plan import (
    MeetingOutcome,
    RoundPlan,
    SyncPlan,
    SyncRules,
    plan_round,
)
from megatron_edit.engine.rounds.completion import Completion, SavedRound
from megatron_edit.engine.rounds.meeting import Meetings, average_shared_values, size_of_record
from megatron_edit.engine.rounds.synchronous import (
    CommonStop,
    average_gradients,
    average_linear_buffers,
    begin_final_phase,
    broadcast_first_replica,
    broadcast_if_different,
    check_identical,
    sum_counts,
)
from megatron_edit.engine.rounds.trigger import MeetingPlan, trigger_of
from megatron_edit.engine.saved import EngineState
from megatron_edit.engine.state import RunState
from megatron_edit.engine.status import EngineStatus
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.offload import SyncStream
from megatron_edit.engine.sync.reports import Footprint
from megatron_edit.engine.sync.syncs import Sync
from megatron_edit.engine.units import Selection
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.schedule import RoundStart


class EditEngine:
    """Keeps one rank of one replica in step with the others.

    Args:
        settings: of the run.
        host: the training framework.
        groups: who communicates.
        world: this process's place among the replicas, and the store that all share.
        reporter: where news go.
        clock: of the inner phase; tests make the time.

    Attributes:
        settings, host, groups: see above.
        clock: see above. The host pauses it while it evaluates or saves.
        state: run-long state, but for anchor and momentum.
        syncs: that are under way, with anchor and momentum.
        status: where training stands.
    """

    def __init__(
        self,
        settings: EngineSettings,
        host: Host,
        groups: EngineGroups,
        world: ReplicaWorld,
        reporter: Reporter,
        clock: PhaseClock | None = None,
    ) -> None:
        self.settings, self.host, self.groups, self.reporter = settings, host, groups, reporter
        self.clock = clock or PhaseClock()
        self.state = state = RunState.fresh(settings, groups, len(host.plan.names), self.clock)
        self._board = StopBoard.open(
            world, groups.control, groups.meeting, groups.sync, lambda: state.launch_steps
        )
        has_digests = not settings.landing.is_immediate
        nbytes = size_of_record(host, state, has_digests=has_digests)
        footprint = Footprint.measure(groups, host.plan, settings, nbytes)
        self.syncs = SyncManager(host, groups, settings, reporter, footprint)
        self._meetings = Meetings(
            host, groups, self._board, state, settings.timed is None, has_digests,
            poll_exchanges=self.syncs.poll_if_busy,
        )  # fmt: skip
        self._trigger = trigger_of(settings, host, groups.sync.rank, state)
        self.syncs.begin_thread(self._with_context)
        self._stream = SyncStream(groups.sync.streams)
        self._flags = DelayedFlags(groups.control)
        self._common_stop = CommonStop(groups.sync)
        self.status = EngineStatus(settings, state, self.syncs, self._flags)

    # ---- start and end

    def start(self, step: int = 0, num_syncs: int = 0) -> None:
        """Give every replica the parameters of replica 0, and check that they hold the same.

        Args:
            step: steps that all replicas, or stock Megatron, have made together before.
            num_syncs: syncs before a final synchronous phase that goes on.
        """
        self.state.step = step
        self.state.rounds = replace(self.state.rounds, count=num_syncs)
        self.groups.warm_up(has_exchanges=self.settings.num_phases > 0)
        broadcast_first_replica(self.host, self.groups)
        check_identical(self.host, self.groups, "at the start")
        if self.host.progress().begins_final_phase:
            self._enter_final_phase()
        elif self.settings.schedule.is_warmup(step + 1):
            self._trigger.begin_warmup()
        else:
            self._switch()

    def join_pending_meeting(self) -> bool:
        """Come to the meeting at which this replica waited; whether no replica stops there."""
        if self.state.is_waiting:
            self.state.is_waiting = False
            with self._context():
                self._meet(self._trigger.next_meeting())
                if self.status.is_final_phase:
                    # The others tell the loss of the step that this one made.
                    self.record_loss(self.state.losses.forget())
                # Not in the forward pass: the host's loop has not begun, and when it does it takes
                # the parameters for gathered.
                self.syncs.land_all()
        return not self.state.is_stopping

    def leave(self) -> None:
        """End at this step, in the middle of the round, as this replica was asked to stop.

        The others may wait at a meeting: the record that says so releases them.
        """
        if self.state.is_stopping:
            return
        self.state.is_stopping = True
        with self._context():
            self.syncs.land_all()
            self.state.note_meeting(self._meetings.exchange_records(is_leaving=True))

    def finish(self) -> None:
        """Land and report what is left, losses too. All replicas must come, or have left."""
        state = self.state
        with self._context():
            self.syncs.land_all()
            if not state.has_left:
                # Not kept as `state.records`: a save after the end of training is to know the
                # records of the last meeting in it.
                records = self._meetings.exchange_records()
                state.has_left = any(record.is_leaving for record in records)
                if not state.has_left:
                    state.losses.report(records, self.reporter)
            self.syncs.finish_exchanges()
        # All replicas have come here, so that nothing is suppressed at the end: none is ahead.
        state.suppressed_until_step = 0

    def close(self, *, groups: bool = False) -> None:
        """Ask the store no more, and let no exchange go on. Idempotent.

        Args:
            groups: whether to give up the transports, too: at a good end, when nothing is on its
                way and all replicas are through.
        """
        self.syncs.close()
        self._board.close()
        if groups:
            self.groups.close()

    def pending_replica_failure(self) -> ReplicaLostError | None:
        """The loss of a replica that the exchanges have met, and the main thread not yet.

        Where the host's own communication fails, that is why: other ranks have ended by it.
        """
        failure = self.syncs.failure
        error = None if failure is None else self._with_context(failure)
        return error if isinstance(error, ReplicaLostError) else None

    # ---- steps

    def before_gradients(self) -> None:
        """In warm-up and in the final phase, before the host moves what its optimizer does not."""
        if self.status.is_warmup:
            with self._context():
                sum_counts(self.host, self.groups)

    def average_gradients(self, num_tokens: Tensor | None = None) -> None:
        """In warm-up and in the final phase, average the gradient shards over the replicas.

        Args:
            num_tokens: see `rounds.synchronous.average_gradients`.
        """
        if self.status.is_warmup:
            with self._context():
                average_linear_buffers(self.host, self.groups)
                average_gradients(self.host, self.groups, num_tokens)

    def before_step(self) -> None:
        """Close the sync that lands: it may not once the inner optimizer has moved on."""
        self._stream.remember()
        with self._context():
            self.syncs.land_all()
            self.syncs.poll()

    def after_step(self) -> None:
        """Count an attempted step, whether it was applied or skipped, and do what is due.

        In the rounds the host's step leaves out its gather of the parameters: a landing may replace
        them. Whether they are gathered now is decided here, and nowhere else.
        """
        state, syncs, is_local = self.state, self.syncs, not self.status.is_warmup
        meeting = None
        if is_local:
            is_asked = Flag.MEET in self._flags.read()
            meeting = self._trigger.meeting_after(state.step + 1, is_asked=is_asked)
        landing = syncs.due(state.step + 1)
        state.step += 1
        state.launch_steps += 1
        with self._context():
            is_asking = is_local and self._asks_for_meeting() and meeting is None
            for sync in landing:
                syncs.begin_landing(sync)
                self._land_unless_in_forward()
            if meeting is not None:
                self._meet(meeting)
            elif not is_local:
                state.is_stopping = self._common_stop.after_step(self.status.is_stop_seen)
                self._end_warmup_if_due()
            if self.host.awaits_gather:
                self.host.gather_parameters()
            syncs.poll()
            self._flags.post(
                (Flag.MEET if is_asking else Flag.NONE)
                | (Flag.STOP if self._board.is_seen else Flag.NONE),
                self._board.heartbeat.steps_of_others,
            )

    def land_up_to(self, num_shards: int) -> None:
        """Land the first `num_shards` shards of the plan, if a sync lands; let the others go on."""
        if self.syncs.is_busy:
            with self._context(), self._stream.use():
                self.syncs.land_up_to(num_shards)
                self.syncs.poll()

    # ---- what replicas do together besides syncs

    def check_in(self) -> bool:
        """Before an evaluation: whether all replicas come to it, so that none waits there alone.

        Collective: all ranks of all replicas that have not left.
        """
        state = self.state
        if not state.is_stopping:
            with self._context("the meeting before an evaluation or an end"):
                self.syncs.land_all()
                state.is_stopping = not state.note_meeting(self._meetings.exchange_records())
        return not state.is_stopping

    def gather_evaluation(self, values: Tensor) -> Tensor:
        """[N, ...]: what all replicas have evaluated, however late they come.

        Collective: the sync group.
        """
        with self._context("the end of an evaluation"):
            return self._meetings.gather(values)

    def gather_step(self, values: Tensor) -> Tensor:
        """[N, ...]: figures of a warm-up step of all replicas.

        Collective: the sync group.
        """
        with self._context():
            return self.groups.sync.all_gather(values)

    def record_loss(self, loss: float) -> None:
        """Note the training loss of the step just made; NaN on ranks that do not know it.

        Of a step with averaged gradients it must be the mean over the replicas already. In a round
        it waits for the next meeting; that of the last local step, which has none, crosses at once.

        Collective after the last local step before a final phase: the sync group.
        """
        if self.status.was_warmup_step:
            self.reporter.on_losses(self.state.step, [loss])
        elif self.status.is_final_phase:
            with self._context():
                losses = self.groups.meeting.all_gather(torch.tensor([loss], dtype=torch.float64))
            self.reporter.on_losses(self.state.step, [float(torch.nanmean(losses))])
        else:
            self.state.losses.note(self.state.step, loss)

    def announce_stop(self) -> None:
        """Tell all replicas to stop at their next step boundary. Rank 0 of the replica does."""
        if self.groups.control.rank == 0:
            self._board.announce()

    def count_evaluation_batch(self) -> None:
        """Let the heartbeat show progress: a batch of an evaluation is done."""
        self._board.heartbeat.batches += 1

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Whether a value is true on any rank of the replica; the same answer on all of them.

        Collective: the ranks of the replica.
        """
        count = torch.tensor([int(value)])
        self.groups.control.all_reduce(count)
        return int(count) > 0

    # ---- checkpoints

    def land_all(self) -> None:
        """Before anybody reads this replica's state: land what lands (then collective), and let
        nothing be on the wire. What is to land later does not land now."""
        with self._context():
            self.syncs.land_all()
            self.syncs.finish_exchanges()

    def state_dict(self) -> EngineState:
        """All run-long state of this rank, after `land_all`. Tensors are not copied.

        All ranks of the replica come.
        """
        state, pending, is_warmup = self.state, self.syncs.state_dict(), self.status.is_warmup
        entry = state.replica_entry(
            self.host.progress(),
            [each.sync for each in pending],
            is_asking=Flag.MEET in self._flags.read(),
            is_warmup=is_warmup,
        )
        return EngineState(
            replica=entry,
            rounds=state.rounds,
            is_warmup=is_warmup,
            outer={} if is_warmup else self.syncs.outer.tensors(),
            pending=pending,
            round_seconds=state.timeout.length,
            suppressed_until_step=state.suppressed_until_step,
        )

    def load_state_dict(self, saved: EngineState, unfinished: SavedRound | None = None) -> None:
        """Go on where a checkpoint was written. The host has loaded the parameters.

        Collective: all ranks of all replicas.

        Args:
            saved: what `state_dict` told, for the replicas of this run.
            unfinished: the round of other replicas that was under way: it is completed first.

        Raises:
            DriftError: the replicas had met when it was written, and do not hold the same now.
        """
        if saved.is_warmup:
            self.start(saved.replica.step, saved.rounds.count)
            return
        self.groups.warm_up(has_exchanges=self.settings.num_phases > 0)
        outer, detectors = self.syncs.take_anchor(), saved.rounds.detectors
        outer.load(saved.outer)
        if unfinished is not None:
            completion = Completion(self.settings, self.host, self.groups, outer, unfinished)
            with torch.no_grad():
                detectors = completion.run(detectors)
        rounds = replace(
            saved.rounds,
            detectors=detectors.for_replicas(self.groups.sync.size),
            length=saved.rounds.length or self._round_length(saved.replica.step),
        )
        self.state.load_state_dict(replace(saved, rounds=rounds))
        self.syncs.begin(outer)
        self.syncs.load_state_dict(saved.pending)
        if saved.is_at_sync:
            check_identical(self.host, self.groups, "after loading")
        self._flags.post(Flag.MEET if saved.replica.is_asking else Flag.NONE)
        self.state.timeout.begin(saved.round_seconds)
        self._begin_local_training()

    # ---- phases

    def _switch(self) -> None:
        """End the warm-up: make sure that the replicas agree, then take the anchor (method 2.3)."""
        self._common_stop.drain()
        broadcast_if_different(self.host, self.groups, self.reporter)
        self.syncs.begin(self.syncs.take_anchor())
        self.state.begin_rounds(self._round_length(self.state.step))
        self._trigger.begin_rounds()
        self.state.begin_phase()
        self.state.timeout.begin()
        step = self.state.step
        self.reporter.on_message(f"warm-up is over after step {step}: each replica trains alone")
        self._begin_local_training()

    def _begin_local_training(self) -> None:
        if (message := self.host.set_local_training(True)) is not None:
            self.reporter.on_message(message)

    def _end_warmup_if_due(self) -> None:
        """After a step of the warm-up or of the final phase: the warm-up ends with step W, unless
        the final phase follows."""
        if self.status.is_final_phase:
            return
        if self.host.progress().begins_final_phase:
            self._enter_final_phase()
        elif self.settings.schedule.is_switch(self.state.step):
            self._switch()

    def _end_rounds(self) -> None:
        """End local training: all lands, and what replicas hold becomes equal; then gradients are
        averaged at every step, as in the warm-up."""
        self.syncs.land_all()
        begin_final_phase(self.host, self.groups, self.reporter, self.state.accepted)
        self.host.set_local_training(False)
        self.syncs.end()
        self._enter_final_phase()

    def _enter_final_phase(self) -> None:
        self.state.last_local_step = self.state.step
        self.reporter.on_message(
            f"final synchronous phase after step {self.state.step}: gradients are averaged over "
            "the replicas at every step"
        )

    def _round_length(self, step: int) -> int:
        """Steps of a round that begins after a step, where a count decides; else 0."""
        if self.settings.timed is not None:
            return 0
        return self.settings.schedule.round_length(RoundStart(step, self.host.progress().next_lr))

    # ---- meetings

    def _asks_for_meeting(self) -> bool:
        """After an inner step: whether this rank, if it is rank 0, asks for a meeting."""
        return self.state.timer is not None and self.state.timer.after_step()

    def _meet(self, meeting: MeetingPlan) -> None:
        """Come to a meeting and do what it decides; to the next at once, where nothing is left."""
        self.clock.pause()  # to wait for others is no inner training
        last = meeting
        while self._hold_meeting(last) and (self._trigger.has_empty_round or self._must_equalize):
            last = self._trigger.next_meeting()
        is_met = not self.state.has_left
        self.state.is_stopping = self.state.is_waiting = not is_met
        if is_met and meeting.ends_rounds:
            self._end_rounds()
        self.state.begin_phase()

    def _hold_meeting(self, meeting: MeetingPlan) -> bool:
        """Meet once, and sync where the plan says so; whether it does."""
        state, syncs = self.state, self.syncs
        before = syncs.of_units(meeting.selection)
        takes_addends_first = self.settings.landing.at_next_meeting
        if not takes_addends_first:
            self._land(before)
        began = time.monotonic()
        plan, waited = self._plan_round(meeting)
        if plan.outcome is not MeetingOutcome.SYNC:
            state.apply(plan, self.reporter)
            return False
        is_blocking = plan.landing.is_immediate and not self._lands_in_forward
        if not is_blocking:
            self._commit(plan)
        sync = syncs.prepare(self._sync_plan(plan, meeting.selection), began, waited)
        if takes_addends_first:
            self._land(before)
            if not before:
                # The first meeting of these units: there is no earlier result to land. The next
                # round begins from the anchor all the same, not from what this one has trained.
                syncs.restore_anchor(sync)
        state.timeout.after_round()
        syncs.start(sync)
        if is_blocking:
            syncs.land_all()
            self._commit(plan)
        elif plan.landing.is_immediate:
            self._land_unless_in_forward()
        return True

    def _plan_round(self, meeting: MeetingPlan) -> tuple[RoundPlan, float]:
        """What follows from the records of a meeting; with the seconds that this rank waited."""
        state, syncs, selection = self.state, self.syncs, meeting.selection
        norms, loss = syncs.norms(selection, state.losses.mean())
        waiting = time.monotonic()
        records = self._meetings.exchange_records(
            norms, syncs.late_digests(selection), round_loss=loss
        )
        waited = time.monotonic() - waiting
        rules = self.settings.round_rules
        plan = plan_round(state.rounds, records, selection.indices, rules, is_last=meeting.is_last)
        if plan.outcome is MeetingOutcome.SYNC and self._meetings.has_digests:
            check_same_digests(records, self.host.plan.names, state.rounds.count)
        return plan, waited

    def _sync_plan(self, plan: RoundPlan, selection: Selection) -> SyncPlan:
        settings, landing, step = self.settings, plan.landing, self.state.step
        assert plan.decision is not None, "a plan without a sync"
        return SyncPlan(
            round=plan.after.count,
            step=step,
            due=None if landing.at_next_meeting else step + landing.delay,
            selection=selection,
            decision=plan.decision,
            rules=SyncRules(settings.outer, settings.max_norm, landing, plan.inner_lr),
            inner_steps=tuple(record.inner_steps for record in plan.records),
            samples=tuple(record.samples for record in plan.records),
            moments=plan.moments,
            is_checked=settings.checks_drift_after(plan.after.count),
        )

    def _commit(self, plan: RoundPlan) -> None:
        """The next round begins: change all that replicas know alike, the host's schedule and
        counters, and buffers that no optimizer owns."""
        assert plan.decision is not None, "a plan without a sync"
        self.state.apply(plan, self.reporter)
        if plan.is_assigned:
            self.host.end_round(
                plan.samples, is_over=self._trigger.is_over, next_meeting_without_step=plan.next_meeting_without_step
            )
        elif plan.after.assignment is None:
            behind = plan.schedule_position - self.host.progress().schedule_position
            if behind:  # it skipped steps: it catches up with the learning rate of the others
                self.host.advance_schedule(behind)
        if rows := [record.buffers for record in plan.records if record.buffers]:
            accepted = ~plan.decision.verdict.anomalous
            average_shared_values(self.host, rows, accepted, plan.units)

    @property
    def _lands_in_forward(self) -> bool:
        """Whether the next forward pass will ask for the units of a sync that lands now."""
        return self.settings.overlap and self.host.lands_in_forward

    @property
    def _must_equalize(self) -> bool:
        """Whether training is over, and the replicas do not hold the same yet."""
        return self._trigger.is_over and not self.state.rounds.replicas_identical

    def _land_unless_in_forward(self) -> None:
        """Land what lands now; in the forward pass, if nothing comes before it."""
        if not self._lands_in_forward or self._trigger.has_empty_round or self._must_equalize:
            self.syncs.land_all()

    def _land(self, syncs: Sequence[Sync]) -> None:
        for sync in syncs:
            self.syncs.begin_landing(sync)
            self.syncs.land_all()

    # ---- errors

    def _with_context(self, error: Exception) -> Exception:
        """An error of the thread: of a lost replica, with who that was and where."""
        if not isinstance(error, ReplicaLostError):
            return error
        try:
            with self._context():
                raise error
        except ReplicaLostError as found:
            return found

    @contextmanager
    def _context(self, what: str = "") -> Iterator[None]:
        """Inside nothing is differentiated, and errors say where training stood, and who was lost.

        Args:
            what: that is done; empty is the sync of the round, or the warm-up.
        """
        try:
            with torch.no_grad():
                yield
        except ReplicaLostError as error:
            if error.has_context:
                raise
            place = f"{what or self.status.activity} (step {self.state.step})"
            raise located(error, self._board.heartbeat, place) from error
        except Exception as error:
            error.add_note(f"in round {self.status.round} of EDiT, after step {self.state.step}")
            raise
