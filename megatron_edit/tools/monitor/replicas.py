"""What a `replica-<r>.jsonl` says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from megatron_edit.errors import on_one_line
from megatron_edit.tools.monitor.series import Array, Bins
from megatron_edit.tools.monitor.spikes import SpikeDetector
from megatron_edit.tools.monitor.values import finite, finite_or_nan, whole

NUM_TOGETHER = 8  # iterations whose median step tells the speed between syncs
NUM_RECENT = 50  # iterations that make the present speed


EndKind = Literal["finished", "stopped", "failed"]


class Step(NamedTuple):
    """The line of an iteration.

    Attributes:
        iteration: of the training; under A-EDiT whole batches of all replicas.
        step: of this replica, which may have made more or fewer than others.
        samples: of this replica in this step.
        samples_all: consumed by all replicas so far; None where an older version wrote the line.
        loss: NaN where it is not known.
        tokens: of this replica in this step.
        seconds: length of the step.
    """

    iteration: int
    step: int
    samples: int
    samples_all: int | None
    loss: float
    tokens: float
    seconds: float

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Step:
        """From a line.

        Raises:
            KeyError, TypeError, ValueError: it is not of that form.
        """
        iteration, samples_all = whole(line["iteration"]), line.get("samples_all")
        return cls(
            iteration, whole(line.get("replica_step", iteration)), whole(line["samples"]),
            None if samples_all is None else whole(samples_all), finite_or_nan(line["loss"]),
            finite(line["tokens"], least=0), finite(line["seconds"], least=0),
        )  # fmt: skip


class End(NamedTuple):
    """The last line of a replica: how its run ended.

    Attributes:
        kind: `finished` when all iterations are made, `stopped` by a signal or a limit, `failed`.
        time: Unix seconds.
        reason: for people; empty where there is none.
        exit_code: of the process.
        lines_lost: lines of event files that could not be written.
    """

    kind: EndKind
    time: float
    reason: str
    exit_code: int
    lines_lost: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> End:
        """From a line.

        Raises:
            KeyError, TypeError, ValueError: it is not of that form.
        """
        if line["end"] not in get_args(EndKind):
            raise ValueError("an unknown kind of end")
        reason = "" if line.get("reason") is None else on_one_line(str(line["reason"]))
        return cls(
            line["end"], finite(line["time"]), reason, int(finite(line["exit_code"])),
            whole(line.get("lines_lost", 0)),
        )  # fmt: skip


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
    end: End | None = None
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

    def add(self, step: Step, place: float) -> None:
        """Take the line of an iteration.

        Args:
            step: the line.
            place: where it stands in pictures: the iteration, or samples of all replicas.
        """
        self.iteration, self.step = step.iteration, step.step
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

    def on_end(self, end: End) -> None:
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
