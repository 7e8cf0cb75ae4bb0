"""Adapts Megatron's log lines to replicas that run at their own speeds (A-EDiT).

Megatron writes a line at every iteration that is a multiple of an interval, and divides times by
the steps since the previous line. The global iteration of A-EDiT may skip a multiple, or stay the
same for a step of this replica: a line is written when it reaches or passes a multiple, and times
are divided by global iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps

from megatron.core.timers import TimerBase

from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.megatron import Timer, Timers
from megatron_edit.host.seams.patching import Call, Patcher
from megatron_edit.host.seams.probes import host_name
from megatron_edit.method.clock import PhaseClock

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


# ---- Adds EDiT's timers to Megatron's `Timers`, for its log and TensorBoard (`--timing-log-level
# 1`)
#
# Megatron's own timers synchronize the device at every start and stop, which prevents overlap: on
# GPUs use this level for diagnosis, not for training. EDiT's timers only add up durations that
# the engine measures anyway, without any synchronization.


PHASE, WAIT = "edit-inner-phase", "edit-sync-wait"
EXCHANGE, OUTER = "edit-sync-exchange", "edit-outer-step"
LOG_LEVEL = 1


class PhaseTimer(TimerBase):  # type: ignore[misc]
    """Seconds of inner training, by the engine's pausable monotonic clock.

    Args:
        name: name in Megatron's log.
        clock: the engine's clock. The start of its phase decides when A-EDiT meets; this timer
            only uses the total of all phases, since a log line may cover several or part of one.
    """

    def __init__(self, name: str, clock: PhaseClock) -> None:
        super().__init__(name)
        self.clock = clock
        self.reset()

    def start(self, barrier: bool = False) -> None:
        """Resume the clock; without a barrier, since replicas must not wait for a log line."""
        self.clock.resume()

    def stop(self, barrier: bool = False) -> None:
        """Pause the clock."""
        self.clock.pause()

    def reset(self) -> None:
        """Restart the count for the log; the phase itself continues."""
        self._taken = self.clock.total_seconds

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset."""
        seconds = self.clock.total_seconds - self._taken
        if reset:
            self.reset()
        return seconds

    def active_time(self) -> float:
        """Seconds since the start of training."""
        return self.clock.total_seconds


class SumTimer(TimerBase):  # type: ignore[misc]
    """Sum of seconds measured elsewhere since the last reset.

    Args:
        name: name in Megatron's log.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._sum, self._total = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._sum += seconds
        self._total += seconds

    def start(self, barrier: bool = False) -> None:
        """Do nothing: durations are measured elsewhere."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing, like `start`."""

    def reset(self) -> None:
        """Restart the count."""
        self._sum = 0.0

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset."""
        seconds = self._sum
        if reset:
            self.reset()
        return seconds

    def active_time(self) -> float:
        """Seconds since the start of training."""
        return self._total


class EditTimers:
    """Registers EDiT's four timers with Megatron.

    Args:
        timers: Megatron's `Timers`.
        log_level: timing log level of the run; below `LOG_LEVEL` nothing is registered.
    """

    def __init__(self, timers: Timers, clock: PhaseClock, log_level: int, patcher: Patcher) -> None:
        self._sums = {name: SumTimer(name) for name in (WAIT, EXCHANGE, OUTER)}
        if log_level < LOG_LEVEL:
            return
        ours = [PHASE, *self._sums]
        registered = {PHASE: PhaseTimer(PHASE, clock), **self._sums}
        patcher.replace(timers, "_timers", {**timers._timers, **registered})
        levels = {**timers._log_levels, **dict.fromkeys(ours, LOG_LEVEL)}
        patcher.replace(timers, "_log_levels", levels)

        def around[R](method: Callable[..., R]) -> Callable[..., R]:
            @wraps(method)
            def with_ours(names: Sequence[str] | None, *args: object, **kwargs: object) -> R:
                # Only the list of names in `training_log` has this one.
                if names is not None and "forward-backward" in names:
                    names = [*names, *ours]
                return method(names, *args, **kwargs)

            return with_ours

        patcher.wrap(timers, "log", around)
        patcher.wrap(timers, "write", around)

    def add_sync(self, seconds: Mapping[str, float]) -> None:
        """Add the durations of a finished sync.

        Args:
            seconds: `SyncReport.seconds`.
        """
        for name, key in ((WAIT, "wait"), (EXCHANGE, "exchange"), (OUTER, "outer")):
            self._sums[name].add(seconds[key])
