"""When groups of units start a sync: the schedules of the strategy oracle.

A schedule has `groups_starting(step)`, the groups that compute their pseudo-gradients after
attempted step `step` (1-based), and `delay`, the steps until the result lands. The end of training
is not part of it: then every group syncs once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """The interface of a schedule that the simulation uses."""

    @property
    def delay(self) -> int:
        """Steps between the start of a sync and its landing."""

    def groups_starting(self, step: int) -> Sequence[int]:
        """Groups whose sync starts after step `step`, 1-based."""


@dataclass(frozen=True)
class StaggeredSchedule:
    """Group f starts after step s where s > W and (s - W - floor(f tau / F)) mod tau = 0."""

    tau: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Refuse more groups than steps, and a delay of a round or longer."""
        if not 1 <= self.fragments <= self.tau:
            raise ValueError(f"fragments {self.fragments} is not in 1..tau = {self.tau}")
        if not 0 <= self.delay < self.tau:
            raise ValueError(f"delay {self.delay} is not in 0..tau - 1 = {self.tau - 1}")

    def groups_starting(self, step: int) -> list[int]:
        """Groups whose sync starts after step `step`, in ascending order."""
        into = step - self.warmup_steps
        if into <= 0:
            return []
        return [f for f in range(self.fragments) if (into - self._offset(f)) % self.tau == 0]

    def _offset(self, group: int) -> int:
        return math.floor(group * self.tau / self.fragments)


@dataclass(frozen=True)
class QsrSchedule:
    """Quadratic synchronization rule: rounds of max(tau, floor((a / lr)^2)) steps, one group.

    Attributes:
        tau: the shortest round, in steps.
        a: the constant a, in units of the learning rate.
        lr_at: learning rate for a round that starts with step s, 1-based.
        warmup_steps: W.
        delay: d.
    """

    tau: int
    a: float
    lr_at: Callable[[int], float]
    warmup_steps: int = 0
    delay: int = 0

    def interval(self, first_step: int) -> int | None:
        """Return the steps of the round that starts with `first_step`; None (no end) at rate 0."""
        lr = self.lr_at(first_step)
        return None if lr == 0.0 else max(self.tau, math.floor((self.a / lr) ** 2))

    def groups_starting(self, step: int) -> list[int]:
        """Return [0] at the end of a round, otherwise an empty list."""
        last = self.warmup_steps
        while last < step:
            interval = self.interval(last + 1)
            if interval is None:
                return []
            last += interval
        return [0] if last == step > self.warmup_steps else []


@dataclass(frozen=True)
class ExplicitSchedule:
    """A table: step -> groups that start after it."""

    starts: Mapping[int, Sequence[int]]
    delay: int = 0

    def groups_starting(self, step: int) -> Sequence[int]:
        """Return the groups of the table for this step, if any."""
        return self.starts.get(step, ())
