"""The engine: start, warm-up, switch, rounds (method section 2). One per rank, and the only face.

The host calls `start` or `load_state_dict` once; `before_gradients` and `average_gradients` around
each reduction of gradients; `before_step` and `after_step` around each attempted optimizer step;
`apply_up_to` before it gathers parameters; `leave` to obey a stop from outside; `finish` and
`close` at the end. All ranks of a replica make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.error_context import located
from megatron_edit.comm.flags import DelayedFlags, Flag
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine.host import EngineGroups, EngineSettings, Host, Reporter
from megatron_edit.engine.rounds.completion import Completion, SavedRound
from megatron_edit.engine.rounds.controller import MeetingPlan, StepPlan, SyncController
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
from megatron_edit.engine.state import EngineState, RunState
from megatron_edit.engine.sync.offload import HomeStream
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.ledger import Dealing
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
        settings: see above.
        host: see above.
        groups: see above.
        clock: see above. The host pauses it while it evaluates or saves.
        state: all run-long state.
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
        self.settings, self.host, self.groups = settings, host, groups
        self.world = world
        self.reporter = reporter
        self.clock = clock or PhaseClock()
        self.state = RunState.fresh(settings, groups, len(host.plan.names), self.clock)
        self._board = StopBoard.open(
            world, groups.control, groups.meeting, groups.sync, lambda: self.state.launch_steps
        )
        self._controller = SyncController.build(
            settings, host, groups, reporter, self.state, self._board
        )
        self._queue, self._trigger = self._controller.queue, self._controller.trigger
        self._queue.begin_thread(self._placed)
        self._home = HomeStream(groups.sync.streams)
        self._flags = DelayedFlags(groups.control)
        self._common_stop = CommonStop(groups.sync)
        self._after: StepPlan | None = None  # what follows the step being attempted

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
            self.state.last_local_step = step
            self._tell_of_final_phase()
        elif self.settings.schedule.is_warmup(step + 1):
            self._trigger.begin_warmup()
        else:
            self._switch()

    def catch_up(self) -> bool:
        """Come to the meeting at which this replica waited; whether nobody obeys a stop there."""
        if self.state.is_waiting:
            self.state.is_waiting = False
            with self._context():
                self._meet(self._controller.plan_meeting(self.step))
                if self.is_final_phase:  # the others tell the loss of the step that this one made
                    self.record_loss(self.state.losses.forget())
                # Not in the forward pass: the host's loop has not begun, and when it does it takes
                # the parameters for gathered.
                self._queue.settle()
        return not self.state.is_stopping

    def leave(self) -> None:
        """Obey a stop: end at this step, in the middle of the round.

        The others may wait at a meeting: the record that says so releases them.
        """
        if self.state.is_stopping:
            return
        self.state.is_stopping = True
        with self._context():
            self._queue.settle()
            self._controller.leave()

    def finish(self) -> None:
        """Land and report what is left, losses too. All replicas must come, or have left."""
        with self._context():
            self._queue.settle()
            self._controller.close()
            self._queue.finish_exchanges()
        # All replicas have come here, so that nothing is suppressed at the end: none is ahead.
        self.state.suppressed_until_step = 0

    def close(self, *, groups: bool = False) -> None:
        """Ask the store no more, and let no exchange go on. Idempotent.

        Args:
            groups: whether to give up the transports, too: at a good end, when nothing is on its
                way and all replicas are through.
        """
        self._queue.close()
        self._board.close()
        if groups:
            self.groups.close()

    def loss_beside(self) -> ReplicaLostError | None:
        """The loss of a replica that the exchanges beside compute have seen, and training not yet.

        Where the host's own communication fails, that is why: other ranks have ended by it.
        """
        thread = self._queue.thread
        failure = None if thread is None else thread.failure
        if failure is None or not isinstance(placed := self._placed(failure), ReplicaLostError):
            return None
        return placed

    # ---- steps

    def before_gradients(self) -> None:
        """In warm-up and in the final phase, before the host moves what its optimizer does not."""
        if self.is_warmup:
            with self._context():
                sum_counts(self.host, self.groups)

    def average_gradients(self, num_tokens: Tensor | None = None) -> None:
        """In warm-up and in the final phase, average the gradient shards over the replicas.

        Args:
            num_tokens: see `rounds.synchronous.average_gradients`.
        """
        if self.is_warmup:
            with self._context():
                average_linear_buffers(self.host, self.groups)
                average_gradients(self.host, self.groups, num_tokens)

    def before_step(self) -> None:
        """Close the sync that lands: it may not once the inner optimizer has moved on. Then plan
        what follows the step."""
        self._home.remember()
        with self._context():
            self._queue.settle()
            self._queue.poll()
        self._after = self._plan_step()

    def after_step(self) -> None:
        """Count an attempted step, whether it was applied or skipped, and do what is due."""
        state, queue, plan, self._after = self.state, self._queue, self._after, None
        assert plan is not None, "a step that was not announced by `before_step`"
        landings, meeting = queue.num_landings, plan.meeting
        state.step += 1
        state.launch_steps += 1
        with self._context():
            is_asking = not plan.is_warmup and self._asks_for_meeting() and meeting is None
            if plan.landing:
                self._controller.land_due(plan.landing)
            if meeting is not None:
                self._meet(meeting)
            elif plan.is_warmup:
                state.is_stopping = self._common_stop.after_step(self.is_stop_seen)
                self._end_warmup_if_due()
            if plan.is_landing_due and queue.num_landings == landings:
                # The host has left out the gather of this step, as a landing would replace what it
                # gathers. But nothing landed here: the meeting began no sync, or this stage holds
                # none of its units.
                self.host.gather_parameters()
            queue.poll()
            self._flags.post(
                (Flag.MEET if is_asking else Flag.NONE)
                | (Flag.STOP if self._board.is_seen else Flag.NONE),
                self._board.heartbeat.steps_of_others,
            )

    def apply_up_to(self, num_shards: int) -> None:
        """Land the first `num_shards` shards of the plan, if a sync lands; let the others go on."""
        if self._queue.is_busy:
            with self._context(), self._home.entered():
                self._queue.apply_up_to(num_shards)
                self._queue.poll()

    # ---- what replicas do together besides syncs

    def check_in(self) -> bool:
        """Before an evaluation: whether all replicas come to it, so that none waits there alone.

        Collective: all ranks of all replicas that have not left.
        """
        state = self.state
        if not state.is_stopping:
            with self._context("the meeting before an evaluation or an end"):
                self._queue.settle()
                state.is_stopping = not self._controller.check_in()
        return not state.is_stopping

    def gather_evaluation(self, values: Tensor) -> Tensor:
        """[N, ...]: what all replicas have evaluated, however late they come.

        Collective: the sync group.
        """
        with self._context("the end of an evaluation"):
            return self._controller.meetings.gather(values)

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
        if self.was_warmup_step:
            self.reporter.on_losses(self.state.step, [loss])
        elif self.is_final_phase:
            with self._context():
                told = self.groups.meeting.all_gather(torch.tensor([loss], dtype=torch.float64))
            self.reporter.on_losses(self.state.step, [float(torch.nanmean(told))])
        else:
            self.state.losses.note(self.state.step, loss)

    def announce_stop(self) -> None:
        """Tell all replicas to stop at their next step boundary. Rank 0 of the replica does."""
        if self.groups.control.rank == 0:
            self._board.announce()

    def count_evaluation_batch(self) -> None:
        """A batch of an evaluation is a sign of life."""
        self._board.heartbeat.batches += 1

    # ---- checkpoints

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Whether a value is true on any rank of the replica; the same answer on all of them.

        Collective: the ranks of the replica.
        """
        count = torch.tensor([int(value)])
        self.groups.control.all_reduce(count)
        return int(count) > 0

    def settle(self) -> None:
        """Before anybody reads this replica's state: land what lands (then collective), and let
        nothing be on the wire. What is to land later does not land now."""
        with self._context():
            self._queue.settle()
            self._queue.finish_exchanges()

    def state_dict(self) -> EngineState:
        """All run-long state of this rank, after `settle`. Tensors are not copied.

        All ranks of the replica come.
        """
        return self.state.state_dict(
            is_asking=Flag.MEET in self._flags.read(),
            pending=self._queue.state_dict(),
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
        if saved["is_warmup"]:
            self.start(saved["step"], saved["round"])
            return
        self.groups.warm_up(has_exchanges=self.settings.num_phases > 0)
        outer, detectors = self._take_anchor(), saved["detectors"]
        outer.load(saved["outer"])
        if unfinished is not None:
            completion = Completion(self.settings, self.host, self.groups, outer, unfinished)
            with torch.no_grad():
                detectors = completion.run(detectors)
        detectors = detectors.for_replicas(self.groups.sync.size)
        self.state.load_state_dict(saved, outer, detectors, self._round_length())
        self._queue.load_state_dict(saved["pending"])
        self._attach(outer)
        if saved.get("is_at_sync", False):
            check_identical(self.host, self.groups, "after loading")
        self._flags.post(Flag.MEET if saved["is_asking"] else Flag.NONE)
        self.state.timeout.begin(saved["round_seconds"])
        self._begin_local_training()

    # ---- where training stands

    @property
    def step(self) -> int:
        """s, attempted optimizer steps so far."""
        return self.state.step

    @property
    def is_warmup(self) -> bool:
        """Whether the replicas train in step, in the warm-up or in the final synchronous phase:
        there is no anchor."""
        return self.state.outer is None

    @property
    def is_final_phase(self) -> bool:
        """Whether the next step is one of the final synchronous phase."""
        return self.state.last_local_step is not None

    @property
    def was_warmup_step(self) -> bool:
        """Whether gradients were averaged in the last step, of the warm-up or the final phase."""
        is_in_phase = self.is_warmup and self.state.step != self.state.last_local_step
        return is_in_phase or self.settings.schedule.is_warmup(self.state.step)

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas may differ: they have made steps since the last sync of all units,
        or it keeps something of their parameters."""
        return not self.is_warmup and not self.state.replicas_identical

    @property
    def is_landing_due(self) -> bool:
        """Whether the result of a sync replaces parameters right after the step being attempted.
        Known between `before_step` and `after_step`; False elsewhere."""
        return self._after is not None and self._after.is_landing_due

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the last sync have still to land."""
        return self._queue.has_pending_units

    @property
    def is_stop_seen(self) -> bool:
        """Whether a stop from outside has come to this replica; the same on all its ranks."""
        return Flag.STOP in self._flags.latest

    @property
    def is_stopping(self) -> bool:
        """Whether this replica must end here, because a replica obeys a stop."""
        return self.state.is_stopping

    @property
    def suppresses_joint_actions(self) -> bool:
        """Whether evaluations, saves and exits are suppressed at this step: replicas were stopped
        at different steps, and some have passed this one before."""
        return self.state.step <= self.state.suppressed_until_step

    @property
    def has_replica_left(self) -> bool:
        """Whether the last meeting was the last one, because a replica obeyed a stop."""
        return self.state.has_left

    @property
    def records(self) -> Sequence[ControlRecord]:
        """Of the last meeting, by replica; none before it."""
        return self.state.records

    @property
    def steps_of_others(self) -> int:
        """Optimizer steps that the other replicas have made in this launch: at least so many, the
        same number on all ranks of this replica. For display; no decision may follow from it."""
        return self._flags.steps_of_others

    @property
    def num_syncs(self) -> int:
        """Syncs so far."""
        return self.state.rounds.count

    @property
    def began_identical(self) -> bool:
        """Whether all replicas held the anchor in all units when the round began."""
        return self.state.rounds.replicas_identical

    @property
    def inner_steps(self) -> int:
        """Steps of this replica in the round that is under way."""
        return self.state.inner_steps

    @property
    def num_dealings(self) -> int:
        """How often samples were dealt; data prefetched under another dealing is void."""
        return self.state.num_dealings

    @property
    def dealing(self) -> Dealing | None:
        """The ledger of samples of the round under way; None where steps are counted."""
        return self.state.rounds.dealing

    @property
    def num_shard_elements(self) -> int:
        """Elements that all ranks of the replica hold of all units together."""
        return int(self._queue.footprint.unit_numels.sum())

    # ---- phases

    def _plan_step(self) -> StepPlan:
        if self.is_warmup:
            return StepPlan(is_warmup=True)
        return self._controller.plan_step(is_asked=Flag.MEET in self._flags.read())

    def _asks_for_meeting(self) -> bool:
        """After an inner step: whether this rank, if it is rank 0, asks for a meeting."""
        timer = self.state.timer
        return timer is not None and timer.after_step()

    def _switch(self) -> None:
        """End the warm-up: make sure that the replicas agree, then take the anchor (method 2.3)."""
        self._common_stop.drain()
        broadcast_if_different(self.host, self.groups, self.reporter)
        outer = self._take_anchor()
        self._attach(outer)
        self.state.begin_rounds(outer, self._round_length())
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
        if self.is_final_phase:
            return
        if self.host.progress().begins_final_phase:
            self.state.last_local_step = self.state.step
            self._tell_of_final_phase()
        elif self.settings.schedule.is_switch(self.state.step):
            self._switch()

    def _end_rounds(self) -> None:
        """End local training: all lands, and what replicas hold becomes equal; then gradients are
        averaged at every step, as in the warm-up."""
        self._queue.settle()
        begin_final_phase(self.host, self.groups, self.reporter, self.state.accepted)
        self.host.set_local_training(False)
        self.host.attach_outer_state({}, {})
        self.state.end_rounds()
        self._tell_of_final_phase()

    def _tell_of_final_phase(self) -> None:
        self.reporter.on_message(
            f"final synchronous phase after step {self.state.step}: gradients are averaged over "
            "the replicas at every step"
        )

    def _meet(self, meeting: MeetingPlan) -> None:
        self.clock.pause()  # to wait for others is no inner training
        is_met = self._controller.meet(meeting)
        self.state.is_stopping = self.state.is_waiting = not is_met
        if is_met and meeting.ends_rounds:
            self._end_rounds()
        self.state.begin_phase()

    def _take_anchor(self) -> OuterState:
        return OuterState.take(
            self.host.plan,
            self.groups.sync.device,
            offload=self.settings.offload,
            wire=self.settings.wire,
            num_replicas=self.groups.sync.size,
            streams=self.groups.sync.streams,
            max_staged=self.settings.depth + 1,  # those in flight, and the next one
        )

    def _attach(self, outer: OuterState) -> None:
        units = outer.units.items()
        anchors = {name: unit.anchor for name, unit in units}
        self.host.attach_outer_state(anchors, {name: unit.momentum for name, unit in units})

    def _round_length(self) -> int:
        """Steps of a round that begins now, where a count decides; else 0."""
        if self.settings.timed is not None:
            return 0
        start = RoundStart(self.state.step, self.host.progress().next_lr)
        return self.settings.schedule.round_length(start)

    def _placed(self, error: Exception) -> Exception:
        """An error of the thread: of a lost replica, with who that was and where."""
        if not isinstance(error, ReplicaLostError):
            return error
        try:
            with self._context():
                raise error
        except ReplicaLostError as placed:
            return placed

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
            if error.is_placed:
                raise
            usual = f"the sync of round {self._round}"
            if self.is_warmup:
                usual = "the final synchronous phase" if self.is_final_phase else "the warm-up"
            place = f"{what or usual} (step {self.step})"
            raise located(error, self._board.heartbeat, place) from error
        except Exception as error:
            error.add_note(f"in round {self._round} of EDiT, after step {self.step}")
            raise

    @property
    def _round(self) -> int:
        """The round whose sync is under way, or comes next."""
        sync = self._queue.landing
        return sync.plan.round if sync is not None else self.state.rounds.count + 1
