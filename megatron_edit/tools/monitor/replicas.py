"""What a `replica-<r>.jsonl` says."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from megatron_edit.observe.records import Array, Ending, Iteration
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.spikes import SpikeDetector

NUM_TOGETHER = 8  # iterations whose median step tells the speed between syncs
NUM_RECENT = 50  # iterations that make the present speed


@dataclass
class Replica:
    """One replica, in all runs of its training.

    Attributes:
        number: r.
        warmup_steps: in which all replicas wait for each other at every step.
        last_local_step: after which they do so again; None where there is no such step.
        iteration: its newest; 0 before the first.
        step: its own count of steps, likewise.
        samples_all: consumed by all replicas, as far as it knows; 0 where it does not say.
        loss: its newest that is known.
        losses: by iteration, or by samples of all replicas.
        spikes: of its loss.
        num_iterations: lines read.
        num_skipped: of them, those without a loss.
        tokens: in all of them.
        seconds: of all of them.
        samples: since the newest sync, or since the run began.
        end: of its newest run; None while there is none.
        lines_lost: by it and by earlier runs.
    """

    number: int
    warmup_steps: int = 0
    last_local_step: int | None = None
    iteration: int = 0
    step: int = 0
    samples_all: int = 0
    loss: float = math.nan
    losses: Bins = field(default_factory=Bins)
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    num_iterations: int = 0
    num_skipped: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    end: Ending | None = None
    lines_lost: int = 0
    _is_after_sync: bool = False
    _speeds: Bins = field(default_factory=lambda: Bins(128))
    _between: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _together: list[tuple[float, float]] = field(default_factory=list)
    _first_place: float = 0.0  # of the steps whose median is taken next
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def resume(self, warmup_steps: int, last_local_step: int | None = None) -> None:
        """A run begins, whose lines come next.

        Args:
            warmup_steps: of this run.
            last_local_step: of this run.
        """
        self.warmup_steps, self.last_local_step = warmup_steps, last_local_step
        self.samples, self.end, self._is_after_sync = 0, None, False
        self._together.clear()
        self._recent.clear()

    def add(self, step: Iteration, place: float) -> None:
        """Take the line of an iteration.

        Args:
            step: the line.
            place: where it stands in pictures: the iteration, or samples of all replicas.
        """
        self.iteration, self.step = step.iteration, step.replica_step
        self.samples_all = step.samples_all or 0
        self.num_iterations += 1
        if math.isfinite(step.loss):
            self.loss = step.loss
            self.losses.add(round(place), step.loss)
            self.spikes.add(step.iteration, step.loss)
        else:
            self.num_skipped += 1
        if not self._together:
            self._first_place = place
        self._together.append((step.seconds, step.tokens))
        if len(self._together) == NUM_TOGETHER:
            self._count_speed(place)
        self.tokens, self.seconds = self.tokens + step.tokens, self.seconds + step.seconds
        if not self._is_after_sync:  # else the line of the sync has counted them
            self.samples += step.samples
        self._is_after_sync = False
        self._recent.append((step.tokens, step.seconds))

    def on_sync(self) -> None:
        """Samples count anew: the line of the sync has those before."""
        self.samples, self._is_after_sync = 0, True

    def on_end(self, end: Ending) -> None:
        """Its run is over."""
        self.end = end
        self.lines_lost += end.lines_lost

    def _count_speed(self, place: float) -> None:
        """A step with a sync in it says nothing of this replica: it waits for the slowest one."""
        seconds, tokens = median_low(self._together)
        self._together.clear()
        self._speeds.add(round((self._first_place + place) / 2), tokens, seconds)
        is_local = self.last_local_step is None or self.step <= self.last_local_step
        if is_local and self.step - NUM_TOGETHER >= self.warmup_steps:
            self._between[0] += tokens
            self._between[1] += seconds

    def speeds(self) -> tuple[Array, Array]:
        """Iterations and tokens per second there, in the median of eight steps; float64 [P]."""
        places, speeds = self._speeds.curve()
        if not places.size and self._together:
            seconds, tokens = median_low(self._together)
            return np.array([self._first_place]), np.array([tokens / max(seconds, 1e-9)])
        return places, speeds

    @property
    def speed_between_syncs(self) -> float:
        """Tokens per second in the median of eight steps, after the warm-up; NaN before it."""
        tokens, seconds = self._between
        return tokens / seconds if seconds > 0 else math.nan

    @property
    def speed(self) -> float:
        """Tokens per second, of the newest iterations; NaN before the first."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else math.nan

    @property
    def step_seconds(self) -> float:
        """Longest of the newest iterations; 0 before the first."""
        return max((seconds for _, seconds in self._recent), default=0.0)

    @property
    def mean_speed(self) -> float:
        """Tokens per second, of all iterations."""
        return self.tokens / self.seconds if self.seconds > 0 else math.nan
