"""The lines of one replica, and jumps of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_edit.observe.records import Array, Ending, Iteration
from megatron_edit.tools.monitor.files import Facts
from megatron_edit.tools.pages.charts import Curve

MEDIAN_STEPS = 8  # iterations of which the median step gives the speed between syncs
NUM_RECENT = 50  # iterations that the present speed is taken from
SPIKE_SIGMAS = 8.0  # above the normal noise of a training
MEAN_DECAY, NOISE_DECAY = 0.1, 0.02  # weights of the newest loss: 10 and 50 iterations back
MIN_LOSSES = 50  # before the first comparison with the mean
MIN_DEVIATION = 1e-3  # relative to the mean: nearly constant losses have no useful deviation
MAX_SIGMAS = 3.0  # of a loss in the mean, so that a spike has little weight


class Spike(NamedTuple):
    """A loss far above the preceding ones; the first of several in a row."""

    iteration: int
    loss: float
    mean: float  # of the losses before
    sigmas: float  # height above the mean, in standard deviations of the losses before


def worst_spike(losses: Iterable[tuple[int, float]]) -> Spike | None:
    """Return the highest spike among finite losses with their iterations; None without one.

    Each is compared with the running mean of those before, in units of their noise, which is that
    of the differences between neighbours: a steep fall adds little to it.
    """
    mean = newest = noise = 0.0
    worst: Spike | None = None
    was_high = False
    for count, (iteration, loss) in enumerate(losses):
        deviation = max(math.sqrt(noise), MIN_DEVIATION * abs(mean), 1e-12)
        sigmas = (loss - mean) / deviation
        if count >= MIN_LOSSES:
            is_first = sigmas > SPIKE_SIGMAS and not was_high
            if is_first and (worst is None or sigmas > worst.sigmas):
                worst = Spike(iteration, loss, mean, sigmas)
            was_high = sigmas > SPIKE_SIGMAS
            loss = mean + min(sigmas, MAX_SIGMAS) * deviation
        if count:
            noise += max(NOISE_DECAY, 1 / count) * ((loss - newest) ** 2 / 2 - noise)
        mean += max(MEAN_DECAY, 1 / (count + 1)) * (loss - mean)
        newest = loss
    return worst


@dataclass(eq=False)
class Replica:
    """One replica, over all runs of the training; lines are added in their order."""

    number: int  # its column in tables of syncs
    name: str  # in an elastic run; else the number
    steps: list[Iteration] = field(default_factory=list)
    places: list[float] = field(default_factory=list)  # of the steps, on the x axis
    starts: list[int] = field(default_factory=list)  # first step of each process
    ends: list[Ending] = field(default_factory=list)  # of all processes
    end: Ending | None = None  # of the newest process

    def start_process(self) -> None:
        """The lines of another process, or of the next run, follow."""
        self.starts.append(len(self.steps))
        self.end = None

    def add(self, record: Iteration | Ending, place: float = 0.0) -> None:
        """Add the record of a line."""
        if isinstance(record, Ending):
            self.end = record
            self.ends.append(record)
            return
        last = self.steps[-1] if len(self.steps) > self.starts[-1] else None
        # In the final phase of A-EDiT replicas count iterations, fewer than some had made steps.
        is_in_phase = last is not None and last.iteration < record.iteration == record.replica_step
        is_behind = last is not None and record.replica_step <= last.replica_step
        if self.end is not None or (is_behind and not is_in_phase):
            self.start_process()
        self.steps.append(record)
        self.places.append(place)

    # ---- once all lines have been added

    @property
    def iteration(self) -> int:
        """The last iteration."""
        return self.steps[-1].iteration if self.steps else 0

    @property
    def step(self) -> int:
        """Steps that the replica itself has made."""
        return self.steps[-1].replica_step if self.steps else 0

    @property
    def samples_all(self) -> int:
        """Samples consumed by all replicas, as known to this one."""
        return (self.steps[-1].samples_all or 0) if self.steps else 0

    @cached_property
    def table(self) -> Array:
        """Places, losses, tokens and seconds of the steps, and its own counts of them."""
        rows = [(each.loss, each.tokens, each.seconds, each.replica_step) for each in self.steps]
        return np.column_stack([self.places, np.array(rows, float).reshape(-1, 4)]).T

    @cached_property
    def losses(self) -> Curve:
        """Finite losses by place."""
        places, losses = self.table[:2]
        known = np.isfinite(losses)
        return places[known], losses[known]

    @property
    def loss(self) -> float:
        """The newest finite loss; NaN before the first."""
        return float(self.losses[1][-1]) if self.losses[1].size else math.nan

    @cached_property
    def spike(self) -> Spike | None:
        """The highest spike of the loss."""
        return worst_spike(
            (each.iteration, each.loss) for each in self.steps if math.isfinite(each.loss)
        )

    @property
    def skipped_share(self) -> float:
        """The share of its iterations without a finite loss."""
        known = np.isfinite(self.table[1])
        return 1 - float(known.mean()) if known.size else 0.0

    @property
    def paces(self) -> Curve:
        """Seconds per unit of the x axis since the step before, by place."""
        places, _, _, seconds, _ = self.table
        lengths = np.diff(places, prepend=0.0)
        lengths[[start for start in self.starts if start < places.size]] = 0.0  # not known
        known = lengths > 0
        return places[known], seconds[known] / lengths[known]

    @cached_property
    def medians(self) -> Array:
        """Places, tokens and seconds of the median of each eight steps, and the step counts.

        A step with a sync includes waiting for other replicas.
        """
        count = self.table.shape[1]
        size = max(1, min(MEDIAN_STEPS, count))
        groups = self.table[:, : count // size * size].reshape(5, -1, size)
        middle = np.argsort(groups[3], axis=1, kind="stable")[:, (size - 1) // 2]
        rows = np.arange(middle.size)
        tokens, seconds = groups[2][rows, middle], groups[3][rows, middle]
        return np.array([groups[0].mean(axis=1), tokens, seconds, groups[4][:, -1]])

    def speed_between_syncs(self, facts: Facts) -> float:
        """Return tokens per second of local steps, from medians; NaN before the first eight."""
        _, tokens, seconds, last = self.medians
        is_local = last - MEDIAN_STEPS >= facts.warmup_steps
        if facts.last_local_step is not None:
            is_local &= last <= facts.last_local_step
        return _ratio(tokens[is_local], seconds[is_local])

    @property
    def speed(self) -> float:
        """Tokens per second of the newest iterations; NaN before the first."""
        return _ratio(self._recent[2], self._recent[3])

    @property
    def step_seconds(self) -> float:
        """Seconds of the longest of the newest iterations; 0 before the first."""
        return float(np.max(self._recent[3], initial=0.0))

    @property
    def mean_speed(self) -> float:
        """Tokens per second over all iterations; NaN before the first."""
        return _ratio(self.table[2], self.table[3])

    @property
    def _recent(self) -> Array:
        return self.table[:, max(self.starts[-1], len(self.steps) - NUM_RECENT) :]


def _ratio(tokens: Array, seconds: Array) -> float:
    return float(tokens.sum() / seconds.sum()) if seconds.sum() > 0 else math.nan
