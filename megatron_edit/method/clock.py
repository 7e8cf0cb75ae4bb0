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
        phases: how many have begun.
    """

    read: Callable[[], int] = time.monotonic_ns
    phases: int = 0
    _start: int = field(init=False)
    _paused_at: int | None = None

    def __post_init__(self) -> None:
        self._start = self.read()

    def restart(self) -> None:
        """A new inner phase begins now."""
        self._start, self._paused_at = self.read(), None
        self.phases += 1

    def pause(self) -> None:
        """Stand still from here on. Does nothing where it does already."""
        if self._paused_at is None:
            self._paused_at = self.read()

    def resume(self) -> None:
        """Go on, as if no time had passed since `pause`."""
        if self._paused_at is not None:
            self._start += self.read() - self._paused_at
            self._paused_at = None

    def set(self, seconds: float, phases: int) -> None:
        """Stand still at `seconds` of a phase, the `phases`-th; `resume` lets it go on."""
        self._paused_at = self.read()
        self._start = self._paused_at - round(seconds * NANOSECONDS)
        self.phases = phases

    @property
    def seconds(self) -> float:
        """Since the start of the phase, without the pauses."""
        now = self.read() if self._paused_at is None else self._paused_at
        return (now - self._start) / NANOSECONDS


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
