"""Adds EDiT's timers to Megatron's `Timers`, for its log and TensorBoard (`--timing-log-level 1`).

Megatron's own timers synchronize the device at every start and stop, which prevents overlap: on
GPUs use this level for diagnosis, not for training. EDiT's timers only add up durations that the
engine measures anyway, without any synchronization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from megatron.core.timers import TimerBase

from megatron_edit.host.seams.megatron import Timers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.method.clock import PhaseClock

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
        clock: clock of the inner phase.
        log_level: timing log level of the run; below `LOG_LEVEL` nothing is registered.
        patcher: undoes the registration.
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
