"""Time-outs of the waits for other replicas."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import MAX_TIMEOUT_SECONDS, MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS


def set_timeout(group: Group, timeout: timedelta) -> None:
    """Set the time-out of collectives that begin from now on.

    Gloo receives it with each call; NCCL has only the group's own time-out, after which its
    watchdog ends the process.
    """
    group.timeout = timeout
    if group.runs_in_order:
        group.process_group._set_default_timeout(timeout)
    for near in () if group.places is None else (group.places.up, group.places.down):
        set_timeout(near, timeout)


class StepTimes:
    """Times between the steps of this launch, in seconds.

    Attributes:
        longest: also since the start, before the first step.
        mean: 0 before the second step.
    """

    def __init__(self) -> None:
        self.longest = self.mean = 0.0
        self._last, self._first, self._count = time.monotonic(), 0.0, 0

    def add(self, now: float) -> None:
        """Add a step.

        Args:
            now: when it has come as far as earlier ones at their call, on the monotonic clock.
        """
        self.longest = max(self.longest, now - self._last)
        if self._count:
            self.mean = (now - self._first) / self._count
        else:
            self._first = now
        self._last, self._count = now, self._count + 1


@dataclass
class AdaptiveTimeout:
    """Adapts the time-outs between replicas to the length of the rounds.

    At meetings they apply only to replicas that make no progress: see `Meetings`. As long as no
    round is over, time-outs follow the steps: in the warm-up, in which replicas wait for each other
    at every step, the longest one so far, with what came before it (start-up, evaluation, save);
    then the expected length of the first round. They only grow then, and each rank may have others.
    They are never less than what the bytes of a sync, or of the gradients of a step, need on the
    links: NCCL counts from the launch of a collective, and a step launches all of them at once.

    Attributes:
        groups: between replicas.
        is_fixed: whether the user gave the time-out.
        meetings: of a round: its fragments sync one after the other.
        timed_seconds, timed_steps: least length of a round that the clock ends; 0 for others.
        length: of the last round, seconds; 0 before its end.
        is_in_steps: whether steps are made: from one on until a save, an evaluation or the end.
    """

    groups: Sequence[Group]
    is_fixed: bool
    meetings: int = 1
    timed_seconds: float = 0.0
    timed_steps: float = 0.0
    length: float = 0.0
    is_in_steps: bool = False
    _began: float = field(default_factory=time.monotonic)
    _parts: deque[float] = field(default_factory=deque)  # between the last meetings
    _steps: StepTimes = field(default_factory=StepTimes)
    _expected_steps: float = 0.0  # of the first round
    _expected_seconds: float = 0.0
    _allowed: float = 0.0  # length that the present time-out was made from
    _transfer: float = 0.0  # seconds that the bytes need

    def begin(self, length: float = 0.0, steps: int = 0) -> None:
        """Begin the first round, or resume the round of a checkpoint.

        Args:
            length: seconds of the last round before it; 0 if there was none.
            steps: of the round; 0 where the clock ends it.
        """
        self._began = time.monotonic()
        self._parts.clear()
        self._expected_steps = steps or self.timed_steps
        self._expected_seconds = self.timed_seconds
        self.length = length
        self._allow(length or self._expected_length)

    def allow_transfer(self, seconds: float) -> None:
        """Allow for exchanges that take so long, from the bytes and the measured rate."""
        self._transfer = seconds
        self._allow(self._allowed)

    def follow_step(self) -> None:
        """Measure the time since the last call, once a step, before replicas wait for each other.

        After the first round nothing changes here: its length is known.
        """
        self.is_in_steps = True
        self._steps.add(time.monotonic())
        if not self.length:
            self._allow(max(self._allowed, self._steps.longest, self._expected_length))

    def after_round(self) -> None:
        """End a part of a round with a meeting: the next round may take `TIMEOUT_ROUNDS` times as
        long as the last one."""
        now = time.monotonic()
        part, self._began = now - self._began, now
        self._parts.append(part)
        while len(self._parts) > self.meetings:
            self._parts.popleft()
        self.length = sum(self._parts) / len(self._parts) * self.meetings
        self._allow(self.length)

    @property
    def seconds(self) -> float:
        """The present time-out."""
        return self.groups[0].timeout.total_seconds()

    @property
    def _expected_length(self) -> float:
        return max(self._expected_seconds, self._expected_steps * self._steps.mean)

    def _allow(self, length: float) -> None:
        self._allowed = length
        if not self.is_fixed:
            seconds = max(MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS * max(length, self._transfer))
            timeout = timedelta(seconds=min(MAX_TIMEOUT_SECONDS, seconds))
            for group in self.groups:
                if group.timeout != timeout:
                    set_timeout(group, timeout)
