"""The engine: start, warm-up, switch, rounds (method section 2). One instance per rank.

The host calls `start` or `load_state_dict` once; `before_gradients` and `average_gradients` around
each reduction of gradients; `before_step` and `after_step` around each attempted optimizer step;
`land_up_to` before it gathers parameters; `stop_mid_round` on a request to stop; `finish` and
`close` at the end. All ranks of a replica make the same calls in the same order. `status` has what
the host may query.

Meetings, and the syncs that follow them: `rounds/fixed.py`, with a hub `rounds/elastic.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.control import DelayedFlags, Flag
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.context import ErrorContext
from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.rounds.completion import (
    AVERAGES_EACH_STEP,
    Completion,
    Outcomes,
    SavedRound,
)
from megatron_edit.engine.rounds.elastic import ElasticParts, ElasticRounds
from megatron_edit.engine.rounds.fixed import FixedRounds
from megatron_edit.engine.rounds.meeting import Meetings, size_of_record
from megatron_edit.engine.rounds.synchronous import (
    CommonStop,
    GradientAverager,
    begin_final_phase,
    broadcast_first_replica,
    broadcast_if_different,
    check_identical,
    sum_counts,
)
from megatron_edit.engine.rounds.trigger import MeetingPlan, create_trigger
from megatron_edit.engine.saved import EngineState
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.engine.status import EngineStatus
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.offload import SyncStream
from megatron_edit.engine.sync.reports import Footprint
from megatron_edit.engine.tuning import AutoTuner
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.schedule import RoundStart


class EditEngine:
    """Synchronises one rank of one replica with the other replicas.

    Args:
        world: this process's placement among the replicas, and the store that all share.
        reporter: receives reports and messages.
        clock: of the inner phase; tests pass one with a simulated time.
        elastic: of a run with a hub; else None.

    Attributes:
        settings, host, groups: see above.
        clock: see above. The host pauses it while it evaluates or saves.
        state: run-long state, except for anchor and momentum.
        syncs: the syncs that are under way, with anchor and momentum.
        reserve_memory: takes the memory of the rounds, before `start`; see `SyncManager.reserve`.
        elastic: the rounds of a run with a hub; else None.
        status: read-only state of training.
    """

    def __init__(
        self,
        settings: EngineSettings,
        host: Host,
        groups: EngineGroups,
        world: ReplicaWorld,
        reporter: Reporter,
        clock: PhaseClock | None = None,
        elastic: ElasticParts | None = None,
    ) -> None:
        self.settings, self.host, self.groups, self.reporter = settings, host, groups, reporter
        self.clock = clock or PhaseClock()
        membership, units = None if elastic is None else elastic.membership, len(host.plan.names)
        self.state = state = RunState.fresh(settings, groups, units, self.clock, membership)
        self._board = StopBoard.open(world, groups.control, groups.meeting, groups.sync, state)
        has_digests = not settings.landing.is_immediate
        nbytes = size_of_record(host, state, has_digests=has_digests)
        footprint = Footprint.measure(groups, host.plan, settings, nbytes)
        self.syncs = SyncManager(host, groups, settings, reporter, footprint)
        self._tuner = AutoTuner.of(settings, groups, footprint.unit_numels)
        self._meetings = Meetings(
            host, groups, self._board, state, not settings.assigns_blocks, has_digests,
            poll_exchanges=self.syncs.poll_if_busy, num_measured=self._tuner.num_measured,
        )  # fmt: skip
        self._trigger = create_trigger(settings, host, state)
        self._outcomes = Outcomes(settings, host, state, reporter, self._trigger, membership)
        self.elastic = None if elastic is None else ElasticRounds(
            settings, host, groups, elastic, state, self.syncs, self._meetings, self._outcomes,
            self.use, self._tuner,
        )  # fmt: skip
        self._rounds = self.elastic or FixedRounds(
            settings, state, self.syncs, self._meetings, self._outcomes
        )
        self._stream, self._flags = SyncStream(groups.sync.streams), DelayedFlags(groups.control)
        self._gradients = GradientAverager(settings.gradient_wire, host, groups)
        self._common_stop, self.reserve_memory = CommonStop(groups.sync), self.syncs.reserve
        self.status = EngineStatus(state, self.syncs, self._flags)
        self._context = ErrorContext(
            state, self.status, self._board, is_elastic=elastic is not None
        )
        self.syncs.begin_thread(self._context.explain)

    # ---- start and end

    def start(self, step: int = 0, num_syncs: int = 0, residuals: Sequence[Residual] = ()) -> None:
        """Broadcast the parameters of replica 0, check that all replicas hold them, and begin.

        Args:
            step: steps that all replicas, or stock Megatron, have made together before.
            num_syncs: syncs so far, when a final synchronous phase is resumed.
            residuals: see `EngineState`; empty begins at zero.
        """
        self.state.step = step
        self.state.rounds = replace(self.state.rounds, count=num_syncs)
        self.syncs.together_bytes = self._tuner.open_groups(self.state.timeout)
        broadcast_first_replica(self.host, self.groups)
        check_identical(self.host, self.groups, "at the start")
        self._gradients.load_state_dict(residuals)
        if self.host.progress().begins_final_phase:
            self._enter_final_phase()
        elif self.settings.schedule.is_warmup(step + 1):
            self._trigger.begin_warmup()
            self._tuner.begin(step)
        else:
            self._switch()

    def join_pending_meeting(self) -> bool:
        """Join the meeting at which this replica waited before the checkpoint.

        Returns:
            Whether training goes on: no replica stops at the meeting.
        """
        # This run may begin the final phase where the rounds of the checkpoint would have gone on.
        is_over = self._trigger.is_over and self.settings.has_final_phase
        is_ending = is_over and not self.status.is_final_phase
        if self.state.is_waiting or self._rounds.is_joining or is_ending:
            self.state.is_waiting = False
            with self._context():
                self._rounds.join()
                self._meet(self._trigger.next_meeting())
                self._rounds.settle()  # the first step may take long
                if self.status.is_final_phase:
                    # The other replicas report the loss of the step that this one made.
                    self.record_loss(self.state.losses.forget())
                # Not in the forward pass: the host's loop has not begun, and when it does it
                # assumes that the parameters are gathered.
                self.syncs.land_all()
        return not self.state.is_stopping

    def stop_mid_round(self) -> None:
        """Stop after this step, in the middle of the round, because of a stop request. A record
        with `is_stopping` releases replicas that wait at a meeting."""
        if self.state.is_stopping:
            return
        self.state.is_stopping = True
        with self._context():
            self.syncs.land_all()
            self._rounds.leave("signal")

    def finish(self) -> None:
        """Land and report the remaining syncs and losses.

        Collective: all replicas, unless one has stopped before.
        """
        state = self.state
        self.settle()
        with self._context():
            self.syncs.land_all()
            if not state.has_replica_stopped and not self._context.is_alone:
                # Not stored as `state.records`: a save needs those of the last meeting in training.
                records = self._meetings.exchange_records()
                state.has_replica_stopped = any(record.is_stopping for record in records)
                if not state.has_replica_stopped:
                    state.report_losses(records, self.reporter)
            self.syncs.finish_exchanges()
        # All replicas are at the end and none is ahead, so nothing is suppressed any more.
        state.timeout.is_in_steps, state.suppressed_until_step = False, 0

    def close(self, *, is_regular: bool = False) -> None:
        """Stop polling the store and progressing exchanges; at a regular end, also whatever sends
        to other ranks of the replica. Idempotent."""
        self.syncs.close()
        self._board.close()
        if is_regular:
            self.groups.stop_loops()

    def release(self) -> None:
        """Release the transports at a regular end, when all ranks have called `close`."""
        self.groups.close()

    def pending_replica_failure(self) -> ReplicaLostError | None:
        """Return a replica loss that the progress thread has found and the main thread has not. If
        the host's own communication fails, this is the cause: it has ended other ranks."""
        error = None if (found := self.syncs.failure) is None else self._context.explain(found)
        return error if isinstance(error, ReplicaLostError) else None

    # ---- steps

    def before_gradients(self) -> None:
        """In warm-up and in the final phase, sum the counts that the host updates buffers from."""
        self.state.timeout.follow_step()
        if self.status.is_warmup:
            with self._context(), self._tuner.meter.averaging(self.state.step + 1):
                sum_counts(self.host, self.groups)

    def average_gradients(self, num_tokens: Tensor | None = None) -> None:
        """In warm-up and in the final phase, average the gradients; see `GradientAverager`."""
        if self.status.is_warmup:
            with self._context(), self._tuner.meter.averaging(self.state.step + 1):
                self._gradients.average(num_tokens)

    def before_step(self) -> None:
        """Finish the landing sync: it must not land after the inner optimizer's next step."""
        self._stream.remember()
        with self._context():
            self.syncs.land_all()
            self.syncs.poll()

    def after_step(self) -> None:
        """Count an attempted step, applied or skipped, and run the landings and meeting due now.

        In the rounds the host's step omits its gather of the parameters, because a landing may
        replace them. Only this method decides whether they are gathered now.
        """
        state, syncs, is_local = self.state, self.syncs, not self.status.is_warmup
        meeting = None
        if is_local:
            is_requested = Flag.MEET in self._flags.read()
            meeting = self._trigger.meeting_after(state.step + 1, is_requested=is_requested)
        state.step += 1
        state.launch_steps += 1
        with self._context():
            self._rounds.report_progress(self._board.heartbeat.batches)
            is_requesting = is_local and self._should_request_meeting() and meeting is None
            self._rounds.go_on()
            if meeting is not None:
                with self._tuner.meter.averaging(state.step):
                    self._meet(meeting)
            elif not is_local:
                state.is_stopping = self._common_stop.after_step(self.status.is_stop_seen)
                self._end_warmup_if_due()
            if self.host.awaits_gather:
                self.host.gather_parameters()
            syncs.poll()
            syncs.agree_on_next_steps()
            self._tuner.meter.end_step(state.step)
            self._flags.post(
                (Flag.MEET if is_requesting else Flag.NONE)
                | (Flag.STOP if self._board.is_seen else Flag.NONE),
                self._board.heartbeat.steps_of_others,
            )

    def land_up_to(self, num_shards: int) -> None:
        """Land the first `num_shards` shards of the plan, if a sync is landing; poll the rest."""
        self._tuner.meter.note_gather(self.state.step + 1)
        if self.syncs.is_busy:
            with self._context(), self._stream.use():
                self.syncs.land_up_to(num_shards)
                self.syncs.poll()

    # ---- joint actions of the replicas other than syncs

    def meet_without_sync(self) -> bool:
        """Exchange records before an evaluation or an end, so that no replica waits there alone.

        Collective: all ranks of all replicas that have not stopped.

        Returns:
            Whether all replicas take part: none stops here.
        """
        state = self.state
        self.settle()  # nothing goes on with an open round during an evaluation
        if not state.is_stopping and not self._context.is_alone:
            with self._context("the meeting before an evaluation or an end"):
                self.syncs.land_all()
                state.is_stopping = not state.note_meeting(self._meetings.exchange_records())
        return not state.is_stopping

    def gather_evaluation(self, values: Tensor) -> Tensor:
        """[N, ...]: the evaluation results of all replicas, however late they arrive; with a hub,
        in local training, those of this one, as all replicas evaluate the same.

        Collective: the sync group.
        """
        with self._context("the end of an evaluation"):
            return values.unsqueeze(0) if self._context.is_alone else self._meetings.gather(values)

    def sum_over_ranks(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Sum values by name over the ranks of the replica. Collective: these ranks."""
        return sum(map(Counter, self.groups.control.all_gather_json(dict(values))), Counter())

    def gather_step(self, values: Tensor) -> Tensor:
        """[N, ...]: values of a warm-up step from all replicas.

        Collective: the sync group.
        """
        with self._context(), self._tuner.meter.averaging(self.state.step + 1):
            return self.groups.sync.all_gather(values)

    def record_loss(self, loss: float) -> None:
        """Record the training loss of the last step; NaN on ranks that do not know it.

        For a step with averaged gradients it must already be the mean over the replicas. In a round
        it is kept for the next meeting; the loss of the last local step, which no meeting follows,
        is exchanged at once.

        Collective after the last local step before a final phase: the sync group.
        """
        if self.status.was_warmup_step:
            self.reporter.on_losses(self.state.step, [loss])
        elif self.status.is_final_phase:
            self.state.losses.note(self.state.step, loss)
            with self._context():
                self.state.report_losses(self._meetings.exchange_records(), self.reporter)
        else:
            self.state.losses.note(self.state.step, loss)

    def announce_stop(self) -> None:
        """Tell all replicas to stop at their next step boundary. Only rank 0 of a replica acts."""
        if self.groups.control.rank == 0:
            self._board.announce()

    def count_evaluation_batch(self) -> None:
        """Count an evaluated batch as progress in the heartbeat."""
        self._board.heartbeat.batches += 1
        self._rounds.report_progress(self._board.heartbeat.batches)

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Whether a value is true on any rank of the replica. Collective: these ranks."""
        return self.groups.control.is_true_on_any_rank(value)

    # ---- checkpoints

    def land_all(self) -> None:
        """Land the landing sync (then collective) and finish all exchanges, before a save and after
        `settle`. Delayed syncs that are due later do not land now."""
        self._tuner.meter.interrupt()
        with self._context():
            self.syncs.land_all()
            self.syncs.finish_exchanges()
        self.state.timeout.is_in_steps = False

    def settle(self) -> None:
        """Wait until the open round of an elastic run is committed: the others wait for this
        replica's part of it.

        Collective: the ranks of the replica.
        """
        if not self.state.is_stopping:
            with self._context():
                self._rounds.settle()

    @contextmanager
    def saved_parameters(self) -> Iterator[None]:
        """Inside, the parameters are those of a checkpoint: in the rounds of an elastic run the
        anchor, which is all that the replicas share.

        Collective: the ranks of the replica.
        """
        if self.elastic is None:
            yield
            return
        is_at_anchor = self.status.is_warmup or self.state.replicas_identical
        at_anchor = nullcontext() if is_at_anchor else self.syncs.at_anchor()
        with self.elastic.membership.working(), at_anchor:
            yield

    def state_dict(self) -> EngineState:
        """All run-long state of this rank, after `land_all`. Tensors are not copied.

        Collective: all ranks of the replica.
        """
        state, is_warmup = self.state, self.status.is_warmup
        # With a hub a checkpoint holds what a replica that joins copies: the last commit.
        pending = [] if self.elastic is not None else self.syncs.state_dict()
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
            gradients=self._gradients.state_dict() if is_warmup else (),
            pending=pending,
            round_seconds=state.timeout.length,
            suppressed_until_step=state.suppressed_until_step,
        )

    def load_state_dict(self, saved: EngineState, unfinished: SavedRound | None = None) -> None:
        """Resume from a checkpoint, after the host has loaded the parameters.

        Collective: all ranks of all replicas.

        Args:
            saved: what `state_dict` returned, mapped to the replicas of this run.
            unfinished: the round that the saved replicas had not finished, where their number
                differs: it is completed first.

        Raises:
            DriftError: the checkpoint was written at a sync, and the replicas differ now.
        """
        if saved.is_warmup:
            self.start(saved.replica.step, saved.rounds.count, saved.gradients)
            return
        self.syncs.together_bytes = self._tuner.open_groups(self.state.timeout)
        outer, detectors = self.syncs.take_anchor(), saved.rounds.detectors
        outer.load(saved.outer)
        if unfinished is not None:
            completion = Completion(self.settings, self.host, self.groups, outer, unfinished)
            with torch.no_grad():
                detectors = completion.run(detectors)
        kept = replace(
            saved.rounds,
            detectors=detectors.for_replicas(len(saved.rounds.unit_steps)),
            length=saved.rounds.length or self._round_length(saved.replica.step),
        )
        rounds = self._rounds.begins_with(kept)
        if not self.settings.given.auto:
            rounds = replace(rounds, choice=None, exposed=(), leaves_prediction=False)
        elif rounds.choice is None and self.elastic is None:
            self.reporter.on_message("the checkpoint has no choice: no settings are chosen")
        self.state.load_state_dict(replace(saved, rounds=rounds))
        self.syncs.begin(outer)
        self.syncs.load_state_dict(saved.pending)
        if saved.is_at_sync:
            check_identical(self.host, self.groups, "after loading")
        self._flags.post(Flag.MEET if saved.replica.is_asking else Flag.NONE)
        self.state.timeout.begin(saved.round_seconds, self._round_length(saved.replica.step))
        self._begin_local_training()

    # ---- phases

    def _switch(self) -> None:
        """End the warm-up: make the replicas identical, then take the anchor (method 2.3)."""
        self._common_stop.drain()
        self._gradients.free()
        if self.elastic is None:
            broadcast_if_different(self.host, self.groups, self.reporter, self.state.step)
            self._choose()
        self.syncs.begin(self.syncs.take_anchor())
        self.state.begin_rounds(self._round_length(self.state.step))
        self._trigger.begin_rounds()
        self.state.begin_phase()
        self.state.timeout.begin(steps=self._round_length(self.state.step))
        message = f"warm-up is over after step {self.state.step}: each replica trains alone"
        if self.state.rounds.is_synchronous(self.settings):
            is_warmup = self.settings.is_warmup(self.state.rounds.num_consumed)
            message = f"{'warm-up' if is_warmup else 'final phase'}: {AVERAGES_EACH_STEP}"
        self.reporter.on_message(message)
        self._begin_local_training()

    def _choose(self) -> None:
        """Choose the settings of the next rounds: at the switch, and after a sync of all units."""
        self.syncs.land_all()
        if (choice := self._tuner.choose(self.state, self.reporter)) is not None:
            self.use(choice)

    def use(self, choice: AutoChoice, *, is_resumed: bool = False) -> None:
        """Use chosen settings from the next round on, while no sync is under way; on a resume those
        of the checkpoint, before its state is loaded.

        Collective: the ranks of the replica.
        """
        settings = replace(self.settings, choice=choice)
        if "final_sync_fraction" in settings.given.open_settings:
            last, has_phase = self.host.set_final_fraction(choice.settings.final_sync_fraction)
            settings = replace(settings, last_local_step=last, has_final_phase=has_phase)
        self.settings = settings
        has_digests = not settings.landing.is_immediate
        self.state.use(settings)
        nbytes = size_of_record(self.host, self.state, has_digests=has_digests)
        footprint = Footprint.measure(self.groups, self.host.plan, settings, nbytes)
        self.syncs.reconfigure(settings, footprint)
        self._meetings = replace(self._meetings, has_digests=has_digests, num_measured=0)
        self._tuner.meter.last_step = None
        self._trigger = create_trigger(settings, self.host, self.state)
        self._outcomes = replace(self._outcomes, settings=settings, trigger=self._trigger)
        self._rounds.use(settings, self._meetings, self._outcomes)
        self.syncs.begin_thread(self._context.explain)
        self.state.timeout.begin(self.state.timeout.length, settings.used.sync_interval)
        self.reporter.on_choice(choice, settings.last_local_step, is_resumed=is_resumed)

    def _begin_local_training(self) -> None:
        if (message := self.host.set_local_training(True)) is not None:
            self.reporter.on_message(message)
        self._rounds.begin()

    def _end_warmup_if_due(self) -> None:
        """End the warm-up after step W, or where the final phase follows. Not in that phase."""
        if self.status.is_final_phase:
            return
        if self.host.progress().begins_final_phase:
            self._enter_final_phase()
        elif self.settings.schedule.is_switch(self.state.step) or self._tuner.ends_warmup(
            self.state.step
        ):
            self._switch()

    def _end_rounds(self) -> None:
        """End local training: make the replicas identical; from here on average gradients."""
        self.syncs.land_all()
        begin_final_phase(self.host, self.groups, self.reporter, self.state.accepted)
        self.host.set_local_training(False)
        if self.settings.assigns_blocks:
            self.state.count_from(self.host.end_local())
        self._enter_final_phase()

    def _enter_final_phase(self) -> None:
        self.syncs.end()
        self.state.last_local_step = self.state.step
        self.reporter.on_message(
            f"final synchronous phase after step {self.state.step}: gradients are averaged over "
            "the replicas at every step"
        )

    def _round_length(self, step: int) -> int:
        """Steps of the round that begins after `step`; 0 where rounds end by the clock."""
        if self.settings.assigns_blocks:
            return 0
        return self.settings.schedule.round_length(RoundStart(step, self.host.progress().next_lr))

    # ---- meetings

    def _should_request_meeting(self) -> bool:
        """Whether this replica's clock requests a meeting; only rank 0's request counts."""
        timer = self.state.timer
        return timer is not None and timer.after_step(self._board.heartbeat.latest_arrival())

    def _meet(self, meeting: MeetingPlan) -> None:
        """Run a meeting and its sync, and the next ones at once while no step is left to make."""
        self.clock.pause()  # waiting for other replicas is not inner training
        last = meeting
        while self._rounds.meet(last) and self._outcomes.meets_again:
            last = self._trigger.next_meeting()
        is_stopped = self.state.has_replica_stopped
        self.state.is_stopping = is_stopped or self._rounds.is_ending
        self.state.is_waiting = is_stopped
        if self._trigger.ends_rounds and not is_stopped:
            self._end_rounds()
        elif meeting.chooses_again and not is_stopped:
            self._choose()
        self.state.begin_phase()
