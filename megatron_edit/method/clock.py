"""When a replica that runs at its own speed requests a meeting (paper: A-EDiT; method section 5).

Time is counted in integer nanoseconds of a monotonic clock: the resolution does not decrease with
uptime, and changes of the host's clock have no effect.
"""

from __future__ import annotations

import math
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
    """Requests a meeting at the end of the phase, or as late as no other replica waits for it.

    By itself a replica meets after the first step that ends at `length` or later. It goes on where
    a slower one is predicted to arrive later, as long as a step ends before that time: so it waits
    for less than a step of its own, not of the slowest replica. A request takes effect one step
    later, so the next step is counted as if already made.

    Attributes:
        length: tau_time, seconds.
        last: its value after the previous step.
        arrival: its predicted value when this replica, by itself, would meet; None before the first
            step of a phase. It does not depend on other replicas, who compare it with theirs.
    """

    length: float
    clock: PhaseClock
    last: float = 0.0
    arrival: float | None = None

    def restart(self) -> None:
        """Begin a new inner phase now."""
        self.clock.restart()
        self.last, self.arrival = 0.0, None

    def after_step(self, latest_arrival: float = 0.0) -> bool:
        """Record the end of a step; return whether the next one should be the last of the phase.

        Args:
            latest_arrival: of the other replicas, on their clocks, as far as known.
        """
        now = self.clock.seconds
        step, self.last = now - self.last, now
        if self.arrival is None or now < self.length:
            num_steps = max(1, math.ceil((self.length - now) / step)) if step > 0 else 1
            self.arrival = now + num_steps * step
        return now + step >= self.length and now + 2 * step > latest_arrival
