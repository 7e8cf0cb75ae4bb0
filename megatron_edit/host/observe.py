"""Averages Megatron's logged and evaluated losses over the replicas and writes event files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.engine import EditEngine
from megatron_edit.host.log_lines import LogLines
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.megatron import Evaluation, ForwardStep, Losses, Timers
from megatron_edit.host.seams.patching import Call
from megatron_edit.observe import records
from megatron_edit.observe.console import warn
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.records import Iteration

_LOSS = "lm loss"


def with_own_world_size[R](start_time: Callable[[], R]) -> Callable[[], R]:
    """Wrap Megatron's reading of the progress log, whose lines have one replica's world size."""

    @wraps(start_time)
    def of_this_replica() -> R:
        from megatron.training import get_args

        args = get_args()
        global_size, args.world_size = args.world_size, dist.get_world_size()
        try:
            return start_time()
        finally:
            args.world_size = global_size

    return of_this_replica


def with_progress_log_optional(append: Callable[..., None]) -> Callable[..., None]:
    """Wrap the writing of the progress log (`--log-progress`): errors become a warning."""
    failed: list[OSError] = []

    @wraps(append)
    def tried(*args: object, **kwargs: object) -> None:
        try:
            append(*args, **kwargs)
        except OSError as error:
            if not failed:
                warn(f"the progress log cannot be written ({error}); training goes on without it")
            failed.append(error)

    return tried


@contextmanager
def _without_time_limit() -> Iterator[None]:
    """Keep Megatron from ending an evaluation on one replica; it checks the time right after it."""
    from megatron.training import get_args

    args = get_args()
    limit, args.exit_duration_in_mins = args.exit_duration_in_mins, None
    try:
        yield
    finally:
        args.exit_duration_in_mins = limit


class Observer:
    """Handles Megatron's calls that log and evaluate.

    Args:
        engine: gives the phase, and gathers losses.
        host: gives the number of samples.
        progress: progress of all replicas.
        timers: Megatron's timers.
    """

    def __init__(
        self,
        events: EventLog,
        engine: EditEngine,
        host: MegatronHost,
        progress: RunProgress,
        timers: Timers,
    ) -> None:
        self._events = events
        self._engine = engine
        self._host = host
        self._progress = progress
        self._lines = LogLines(progress, timers)
        self._step_began = time.monotonic()
        self._split: str | None = None  # split of the evaluation that Megatron is reporting
        self._num_sets = 0  # data sets evaluated in it so far

    def begin_step(self) -> None:
        """Record the beginning of a step; resume the clock if a checkpoint had paused it."""
        self._engine.clock.resume()
        self._lines.begin_step()
        self._step_began = time.monotonic()

    def log[R](self, call: Call[R]) -> R:
        """Handle `training_log`: write event files, and record the loss for the next meeting."""
        given = call.arguments
        self.on_iteration(given["loss_dict"], given["learning_rate"], given["grad_norm"])
        return self._lines.log(call)

    def evaluate(self, call: Call[Evaluation]) -> Evaluation:
        """Handle `evaluate`: replace its losses by their means over the replicas."""
        if not self.begin_evaluation():
            return None, None, True  # the value for an expired time limit: Megatron reports nothing
        counts = dict[str, Tensor]()
        given = call.arguments
        given["forward_step_func"] = self._counting(given["forward_step_func"], counts)
        with _without_time_limit():
            losses, *rest = call.proceed()
        self.end_evaluation(losses, counts)
        return (losses, *rest)

    def begin_evaluation(self) -> bool:
        """Wait for the other replicas; return whether all of them evaluate."""
        if self._engine.status.step > 0 and self._engine.status.suppresses_joint_actions:
            return False  # some replicas are past this evaluation
        self._engine.clock.pause()  # until all replicas are done: some are slower
        return self._engine.meet_without_sync()

    def end_evaluation(
        self, losses: Losses | None, counts: Mapping[str, Tensor] | None = None
    ) -> None:
        """Replace losses by their means over the replicas, and record them.

        Args:
            losses: losses by name.
            counts: by name, the tokens (or micro-batches) whose mean each loss is on this rank;
                None if the replicas have evaluated equally many.
        """
        weights = None
        if counts is not None:
            weights = self._engine.sum_over_ranks({n: float(c) for n, c in counts.items()})
        self._average(losses, self._engine.gather_evaluation, weights)
        self._on_evaluation(losses)
        self._engine.clock.resume()

    def begin_report(self, split: str) -> None:
        """Record that the next evaluations are of `split`: `validation` or `test`."""
        self._split, self._num_sets = split, 0

    def report_evaluation[R](self, call: Call[R]) -> R:
        """Handle the report of an evaluation: label results in the middle of a round."""
        given = call.arguments
        self.begin_report("test" if given["prefix"].endswith(" on test set") else "validation")
        if self._engine.status.is_mid_round:
            given["prefix"] += " (mid-round, mean over the replicas)"
        own = given["iteration"]
        try:
            with self._progress.with_global_counts(call):
                shown = f"iteration {given['iteration']}"
                given["prefix"] = given["prefix"].replace(f"iteration {own}", shown, 1)
                return call.proceed()
        finally:
            self._split = None

    def _on_evaluation(self, losses: Losses | None) -> None:
        from megatron.training import get_args

        index, self._num_sets = self._num_sets, self._num_sets + 1
        if self._split is None or not losses or _LOSS not in losses:
            return
        args, name, progress = get_args(), None, self._progress
        if getattr(args, "multiple_validation_sets", False):
            names = getattr(args, "validation_set_names", None)
            name = names[index] if names else str(index)
        loss = float(losses[_LOSS])
        iteration = progress.iteration if progress.is_timed else self._engine.status.step
        samples = progress.samples if progress.is_timed else int(args.consumed_train_samples)
        self._events.on_evaluation(records.Evaluation(iteration, samples, self._split, loss, name))

    def on_iteration(
        self, losses: Losses, lr: float | None, grad_norm: SupportsFloat | None
    ) -> None:
        """Write event files, and record the loss for the next meeting.

        Args:
            losses: of the last step by name; in warm-up replaced by their means over the replicas.
            lr: learning rate of the next step.
            grad_norm: of the last step.
        """
        from megatron.training import get_args

        if self._engine.status.was_warmup_step and losses:
            self._average(losses, self._engine.gather_step)  # as Megatron's log of the whole job
        loss = float(losses[_LOSS]) if _LOSS in losses else math.nan
        consumed = int(get_args().consumed_train_samples)
        self._events.count_samples(self._engine.status.step, consumed, self._host.counters.batch)
        self._engine.record_loss(loss)
        samples, progress, step = (
            self._host.counters.samples_per_step,
            self._progress,
            self._engine.status.step,
        )
        self._events.on_iteration(
            Iteration(
                iteration=progress.iteration if progress.is_timed else step,
                replica_step=step,
                loss=loss,
                grad_norm=None if grad_norm is None else float(grad_norm),
                lr=lr,
                samples=samples,
                samples_all=progress.samples,
                tokens=samples * get_args().seq_length,
                seconds=round(time.monotonic() - self._step_began, 6),
            )
        )

    def _counting[**P](
        self, forward_step: Callable[P, ForwardStep], counts: dict[str, Tensor]
    ) -> Callable[P, ForwardStep]:
        """Wrap the forward step of an evaluation, so that each call counts for the heartbeat.

        Args:
            counts: the denominators of the losses that it reports are added to these, by name.
        """
        from megatron.training import get_args

        is_sft = getattr(get_args(), "sft", False)

        @wraps(forward_step)
        def counted(*args: P.args, **kwargs: P.kwargs) -> ForwardStep:
            self._engine.count_evaluation_batch()
            output, loss_func = forward_step(*args, **kwargs)

            def weighed(*values: object, **options: object) -> object:
                found = loss_func(*values, **options)
                # Else these are other values that a script collects.
                if isinstance(found, tuple) and isinstance(found[-1], dict):
                    for name, loss in found[-1].items():
                        # A sum and its number of tokens, whose mean Megatron takes over all of them
                        # or with --sft over micro-batches; or a mean.
                        is_weighed = loss.numel() == 2 and not is_sft
                        count = loss.view(-1)[1] if is_weighed else torch.ones(())
                        counts[name] = counts.get(name, 0.0) + count.double()
                return found

            return output, weighed

        return counted

    def _average(
        self,
        losses: Losses | None,
        gather: Callable[[Tensor], Tensor],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Replace each loss by its weighted mean over the replicas, in place.

        Ranks without losses join the gather, too, so that no rank continues before the others.

        Args:
            losses: losses by name.
            gather: gathers values from all replicas.
            weights: of this replica by loss; None if all replicas have the same.
        """
        losses = losses or {"none": torch.zeros(())}
        values = torch.stack([loss.detach().double().reshape(()) for loss in losses.values()])
        mine = [1.0 if weights is None else weights.get(name, 0.0) for name in losses]
        rows = gather(torch.stack([values, values.new_tensor(mine)]))
        values, shares = rows.unbind(dim=1)
        # A replica without a sample has no loss: 0/0.
        parts = torch.where(shares > 0, values * shares, 0.0)
        means = parts.sum(dim=0) / shares.sum(dim=0)
        for name, mean in zip(losses, means, strict=True):
            losses[name] = mean.to(losses[name].dtype)
