"""EDiT's timers in Megatron's `Timers`, for its log and its TensorBoard (`--timing-log-level 1`).

Megatron's own timers stop the device at every start and stop, and with it an overlap: on GPUs this
level is for looking, not for training. These count what the engine measured anyway, so they cost
nothing and nobody waits for them.
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
    """Seconds of inner training, on a monotonic clock that stands still while it is stopped.

    Args:
        name: as Megatron's log shows it.
        clock: the engine's; the stamp at which its phase began decides when A-EDiT meets. Here
            only the total of all phases counts: a log line covers several, or a part of one.
    """

    def __init__(self, name: str, clock: PhaseClock) -> None:
        super().__init__(name)
        self.clock = clock
        self.reset()

    def start(self, barrier: bool = False) -> None:
        """Go on. Never a barrier: replicas must not wait for a log line."""
        self.clock.resume()

    def stop(self, barrier: bool = False) -> None:
        """Stand still."""
        self.clock.pause()

    def reset(self) -> None:
        """Count anew, for the log; the phase itself goes on."""
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
    """Seconds that were measured elsewhere, added up until the log takes them.

    Args:
        name: as Megatron's log shows it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._sum, self._total = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Count a stretch of time."""
        self._sum += seconds
        self._total += seconds

    def start(self, barrier: bool = False) -> None:
        """Nothing: what is counted is measured where it happens."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing, like `start`."""

    def reset(self) -> None:
        """Count anew."""
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
    """The four timers, registered.

    Args:
        timers: Megatron's `Timers`.
        clock: of the inner phase.
        log_level: of the run; below `LOG_LEVEL` nothing is registered.
        patcher: undoes it.
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
                # The list of `training_log` is the one that asks for all steps' timers.
                if names is not None and "forward-backward" in names:
                    names = [*names, *ours]
                return method(names, *args, **kwargs)

            return with_ours

        patcher.wrap(timers, "log", around)
        patcher.wrap(timers, "write", around)

    def add_sync(self, seconds: Mapping[str, float]) -> None:
        """Count a finished sync.

        Args:
            seconds: `SyncReport.seconds`.
        """
        for name, key in ((WAIT, "wait"), (EXCHANGE, "exchange"), (OUTER, "outer")):
            self._sums[name].add(seconds[key])
