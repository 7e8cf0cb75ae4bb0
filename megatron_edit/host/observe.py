"""What Megatron logs and evaluates, seen over all replicas and written to the event files."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.engine import EditEngine
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.records import Iteration

_LOSS = "lm loss"


@contextmanager
def _without_time_limit() -> Iterator[None]:
    """Keep Megatron from ending an evaluation on one replica alone; it looks again right after."""
    from megatron.training import get_args

    args = get_args()
    limit, args.exit_duration_in_mins = args.exit_duration_in_mins, None
    try:
        yield
    finally:
        args.exit_duration_in_mins = limit


class Observer:
    """Wraps Megatron's calls that log and evaluate.

    Args:
        events: where iterations go.

    Attributes:
        engine: None until the model is built.
        host: None until the model is built.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._step_began = time.monotonic()
        self.engine: EditEngine | None = None
        self.host: MegatronHost | None = None

    def begin_step(self) -> None:
        """A step begins now; a clock that stood still since a checkpoint goes on."""
        if self.engine is not None:
            self.engine.clock.resume()
        self._step_began = time.monotonic()

    def around_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's log call: event files, and the loss for the next meeting."""
        signature = inspect.signature(training_log)

        @wraps(training_log)
        def with_events(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            self._on_iteration(
                given["loss_dict"],
                given["learning_rate"],
                given["grad_norm"],
            )
            return training_log(*args, **kwargs)

        return with_events

    def around_progress(self, start_time: Callable[[], Any]) -> Callable[[], Any]:
        """Megatron's reading of the progress log, whose lines have the size of one replica."""

        @wraps(start_time)
        def of_this_replica() -> Any:
            from megatron.training import get_args

            args = get_args()
            whole, args.world_size = args.world_size, dist.get_world_size()
            try:
                return start_time()
            finally:
                args.world_size = whole

        return of_this_replica

    def around_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's evaluation: its losses become means over the replicas."""
        signature = inspect.signature(evaluate)

        @wraps(evaluate)
        def over_replicas(*args: Any, **kwargs: Any) -> Any:
            if self.engine is None:
                return evaluate(*args, **kwargs)
            if self.engine.step > 0 and self.engine.is_quiet:
                return None, None, True  # some replicas have passed this evaluation
            self.engine.clock.pause()  # until all replicas are through: some are slower at it
            if not self.engine.check_in():
                return None, None, True  # as if the time were over: Megatron reports nothing
            given = signature.bind(*args, **kwargs)
            step = given.arguments["forward_step_func"]
            given.arguments["forward_step_func"] = self._counting(step)
            with _without_time_limit():
                losses, *rest = evaluate(*given.args, **given.kwargs)
            self._average(losses, self.engine.gather_evaluation)
            self.engine.clock.resume()
            return (losses, *rest)

        return over_replicas

    def around_evaluation_report(self, report: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's report of it: a result of replicas that have parted is labelled."""
        signature = inspect.signature(report)

        @wraps(report)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if self.engine is not None and self.engine.is_mid_round:
                given.arguments["prefix"] += " (mid-round, mean over the replicas)"
            return report(*given.args, **given.kwargs)

        return labelled

    def _on_iteration(self, losses: dict[str, Any], lr: float | None, grad_norm: Any) -> None:
        from megatron.training import get_args

        assert self.engine is not None and self.host is not None
        if self.engine.was_warmup_step and losses:
            self._average(losses, self.engine.gather_step)  # Megatron logs the whole job's, too
        loss = float(losses[_LOSS]) if _LOSS in losses else math.nan
        self.engine.record_loss(loss)
        samples = self.host.samples_per_step
        self._events.on_iteration(
            Iteration(
                iteration=self.engine.step,
                loss=loss,
                grad_norm=None if grad_norm is None else float(grad_norm),
                lr=lr,
                samples=samples,
                tokens=samples * get_args().seq_length,
                seconds=round(time.monotonic() - self._step_began, 6),
            )
        )

    def _counting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The forward step of an evaluation, each call a sign of life."""

        @wraps(forward_step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            assert self.engine is not None
            self.engine.count_evaluation_batch()
            return forward_step(*args, **kwargs)

        return counted

    def _average(
        self, losses: dict[str, Tensor] | None, gather: Callable[[Tensor], Tensor]
    ) -> None:
        """Replace each loss by its mean over the replicas, in place.

        Ranks that know no losses come all the same: no rank goes on before the others.

        Args:
            losses: by name.
            gather: from all replicas.
        """
        losses = losses or {"none": torch.zeros(())}
        values = torch.stack([loss.detach().double().reshape(()) for loss in losses.values()])
        means = gather(values).mean(dim=0)
        for name, mean in zip(losses, means, strict=True):
            losses[name] = mean.to(losses[name].dtype)
