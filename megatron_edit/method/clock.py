"""When a replica that runs at its own speed asks for a meeting (paper: A-EDiT; method section 5).

Time is counted in whole nanoseconds of a monotonic clock: after weeks of uptime it still
resolves what it did at the start, and nobody who sets the host's clock can move it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

NANOSECONDS = 1_000_000_000


@dataclass
class PhaseClock:
    """How long the inner phase has lasted. It stands still while training does something else.

    Attributes:
        read: the monotonic clock, nanoseconds.
    """

    read: Callable[[], int] = time.monotonic_ns
    _start: int = field(init=False)
    _paused_at: int | None = None
    _past: int = 0  # nanoseconds of earlier phases

    def __post_init__(self) -> None:
        self._start = self.read()

    def restart(self) -> None:
        """A new inner phase begins now."""
        self._past += self._now - self._start
        self._start, self._paused_at = self.read(), None

    def pause(self) -> None:
        """Stand still from here on. Does nothing where it does already."""
        if self._paused_at is None:
            self._paused_at = self.read()

    def resume(self) -> None:
        """Go on, as if no time had passed since `pause`."""
        if self._paused_at is not None:
            self._start += self.read() - self._paused_at
            self._paused_at = None

    def set(self, seconds: float) -> None:
        """Stand still at `seconds` of a phase that another process began; `resume` lets it go on.

        The total does not change: it is of this process.
        """
        self.pause()
        start = self._now - round(seconds * NANOSECONDS)
        self._past += start - self._start
        self._start = start

    @property
    def seconds(self) -> float:
        """Since the start of the phase, without the pauses."""
        return (self._now - self._start) / NANOSECONDS

    @property
    def total_seconds(self) -> float:
        """Of all phases so far, without the pauses. For logs: no meeting depends on it."""
        return (self._past + self._now - self._start) / NANOSECONDS

    @property
    def _now(self) -> int:
        return self.read() if self._paused_at is None else self._paused_at


@dataclass
class TimeTrigger:
    """Asks for a meeting as soon as another step would take the phase past its length.

    The answer is agreed one step late, so the next step is counted as if it were made already.

    Attributes:
        length: tau_time, seconds.
        clock: of the inner phase.
        last: what it showed after the step before.
    """

    length: float
    clock: PhaseClock
    last: float = 0.0

    def restart(self) -> None:
        """A new inner phase begins now."""
        self.clock.restart()
        self.last = 0.0

    def after_step(self) -> bool:
        """Note that a step is over; whether the next one should be the last of the phase."""
        now = self.clock.seconds
        step, self.last = now - self.last, now
        return now + step >= self.length
