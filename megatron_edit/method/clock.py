"""When a replica that runs at its own speed requests a meeting (paper: A-EDiT; method section 5).

Time is counted in integer nanoseconds of a monotonic clock: the resolution does not decrease with
uptime, and changes of the host's clock have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

NANOSECONDS = 1_000_000_000


@dataclass
class PhaseClock:
    """Duration of the inner phase. It is paused while training does something else.

    Attributes:
        read: returns the monotonic clock, nanoseconds.
    """

    read: Callable[[], int] = time.monotonic_ns
    _start: int = field(init=False)
    _paused_at: int | None = None
    _past: int = 0  # nanoseconds of earlier phases

    def __post_init__(self) -> None:
        self._start = self.read()

    def restart(self) -> None:
        """Begin a new inner phase now."""
        self._past += self._now - self._start
        self._start, self._paused_at = self.read(), None

    def pause(self) -> None:
        """Pause the clock. Does nothing if it is paused."""
        if self._paused_at is None:
            self._paused_at = self.read()

    def resume(self) -> None:
        """Continue as if no time had passed since `pause`."""
        if self._paused_at is not None:
            self._start += self.read() - self._paused_at
            self._paused_at = None

    def set(self, seconds: float) -> None:
        """Pause the clock at `seconds` of a phase that another process began.

        The total does not change: it counts this process only.
        """
        self.pause()
        start = self._now - round(seconds * NANOSECONDS)
        self._past += start - self._start
        self._start = start

    @property
    def seconds(self) -> float:
        """Seconds since the start of the phase, without pauses."""
        return (self._now - self._start) / NANOSECONDS

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases so far, without pauses. For logs: no meeting depends on it."""
        return (self._past + self._now - self._start) / NANOSECONDS

    @property
    def _now(self) -> int:
        return self.read() if self._paused_at is None else self._paused_at


@dataclass
class TimeTrigger:
    """Requests a meeting as soon as another step would exceed the length of the phase.

    A request takes effect one step later, so the next step is counted as if already made.

    Attributes:
        length: tau_time, seconds.
        clock: of the inner phase.
        last: its value after the previous step.
    """

    length: float
    clock: PhaseClock
    last: float = 0.0

    def restart(self) -> None:
        """Begin a new inner phase now."""
        self.clock.restart()
        self.last = 0.0

    def after_step(self) -> bool:
        """Record the end of a step; return whether the next one should be the last of the phase."""
        now = self.clock.seconds
        step, self.last = now - self.last, now
        return now + step >= self.length
