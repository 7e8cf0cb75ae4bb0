"""The contents of a `replica-<r>.jsonl`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from megatron_edit.observe.records import Array, Ending, Iteration
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.spikes import SpikeDetector

MEDIAN_STEPS = 8  # iterations of which the median step gives the speed between syncs
NUM_RECENT = 50  # iterations that the present speed is taken from


@dataclass
class Replica:
    """One replica, over all runs of the training.

    Attributes:
        number: its column in tables of syncs; r in a run without a hub.
        name: in an elastic run; else the number.
        warmup_steps: W, in which all replicas wait for each other at every step.
        last_local_step: the last step before the final synchronous phase; None where there is no
            such phase.
        iteration: the newest; 0 before the first.
        step: the replica's own count of steps; 0 before the first.
        samples_all: consumed by all replicas, as known to this one; 0 where not recorded.
        loss: the newest finite one.
        losses: by iteration, or by samples of all replicas.
        spikes: of the loss.
        num_iterations: lines read.
        num_skipped: lines without a finite loss.
        tokens: of all lines.
        seconds: of all lines.
        paces: seconds per x value in charts, by x value, without the first line of a process.
        samples: since the newest sync, or since the run began.
        end: end record of the newest run; None before it.
        ends: end records of all processes, in order.
        lines_lost: lines that could not be written, over all runs.
    """

    number: int
    name: str
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
    paces: Bins = field(default_factory=Bins)
    samples: int = 0
    end: Ending | None = None
    ends: list[Ending] = field(default_factory=list)
    lines_lost: int = 0
    _is_after_sync: bool = False
    _last_x: float | None = None
    _speeds: Bins = field(default_factory=lambda: Bins(128))
    _local_totals: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _pending: list[tuple[float, float]] = field(default_factory=list)
    _first_x: float = 0.0  # of the steps in `_pending`
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def resume(self, warmup_steps: int, last_local_step: int | None = None) -> None:
        """Begin the next run of the training, or the next process; its lines follow.

        Args:
            warmup_steps: of this run.
            last_local_step: of this run.
        """
        self.warmup_steps, self.last_local_step = warmup_steps, last_local_step
        self.samples, self.end, self._is_after_sync = 0, None, False
        self._last_x = None
        self._pending.clear()
        self._recent.clear()

    def was_restarted(self, step: Iteration) -> bool:
        """Return whether a line is of another process than the lines before it."""
        return self.end is not None or step.replica_step <= self.step

    def add(self, step: Iteration, x: float) -> None:
        """Add the line of an iteration.

        Args:
            step: the line.
            x: its x value in charts: the iteration, or samples of all replicas.
        """
        self.iteration, self.step = step.iteration, step.replica_step
        self.samples_all = step.samples_all or 0
        self.num_iterations += 1
        if math.isfinite(step.loss):
            self.loss = step.loss
            self.losses.add(round(x), step.loss)
            self.spikes.add(step.iteration, step.loss)
        else:
            self.num_skipped += 1
        if self._last_x is not None:
            self.paces.add(round(x), step.seconds, x - self._last_x)
        self._last_x = x
        if not self._pending:
            self._first_x = x
        self._pending.append((step.seconds, step.tokens))
        if len(self._pending) == MEDIAN_STEPS:
            self._add_speed(x)
        self.tokens, self.seconds = self.tokens + step.tokens, self.seconds + step.seconds
        if not self._is_after_sync:  # the line of the sync has counted them
            self.samples += step.samples
        self._is_after_sync = False
        self._recent.append((step.tokens, step.seconds))

    def on_sync(self) -> None:
        """Restart the count of samples: the line of the sync has the earlier ones."""
        self.samples, self._is_after_sync = 0, True

    def on_end(self, end: Ending) -> None:
        """Add the end record of its run."""
        self.end = end
        self.ends.append(end)
        self.lines_lost += end.lines_lost

    def _add_speed(self, x: float) -> None:
        """Add the median of eight steps, as a step with a sync includes waiting for replicas."""
        seconds, tokens = median_low(self._pending)
        self._pending.clear()
        self._speeds.add(round((self._first_x + x) / 2), tokens, seconds)
        is_local = self.last_local_step is None or self.step <= self.last_local_step
        if is_local and self.step - MEDIAN_STEPS >= self.warmup_steps:
            self._local_totals[0] += tokens
            self._local_totals[1] += seconds

    def speeds(self) -> tuple[Array, Array]:
        """Return x values and tokens per second, medians of eight steps; both float64 [P]."""
        places, speeds = self._speeds.curve()
        if not places.size and self._pending:
            seconds, tokens = median_low(self._pending)
            return np.array([self._first_x]), np.array([tokens / max(seconds, 1e-9)])
        return places, speeds

    @property
    def speed_between_syncs(self) -> float:
        """Tokens per second of local steps, from medians of eight steps; NaN before the first."""
        tokens, seconds = self._local_totals
        return tokens / seconds if seconds > 0 else math.nan

    @property
    def speed(self) -> float:
        """Tokens per second of the newest iterations; NaN before the first."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else math.nan

    @property
    def step_seconds(self) -> float:
        """Seconds of the longest of the newest iterations; 0 before the first."""
        return max((seconds for _, seconds in self._recent), default=0.0)

    @property
    def mean_speed(self) -> float:
        """Tokens per second over all iterations; NaN before the first."""
        return self.tokens / self.seconds if self.seconds > 0 else math.nan
