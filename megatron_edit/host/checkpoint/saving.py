"""Saving: whether a save that Megatron starts is written now, in which form and by which name.

Megatron starts saves by its own flags; `save_checkpoint` is wrapped. Every replica takes part in
every save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_edit.constants import ALL, LEADER
from megatron_edit.engine import EditEngine
from megatron_edit.host.checkpoint.writing import CheckpointWriter, SavePlan
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.patching import Call
from megatron_edit.observe.console import say


class SaveControl:
    """Replaces Megatron's `save_checkpoint`.

    Args:
        policy: `--edit-inner-state`.
        engine: gives the state of the round.
        progress: of all replicas.
        is_first: whether this is global rank 0, which prints.
    """

    def __init__(
        self,
        policy: str,
        writer: CheckpointWriter,
        engine: EditEngine,
        host: MegatronHost,
        progress: RunProgress,
        *,
        is_first: bool,
    ) -> None:
        self._policy = policy
        self._writer = writer
        self._engine = engine
        self._host = host
        self._progress = progress
        self._is_first = is_first
        self._is_ending = False  # a save now is the last one of the run
        self._is_deferred = False  # a save waits for the next sync
        self._deciding_at: int | None = None  # iteration, inside `exit_decision`
        self._saved_at: tuple[int, int] | None = None  # step and syncs

    def save(self, call: Call[None]) -> None:
        """Write, defer or skip a checkpoint."""
        engine = self._engine
        engine.settle()
        if not self._is_writer:
            return
        if self._is_premature:
            return  # every replica saves when it stops
        if engine.status.suppresses_joint_actions and not self._is_ending:
            return  # some replicas are already past this save
        is_stopping = self._is_ending and engine.status.has_replica_stopped
        now = engine.status.step, engine.status.num_syncs
        if now == self._saved_at and not is_stopping:
            return  # at the end of training; no replica has changed since
        engine.clock.pause()
        engine.land_all()
        if self._waits_for_sync():
            self._is_deferred = True
        else:
            with engine.saved_parameters():
                self._writer.write(self._plan(call.arguments["iteration"]), call)
            self._saved_at, self._is_deferred = now, False
        engine.clock.resume()

    @contextmanager
    def exit_decision(
        self, iteration: int, *, is_planned: bool, is_suppressed: bool = False
    ) -> Iterator[None]:
        """Wrap Megatron's check of its save interval and exit conditions after an iteration.

        Args:
            iteration: the last one.
            is_planned: whether all replicas exit now.
            is_suppressed: whether some replicas were past this iteration before the resume.
        """
        args = self._host.arguments
        interval, exit_interval = args.save_interval, args.exit_interval
        if self._is_deferred_save_due:
            args.save_interval = iteration  # for Megatron to save now
        if is_suppressed:
            args.exit_interval = None
        self._deciding_at, self._is_ending = iteration, is_planned
        try:
            yield
        finally:
            self._deciding_at, self._is_ending = None, False
            args.save_interval, args.exit_interval = interval, exit_interval

    @contextmanager
    def final_save(self) -> Iterator[None]:
        """Inside, a save is the last one of the run, and is not deferred."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    @property
    def _is_writer(self) -> bool:
        """Whether this replica takes part in saves. In an elastic run only the leader does, where
        it has made no step since a commit."""
        elastic = self._engine.elastic
        if elastic is None:
            return True
        is_able = elastic.membership.is_leader and not elastic.has_dropped_round
        return is_able and not self._is_mid_round

    @property
    def _is_mid_round(self) -> bool:
        """Whether a checkpoint would hold replicas that differ. In the rounds of an elastic run it
        holds the last commit, and is written before they make another step."""
        status = self._engine.status
        if self._engine.elastic is None or status.is_warmup:
            return status.is_mid_round
        return status.inner_steps > 0

    @property
    def should_end_training(self) -> bool:
        """Whether training should end because saves fail; known only to global rank 0."""
        return self._writer.should_end_training

    @property
    def _is_deferred_save_due(self) -> bool:
        """Whether a deferred save is due: the replicas have just synced."""
        return self._is_deferred and not self._is_mid_round

    @property
    def _is_premature(self) -> bool:
        """Whether Megatron saves because this replica is to stop, before the others know of it."""
        interval = self._host.arguments.save_interval
        is_due = interval and self._deciding_at is not None and self._deciding_at % interval == 0
        return self._deciding_at is not None and not self._is_ending and not is_due

    # ---- one save

    def _waits_for_sync(self) -> bool:
        """Return whether a save within a round is deferred to its sync: one inner state is kept."""
        if self._policy == ALL or self._is_ending or not self._is_mid_round:
            return False
        if not self._is_deferred and self._is_first:
            say(
                f"the checkpoint of iteration {self._progress.iteration} waits for the next sync "
                f"(--edit-inner-state {self._policy})"
            )
        return True

    def _plan(self, iteration: int) -> SavePlan:
        status = self._engine.status
        own, is_mid_round = iteration, self._is_mid_round
        is_stop_save = self._is_ending and not status.is_warmup and status.has_replica_stopped
        if is_stop_save:
            # Replicas stop at different steps: the records that all have exchanged decide.
            records = status.records
            has_steps = any(record.inner_steps for record in records)
            is_mid_round = has_steps or not status.round_began_identical
            iteration = self._host.counters.iteration_of(records[0].step, iteration, status.step)
        samples = self._samples()
        if samples is not None:
            own = iteration = self._progress.iteration_at(samples)
        is_all = not status.is_warmup and (self._is_ending or self._policy == ALL)
        is_all = is_all and self._engine.elastic is None
        return SavePlan(
            iteration=iteration,
            own_iteration=own,
            name=f"stop/{iteration}" if is_stop_save else f"{iteration}/{status.num_syncs}",
            is_stop_save=is_stop_save,
            form=ALL if is_all else LEADER,
            has_outer=not status.is_warmup,
            has_anchor=is_mid_round and not status.is_warmup,
            samples=samples,
        )

    def _samples(self) -> int | None:
        """Consumed by all replicas, where they make unequal steps; else None."""
        engine = self._engine
        if not engine.settings.assigns_blocks or engine.status.is_warmup:
            return None
        if engine.elastic is not None and engine.status.assignment is not None:
            return self._host.samples_of(engine.status.assignment.num_consumed)
        if not (records := engine.status.records):  # local training has just begun
            return self._host.counters.samples * self._progress.num_replicas
        return sum(record.samples for record in records)
