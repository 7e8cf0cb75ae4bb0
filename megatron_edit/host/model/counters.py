"""Counts the progress of Megatron's training (iterations, samples, schedule), and reads its end."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)

from megatron_edit.comm.placement import Placement
from megatron_edit.engine import Progress
from megatron_edit.host.batch_stages import has_changing_batch
from megatron_edit.host.seams.megatron import InnerOptimizer, ParamScheduler
from megatron_edit.method.ledger import IN_ORDER, SampleOrder, share_of
from megatron_edit.method.schedule import last_local


class TrainingCounters:
    """The counters of one replica's training, in Megatron's arguments and schedule.

    Args:
        args: Megatron's arguments.
        scheduler: Megatron's `OptimizerParamScheduler`.
        final_fraction: `Settings.averaged_fraction`.

    Attributes:
        loop: Megatron's intervals and counters while replicas run at their own speeds.
        order: order of samples.
        samples: samples consumed by this replica since the start of training.
        iteration: Megatron's iteration of the last step. Skipped iterations count; after a resume
            of A-EDiT it starts from global batches.
        last_local_iteration: Megatron's last iteration before the final synchronous phase; without
            this phase, the last one of training.
        samples_at_start: samples consumed before this launch, or before the final synchronous phase
            of A-EDiT, by the other replicas, and by this one.
    """

    def __init__(
        self,
        args: Namespace,
        scheduler: ParamScheduler,
        placement: Placement,
        final_fraction: float,
    ) -> None:
        self._args, self._scheduler, self._placement = args, scheduler, placement
        self.loop = LoopControl(args, scheduler)
        self.order = IN_ORDER
        self.samples = 0
        self.samples_at_start = (0, 0)
        self.iteration = int(args.iteration)
        self.last_local_iteration = last_local_iteration(args, final_fraction)
        self._num_sharing = placement.num_replicas  # replicas that share the blocks of the round
        self._early_advance = 0  # samples by which the schedule has advanced before a meeting
        self._pending = 0  # samples by which Megatron will advance the schedule after the step

    def resume(self, samples: int, consumed: int, order: SampleOrder) -> None:
        """Restore the counters from a checkpoint.

        Args:
            samples: samples consumed by this replica.
            consumed: samples consumed by all replicas.
            order: order of samples.
        """
        self.samples, self.order = samples, order
        self.samples_at_start = (consumed - samples, samples)
        self.iteration = int(self._args.iteration)

    def set_pending_schedule(self, samples: int) -> None:
        """Report the schedule's position less `samples`, until the next step."""
        self._early_advance = samples

    def set_schedule(self, position: int) -> None:
        """Set the position of the learning-rate schedule, in samples of all replicas."""
        self._scheduler.num_steps = position
        self._scheduler.step(increment=0)

    @contextmanager
    def with_consumed_samples(self, samples: int | None) -> Iterator[None]:
        """Set Megatron's count of consumed samples inside the context; None keeps it."""
        kept = self._args.consumed_train_samples
        self._args.consumed_train_samples = kept if samples is None else samples
        try:
            yield
        finally:
            self._args.consumed_train_samples = kept

    def iteration_of(self, step: int, iteration: int, own_step: int) -> int:
        """Return Megatron's iteration of a step; skipped iterations make no step.

        Args:
            step: step of this or another replica.
            iteration: last iteration of this replica.
            own_step: last step of this replica.
        """
        skipped = set(self._args.iterations_to_skip)
        if not skipped:  # fast path: called for each loss of a round
            return iteration + step - own_step
        while iteration > 0 and (own_step > step or iteration in skipped):
            own_step -= iteration not in skipped
            iteration -= 1
        while own_step < step:
            iteration += 1
            own_step += iteration not in skipped
        return iteration

    def count_step(self, *, was_applied: bool) -> None:
        """Count the samples of a step; a step that fp16 skipped does not advance the schedule."""
        self._early_advance = 0
        last, self.iteration = self.iteration, int(self._args.curr_iteration) + 1
        # Iterations that --iterations-to-skip has skipped since the last step count, too.
        self.samples += self.samples_per_step * (self.iteration - last)
        self._pending = self.batch if was_applied else 0
        if was_applied and self._num_sharing != self._placement.num_replicas:
            # Megatron advances its schedule by the nominal batch.
            self._scheduler.num_steps += self.samples_per_step * self._num_sharing - self.batch
        self.loop.end_common_step()

    @property
    def samples_per_step(self) -> int:
        """Samples that one step of this replica consumes."""
        return int(get_num_microbatches()) * self.chunk

    @property
    def batch(self) -> int:
        """Samples that one step of all replicas consumes."""
        return self.samples_per_step * self._placement.num_replicas

    @property
    def chunk(self) -> int:
        """Samples that one micro-batch of this replica consumes."""
        ranks = self._args.data_parallel_size // self._placement.num_replicas
        return int(self._args.micro_batch_size * ranks)

    @property
    def last_local_step(self) -> int:
        """The step of `last_local_iteration`; skipped iterations make no step."""
        last = self.last_local_iteration
        skipped = {int(iteration) for iteration in self._args.iterations_to_skip}
        return last - sum(0 < iteration <= last for iteration in skipped)

    @property
    def target_blocks(self) -> int:
        """Steps of all replicas together, before the final synchronous phase."""
        return self.last_local_iteration * self._placement.num_replicas

    @property
    def has_final_phase(self) -> bool:
        """Whether there is an iteration in the final synchronous phase."""
        return self.last_local_iteration < self.loop.train_iters

    def set_final_fraction(self, fraction: float) -> tuple[int, bool]:
        """Set the fraction of the final synchronous phase, before it begins.

        Returns:
            The last step before it, and whether there is such a phase.
        """
        self.last_local_iteration = last_local_iteration(self._args, fraction)
        return self.last_local_step, self.has_final_phase

    def progress(self, optimizers: Sequence[InnerOptimizer]) -> Progress:
        """Return the progress of training from Megatron's iteration and learning-rate schedule.

        Args:
            optimizers: have the learning rates of their parameter groups.
        """
        # `curr_iteration` counts from 0 and is unset or stale before Megatron's loop.
        current = max(getattr(self._args, "curr_iteration", -1), self._args.iteration - 1)
        num_iterations, last_local = self._args.train_iters, self.last_local_iteration
        is_last_step = self._skips_all(range(current + 2, num_iterations + 1))
        is_last_local_step = self._skips_all(range(current + 2, last_local + 1))
        # The schedule advances after the step, unless training was interrupted in between.
        last = int(self._scheduler.num_steps) - self._early_advance
        pending = self._early_advance or self._pending
        return Progress(
            samples=self.samples,
            schedule_position=last,
            pending_schedule=pending,
            is_last_step=is_last_step,
            begins_final_phase=last_local < num_iterations and is_last_local_step,
            inner_lr=rate_at(optimizers, self._scheduler, last, is_peak=False),
            next_lr=rate_at(optimizers, self._scheduler, last + pending, is_peak=True),
        )

    def _skips_all(self, iterations: range) -> bool:
        """Whether Megatron skips all of these iterations, so that none makes a step."""
        skipped = set(self._args.iterations_to_skip)
        return all(iteration in skipped for iteration in iterations[: len(skipped) + 1])

    def begin_local(self, *, is_over: bool) -> None:
        """Let Megatron's loop run at this replica's own speed from now on."""
        self.loop.override_intervals(self.samples * self._placement.num_replicas, is_over=is_over)

    def end_local(self) -> int:
        """Count samples as if all replicas had made the same steps; return these steps."""
        consumed, place = self.loop.begin_common_steps(), self._placement
        self.samples = share_of(consumed, place.replica, place.num_replicas)
        self.samples_at_start = (consumed - self.samples, self.samples)
        return -(-consumed // int(self._args.global_batch_size))

    def samples_of(self, blocks: int) -> int:
        """Return the samples that all replicas have consumed once so many blocks are consumed."""
        return self.order.start + blocks * self.samples_per_step

    def join_local(self, blocks: int, order: SampleOrder, *, is_over: bool) -> None:
        """Begin local training as a replica that joins others.

        Args:
            blocks: consumed by all replicas so far.
            order: of samples.
            is_over: whether these are all.
        """
        self.samples, self.order = 0, order
        samples = self.samples_of(blocks)
        self._args.consumed_train_samples = samples
        self.set_schedule(samples)
        self.loop.override_intervals(samples, is_over=is_over)

    def end_round(
        self, samples: int, *, num_replicas: int, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        """Set Megatron's counters and schedule to the samples consumed by all replicas so far."""
        self._num_sharing = num_replicas
        self.loop.end_round(
            samples,
            self._pending,
            is_over=is_over,
            next_meeting_without_step=next_meeting_without_step,
        )

    def peak_rate(self, optimizers: Iterable[InnerOptimizer]) -> float:
        """Return the largest learning rate of the optimizers' groups at the schedule's peak."""
        return peak_rate(optimizers, self._scheduler)

    def advance_schedule(self, samples: int) -> None:
        """Move Megatron's learning-rate schedule forward by `samples` of all replicas."""
        self._scheduler.step(increment=samples)


def peak_rate(optimizers: Iterable[InnerOptimizer], scheduler: ParamScheduler) -> float:
    """Return the largest learning rate of all parameter groups at the schedule's peak."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return max((float(group.get("max_lr", scheduler.max_lr)) for group in groups), default=0.0)


def rate_at(
    optimizers: Iterable[InnerOptimizer],
    scheduler: ParamScheduler,
    position: int,
    *,
    is_peak: bool,
) -> float:
    """Return the largest learning rate of all parameter groups.

    Args:
        optimizers: optimizers with the groups.
        scheduler: Megatron's `OptimizerParamScheduler`; not changed.
        position: position in samples of all replicas.
        is_peak: during the schedule's warm-up return its peak (method section 6).
    """
    if is_peak and position <= scheduler.lr_warmup_steps:
        return peak_rate(optimizers, scheduler)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    kept, scheduler.num_steps = scheduler.num_steps, position
    try:
        return max((float(scheduler.get_lr(group)) for group in groups), default=0.0)
    finally:
        scheduler.num_steps = kept


def last_local_iteration(args: Namespace, final_fraction: float) -> int:
    """Return the last iteration with a local step; without a final phase, the last of training.

    The fraction is of iterations, or with `--train-samples` of samples, like that of
    `--lr-warmup-fraction`. An iteration is local if fewer samples than the local ones were
    consumed before it.

    Args:
        args: Megatron's arguments, with `train_iters` set.
        final_fraction: fraction of training in the final phase; in [0, 1].
    """
    if not args.train_samples or not final_fraction:
        return last_local(int(args.train_iters), final_fraction)
    samples = last_local(int(args.train_samples), final_fraction)
    if not has_changing_batch(args):
        return min(int(args.train_iters), -(-samples // int(args.global_batch_size)))
    consumed, iteration = 0, 0
    while consumed < samples and iteration < args.train_iters:
        update_num_microbatches(consumed, consistency_check=False)
        consumed += get_current_global_batch_size()
        iteration += 1
    update_num_microbatches(int(args.consumed_train_samples), consistency_check=False)
    return iteration


def is_end_requested(args: Namespace) -> bool:
    """Whether this process received the exit signal, or its time limit has passed.

    Megatron checks the same at each step boundary, but with collectives, which a waiting replica
    cannot use.

    Args:
        args: Megatron's arguments.
    """
    return exit_reason(args) is not None


def exit_reason(args: Namespace) -> str | None:
    """Return why this process should exit early; None if it should not.

    Args:
        args: Megatron's arguments.
    """
    import megatron.training.training as training

    # The handler's only public query is a collective.
    handler = training.get_signal_handler() if args.exit_signal_handler else None
    if getattr(handler, "_signal_received", False):
        return "a signal"
    limit = args.exit_duration_in_mins
    if limit and (time.time() - training._TRAIN_START_TIME) / 60 > limit:
        return f"--exit-duration-in-mins {limit}"
    return None


# ---- Controls Megatron's training loop if replicas make different numbers of steps (A-EDiT)
#
# The loop counts this replica's own iterations. The user's settings in global batches (when to
# end, evaluate, save or exit) are applied to the samples of all replicas together, at the sync at
# which these cross a multiple of the interval; between syncs the intervals are hidden from the
# loop. Logs count the samples of all replicas, too (`host/model/progress.py`). In the final
# synchronous phase all replicas make the same steps, and the same is done at each of them; the
# loop still counts the iterations of this replica.


_INTERVALS = ("eval_interval", "save_interval", "non_persistent_save_interval", "exit_interval")
_FIRST_EVALUATION = "start_eval_at_iter"
_OVERRIDDEN = (*_INTERVALS, _FIRST_EVALUATION, "train_iters")


@dataclass
class LoopControl:
    """Overrides Megatron's arguments while replicas run at their own speeds.

    Attributes:
        args: Megatron's arguments, which its loop reads at every iteration.
        scheduler: Megatron's `OptimizerParamScheduler`.
    """

    args: Namespace
    scheduler: ParamScheduler
    _given: dict[str, Any] = field(default_factory=dict)
    _samples: int = 0
    _has_begun: bool = False  # whether the loop has begun its first step
    _has_common_steps: bool = False  # whether all replicas make the same steps, after the rounds

    def override_intervals(self, samples: int, *, is_over: bool) -> None:
        """Override the intervals from the switch on; what is due at the step of the switch happens.

        Args:
            samples: samples consumed by all replicas so far.
            is_over: whether training ends here.
        """
        self._given = {name: getattr(self.args, name, None) for name in _OVERRIDDEN}
        self._samples = samples
        if is_over:
            self._end()

    def begin_step(self) -> None:
        """Hide the intervals again at the beginning of an optimizer step, and continue training."""
        self._has_begun = True
        if self._given:
            self._hide_intervals()
            self.args.train_iters = max(self._given["train_iters"], self._iteration + 1)

    def end_round(
        self, samples: int, pending: int, *, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        """Update Megatron's counters after a meeting, which takes place inside an optimizer step.

        Args:
            samples: samples consumed by all replicas so far.
            pending: samples by which Megatron will advance the schedule after the step.
            is_over: whether training ends here.
            next_meeting_without_step: whether a replica joins the next meeting without a step.
                What is due now is then postponed to that meeting, because no joint action of all
                replicas can take place in between.
        """
        # Before the loop begins, outside of a step, Megatron will add nothing.
        batch = self.args.global_batch_size if self._has_begun else 0
        if not next_meeting_without_step:
            self._reveal_intervals(samples, self.args.global_batch_size)
        self.scheduler.num_steps = samples - pending
        self.scheduler.step(increment=0)
        self.args.consumed_train_samples = samples - batch  # Megatron will add one batch
        if is_over:
            self._end()

    def begin_common_steps(self) -> int:
        """Begin the final synchronous phase; return the samples consumed by all replicas."""
        self._has_common_steps = True
        # Within a step Megatron will add a batch.
        batch = self.args.global_batch_size if self._has_begun else 0
        return int(self.args.consumed_train_samples + batch)

    def end_common_step(self) -> None:
        """After a step of the final phase of this launch's rounds, show the loop what is due."""
        if not self._has_common_steps:
            return
        batch = int(self.args.global_batch_size)
        samples = int(self.args.consumed_train_samples) + batch
        self._reveal_intervals(samples, batch)
        if samples + batch > self.train_iters * batch:
            self._end()

    @contextmanager
    def with_global_iterations(self, iteration: int) -> Iterator[None]:
        """Let Megatron's arguments count global iterations inside the context.

        `train_iters` is the user's; intervals due at the loop's current iteration are due at
        `iteration`.

        Args:
            iteration: complete global batches consumed by all replicas.
        """
        # Not all are in Megatron 0.16.
        kept: dict[str, Any] = {name: getattr(self.args, name, None) for name in self._given}
        for name in kept.keys() & set(_INTERVALS):
            if kept[name] and self._iteration % kept[name] == 0:
                setattr(self.args, name, iteration)
        self.args.train_iters = self.train_iters
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self.args, name, value)

    @property
    def train_iters(self) -> int:
        """The user's number of iterations: global batches of the whole training."""
        return int(self._given.get("train_iters", self.args.train_iters))

    def release(self) -> None:
        """Restore the user's arguments. Idempotent."""
        for name, value in self._given.items():
            setattr(self.args, name, value)
        self._given = {}

    @property
    def _iteration(self) -> int:
        """Number of the current iteration, from 1."""
        return int(self.args.curr_iteration) + 1

    def _reveal_intervals(self, samples: int, batch: int) -> None:
        """Make the current iteration a multiple of the intervals that the samples crossed."""
        before, self._samples = self._samples, max(self._samples, samples)
        for name in _INTERVALS:
            interval = self._given[name]
            if interval and before // (interval * batch) < samples // (interval * batch):
                setattr(self.args, name, self._iteration)
        first = self._given[_FIRST_EVALUATION]
        if first is not None and samples < first * batch:
            self.args.eval_interval = None

    def _hide_intervals(self) -> None:
        for name in (*_INTERVALS, _FIRST_EVALUATION):
            setattr(self.args, name, None)

    def _end(self) -> None:
        # At a switch before the first step there is no iteration yet; the loop then does not run.
        self.args.train_iters = self._iteration if self._has_begun else self.args.iteration
