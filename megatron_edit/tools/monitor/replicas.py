"""The contents of a `replica-<r>.jsonl`, and jumps of its loss."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import numpy as np

from megatron_edit.observe.records import Array, Ending, Iteration
from megatron_edit.tools.monitor.syncs import Bins

MEDIAN_STEPS = 8  # iterations of which the median step gives the speed between syncs
NUM_RECENT = 50  # iterations that the present speed is taken from
SPIKE_SIGMAS = 8.0  # above the normal noise of a training
MEAN_DECAY, NOISE_DECAY = 0.1, 0.02  # weights of the newest loss: 10 and 50 iterations back
MIN_LOSSES = 50  # before the first comparison with the mean
MIN_DEVIATION = 1e-3  # relative to the mean: nearly constant losses have no useful deviation
RECOVERED_SIGMAS = 3.0  # below it a loss counts as recovered


class Spike(NamedTuple):
    """Consecutive losses far above the preceding ones."""

    iteration: int  # of the first loss of the spike
    loss: float  # the highest one
    mean: float  # of the losses before
    sigmas: float  # height above the mean, in standard deviations of the losses before
    length: int  # iterations until the loss recovered; 0 before


@dataclass
class SpikeDetector:
    """Compare each loss with the running mean of the preceding ones, in units of their noise.

    The noise is that of the differences between neighbours: a steep fall adds little to it.
    """

    count: int = 0
    worst: Spike | None = None
    _num_losses: int = 0
    _mean: float = 0.0
    _newest: float = 0.0
    _noise: float = 0.0  # variance
    _present: Spike | None = None

    def add(self, iteration: int, loss: float) -> None:
        """Add the next loss, which must be finite."""
        deviation = max(math.sqrt(self._noise), MIN_DEVIATION * abs(self._mean), 1e-12)
        sigmas = (loss - self._mean) / deviation
        is_armed = self._num_losses >= MIN_LOSSES
        if self._present is not None:
            self._update_spike(self._present, iteration, loss)
        elif is_armed and sigmas > SPIKE_SIGMAS:
            self.count += 1
            self._present = Spike(iteration, loss, self._mean, sigmas, 0)
            self._keep_worst(self._present)
        if is_armed:  # limits the weight of a spike in the mean
            loss = self._mean + min(sigmas, RECOVERED_SIGMAS) * deviation
        if self._num_losses:
            weight = max(NOISE_DECAY, 1 / self._num_losses)
            self._noise += weight * ((loss - self._newest) ** 2 / 2 - self._noise)
        self._num_losses += 1
        self._mean += max(MEAN_DECAY, 1 / self._num_losses) * (loss - self._mean)
        self._newest = loss

    def _update_spike(self, spike: Spike, iteration: int, loss: float) -> None:
        deviation = (spike.loss - spike.mean) / spike.sigmas
        sigmas = (loss - spike.mean) / deviation
        has_recovered = sigmas <= RECOVERED_SIGMAS
        if sigmas > spike.sigmas:
            spike = spike._replace(loss=loss, sigmas=sigmas)
        if has_recovered:
            spike = spike._replace(length=iteration - spike.iteration)
        self._keep_worst(spike)
        self._present = None if has_recovered else spike

    def _keep_worst(self, spike: Spike) -> None:
        if self.worst is None or spike.sigmas >= self.worst.sigmas:
            self.worst = spike


@dataclass
class Replica:
    """One replica, over all runs of the training."""

    number: int  # its column in tables of syncs
    name: str  # in an elastic run; else the number
    warmup_steps: int = 0
    last_local_step: int | None = None
    iteration: int = 0
    step: int = 0  # the replica's own count
    samples_all: int = 0  # consumed by all replicas, as known to this one
    loss: float = math.nan  # the newest finite one
    losses: Bins = field(default_factory=Bins)  # by iteration, or by samples of all replicas
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    num_iterations: int = 0
    num_skipped: int = 0  # iterations without a finite loss
    tokens: float = 0.0
    seconds: float = 0.0
    paces: Bins = field(default_factory=Bins)  # seconds per x value of charts
    samples: int = 0  # since the newest sync, or since the run began
    end: Ending | None = None  # of the newest run
    ends: list[Ending] = field(default_factory=list)  # of all processes
    _is_after_sync: bool = False
    _last_x: float | None = None
    _speeds: Bins = field(default_factory=lambda: Bins(128))
    _local_totals: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _pending: list[tuple[float, float]] = field(default_factory=list)
    _first_x: float = 0.0  # of the steps in `_pending`
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def resume(self, warmup_steps: int, last_local_step: int | None) -> None:
        """Begin the next run of the training, or the next process; its lines follow."""
        self.warmup_steps, self.last_local_step = warmup_steps, last_local_step
        self.samples, self.end, self._is_after_sync = 0, None, False
        self._last_x = None
        self._pending.clear()
        self._recent.clear()

    def was_restarted(self, step: Iteration) -> bool:
        """Return whether a line is of another process than the lines before it."""
        return self.end is not None or step.replica_step <= self.step

    def add(self, step: Iteration, x: float) -> None:
        """Add the line of an iteration, and its x value in charts."""
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
        """Return x values and tokens per second, medians of eight steps."""
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
