"""Adapts Megatron's log lines to replicas that run at their own speeds (A-EDiT).

Megatron writes a line at every iteration that is a multiple of an interval, and divides times by
the steps since the previous line. The global iteration of A-EDiT may skip a multiple, or stay the
same for a step of this replica: a line is written when it reaches or passes a multiple, and times
are divided by global iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.calls import Call
from megatron_edit.host.seams.megatron import Timer, Timers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.seams.probes import host_name

_CONSOLE = "log_interval"
_INTERVALS = (_CONSOLE, "tensorboard_log_interval", "log_memory_interval")


class LogLines:
    """Handles calls of Megatron's `training_log`.

    Args:
        progress: progress of all replicas.
        timers: Megatron's timers.
    """

    def __init__(self, progress: RunProgress, timers: Timers) -> None:
        self._progress = progress
        self._timers = timers
        self._patcher = Patcher(host_name())
        self._last: int | None = None  # iteration of the previous call
        self._first = 0  # iteration at which the timed interval began
        self._steps = 0  # steps of this replica since then

    def begin_step(self) -> None:
        """Record the beginning of a step."""
        if self._last is None:
            self._last = self._first = self._progress.iteration if self._progress.samples else 0

    def log[R](self, call: Call[R]) -> R:
        """Make Megatron's call with iterations and samples of all replicas."""
        progress = self._progress
        if not progress.is_timed:
            return call.proceed()
        assert self._last is not None, "a log line before the first step"
        self._steps += 1
        with progress.with_global_counts(call), self._due_intervals(progress.iteration) as is_due:
            is_first = bool(call.arguments.get("is_first_iteration", False))
            with self._with_global_times(progress.iteration):
                result = call.proceed()
        self._last = progress.iteration
        if is_due and not is_first:  # Megatron's extra line after the first step resets no timers
            self._first, self._steps = self._last, 0
        return result

    @contextmanager
    def _due_intervals(self, iteration: int) -> Iterator[bool]:
        """Set the intervals so that Megatron finds exactly those due that were reached or passed.

        Yields whether a console line is due.
        """
        args, last = self._progress.host.arguments, self._last or 0
        given = {name: int(getattr(args, name, None) or 0) for name in _INTERVALS}
        given = {name: interval for name, interval in given.items() if interval}
        due = {name for name, every in given.items() if last // every < iteration // every}
        for name in given:
            setattr(args, name, 1 if name in due else iteration + 1)
        try:
            yield _CONSOLE in due
        finally:
            for name, interval in given.items():
                setattr(args, name, interval)

    @contextmanager
    def _with_global_times(self, iteration: int) -> Iterator[None]:
        """Show the time per global iteration, and timers per step of this replica."""
        steps = self._steps
        scale = steps / max(1, iteration - self._first)

        def scaled(elapsed: Callable[..., float]) -> Callable[..., float]:
            # Megatron divides by this replica's steps.
            return wraps(elapsed)(lambda *args, **kwargs: elapsed(*args, **kwargs) * scale)

        def per_step[R](write: Callable[..., R]) -> Callable[..., R]:
            @wraps(write)
            def normalized(*args: object, **kwargs: object) -> R:
                return write(*args, **{**kwargs, "normalizer": steps})

            return normalized

        timer: Timer = self._timers("interval-time", log_level=0)
        self._patcher.wrap(timer, "elapsed", scaled)
        for name in ("log", "write"):
            self._patcher.wrap(self._timers, name, per_step)
        try:
            yield
        finally:
            self._patcher.undo()
