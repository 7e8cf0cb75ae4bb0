"""Saving: when Megatron asks for it, whether now, in which form, and under which name.

Megatron asks for saves as ever; its call is wrapped. Every replica comes to every save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_edit.constants import ALL, LEADER
from megatron_edit.engine import EditEngine
from megatron_edit.host.checkpoint.writing import CheckpointWriter, SavePlan
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.calls import Call
from megatron_edit.observe.console import say


class SaveControl:
    """Answers Megatron's `save_checkpoint`.

    Args:
        policy: `--edit-inner-state`.
        writer: writes what is decided here.
        engine: knows where the round stands.
        host: of the engine.
        progress: of all replicas.
        is_first: whether this is the first rank of all, which speaks.
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
        self._is_ending = False  # what is saved now is all that will be left
        self._is_deferred = False  # a save waits for the next sync
        self._asked_at: int | None = None  # iteration, while Megatron decides whether to exit
        self._saved_step: int | None = None

    def save(self, call: Call[None]) -> None:
        """Megatron's `save_checkpoint`."""
        engine = self._engine
        if self._is_premature:
            return  # every replica saves when it stops
        if engine.status.suppresses_joint_actions and not self._is_ending:
            return  # some replicas have passed this save
        is_leaving = self._is_ending and engine.status.has_replica_left
        if engine.status.step == self._saved_step and not is_leaving:
            return  # at the end of training; nothing has changed, on no replica
        engine.clock.pause()
        engine.land_all()
        if self._waits():
            self._is_deferred = True
        else:
            self._writer.write(self._plan(call.arguments["iteration"]), call)
            self._saved_step, self._is_deferred = engine.status.step, False
        engine.clock.resume()

    @contextmanager
    def deciding(
        self, iteration: int, *, is_planned: bool, is_suppressed: bool = False
    ) -> Iterator[None]:
        """Inside, Megatron saves at its intervals, and decides whether to exit.

        Args:
            iteration: that is over.
            is_planned: whether it will exit, on all replicas.
            is_suppressed: whether some replicas have passed this iteration before.
        """
        args = self._host.arguments
        interval, exit_interval = args.save_interval, args.exit_interval
        if self._is_deferred_save_due:
            args.save_interval = iteration  # for Megatron to save now
        if is_suppressed:
            args.exit_interval = None
        self._asked_at, self._is_ending = iteration, is_planned
        try:
            yield
        finally:
            self._asked_at, self._is_ending = None, False
            args.save_interval, args.exit_interval = interval, exit_interval

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside, what is saved is all that will be left."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    @property
    def gives_up(self) -> bool:
        """Whether training should end, as saves fail; only the first rank of all knows."""
        return self._writer.gives_up

    @property
    def _is_deferred_save_due(self) -> bool:
        """Whether a save is due, and the replicas have just met."""
        return self._is_deferred and not self._engine.status.is_mid_round

    @property
    def _is_premature(self) -> bool:
        """Whether Megatron saves because this replica was asked to stop: the others are not yet."""
        interval = self._host.arguments.save_interval
        is_due = interval and self._asked_at is not None and self._asked_at % interval == 0
        return self._asked_at is not None and not self._is_ending and not is_due

    # ---- one save

    def _waits(self) -> bool:
        """Whether a save between two syncs waits for the next: the policy keeps one inner state."""
        engine = self._engine
        if self._policy == ALL or self._is_ending or not engine.status.is_mid_round:
            return False
        if not self._is_deferred and self._is_first:
            say(
                f"the checkpoint of iteration {self._progress.iteration} waits for the next sync "
                f"(--edit-inner-state {self._policy})"
            )
        return True

    def _plan(self, iteration: int) -> SavePlan:
        status = self._engine.status
        own, is_mid_round = iteration, status.is_mid_round
        is_of_a_stop = self._is_ending and not status.is_warmup and status.has_replica_left
        if is_of_a_stop:
            # Replicas leave wherever they are; what each has told the others decides for all.
            records = status.records
            has_steps = any(record.inner_steps for record in records)
            is_mid_round = has_steps or not status.began_identical
            iteration = self._host.iteration_of(records[0].step, iteration, status.step)
        samples = self._samples()
        if samples is not None:
            own = iteration = self._progress.iteration_at(samples)
        is_all = not status.is_warmup and (self._is_ending or self._policy == ALL)
        return SavePlan(
            iteration=iteration,
            own_iteration=own,
            name=f"stop/{iteration}" if is_of_a_stop else f"{iteration}/{status.num_syncs}",
            is_of_a_stop=is_of_a_stop,
            form=ALL if is_all else LEADER,
            has_outer=not status.is_warmup,
            has_anchor=is_mid_round and not status.is_warmup,
            samples=samples,
        )

    def _samples(self) -> int | None:
        """Consumed by all replicas, where they make unequal steps; else None."""
        engine = self._engine
        if engine.settings.timed is None or engine.status.is_warmup:
            return None
        if not (records := engine.status.records):  # local training has just begun
            return self._host.samples * self._progress.num_replicas
        return sum(record.samples for record in records)
