"""What a `replica-<r>.jsonl` says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

from megatron_edit.tools.monitor.series import Array, Bins
from megatron_edit.tools.monitor.values import finite, finite_or_nan, whole

NUM_TOGETHER = 8  # iterations whose median step tells the speed between syncs
NUM_RECENT = 50  # iterations that make the present speed


@dataclass
class Replica:
    """One replica.

    Attributes:
        number: r.
        warmup_steps: in which all replicas wait for each other at every step.
        iteration: its newest; 0 before the first.
        step: optimizer steps of its own; the same, but where replicas run at their own speeds.
        samples_all: consumed by all replicas, as far as it knew; 0 where its lines do not say it.
        loss: its newest that is known.
        losses: by iteration.
        num_iterations: lines read.
        num_skipped: of them, those without a loss.
        tokens: in all of them.
        seconds: of all of them.
        samples: since the newest sync.
    """

    number: int
    warmup_steps: int = 0
    iteration: int = 0
    step: int = 0
    samples_all: int = 0
    loss: float = math.nan
    losses: Bins = field(default_factory=Bins)
    num_iterations: int = 0
    num_skipped: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    _speeds: Bins = field(default_factory=lambda: Bins(128))
    _between: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _together: list[tuple[float, float]] = field(default_factory=list)
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of an iteration.

        Raises:
            KeyError, TypeError, ValueError: it is not of that form. Nothing has changed then.
        """
        iteration, samples = whole(line["iteration"]), whole(line["samples"])
        loss = finite_or_nan(line["loss"])
        tokens, seconds = (finite(line[name], least=0) for name in ("tokens", "seconds"))
        step = whole(line.get("replica_step", iteration))
        samples_all = whole(line.get("samples_all", 0))
        self.iteration, self.step, self.samples_all = iteration, step, samples_all
        self.num_iterations += 1
        if math.isfinite(loss):
            self.loss = loss
            self.losses.add(iteration, loss)
        else:
            self.num_skipped += 1
        self._together.append((seconds, tokens))
        if len(self._together) == NUM_TOGETHER:
            self._count_speed()
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.samples += samples
        self._recent.append((tokens, seconds))

    def on_sync(self) -> None:
        """Samples count anew: the line of the sync has those before."""
        self.samples = 0

    def _count_speed(self) -> None:
        """A step with a sync in it says nothing of this replica: it waits for the slowest one."""
        seconds, tokens = median_low(self._together)
        self._together.clear()
        self._speeds.add(self.iteration - NUM_TOGETHER // 2, tokens, seconds)
        if self.iteration - NUM_TOGETHER >= self.warmup_steps:
            self._between[0] += tokens
            self._between[1] += seconds

    def speeds(self) -> tuple[Array, Array]:
        """Iterations and tokens per second there, in the median of eight steps; float64 [P]."""
        places, speeds = self._speeds.curve()
        if not places.size and self._together:
            seconds, tokens = median_low(self._together)
            return np.array([float(self.iteration)]), np.array([tokens / max(seconds, 1e-9)])
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
