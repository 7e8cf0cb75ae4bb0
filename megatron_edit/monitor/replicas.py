"""What a `replica-<r>.jsonl` says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.monitor.series import Bins

NUM_RECENT = 50  # iterations that make the present speed


@dataclass
class Replica:
    """One replica.

    Attributes:
        number: r.
        iteration: its newest; 0 before the first.
        loss: its newest that is known.
        losses: by iteration.
        speeds: tokens per second, by iteration.
        num_iterations: lines read.
        num_skipped: of them, those without a loss.
        tokens: in all of them.
        seconds: of all of them.
        samples: since the newest sync.
    """

    number: int
    iteration: int = 0
    loss: float = math.nan
    losses: Bins = field(default_factory=Bins)
    speeds: Bins = field(default_factory=Bins)
    num_iterations: int = 0
    num_skipped: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of an iteration.

        Raises:
            KeyError, TypeError, ValueError: it is not of that form. Nothing has changed then.
        """
        iteration, loss = int(line["iteration"]), line["loss"]
        tokens, seconds, samples = (float(line[name]) for name in ("tokens", "seconds", "samples"))
        loss = math.nan if loss is None else float(loss)
        self.iteration = iteration
        self.num_iterations += 1
        if math.isfinite(loss):
            self.loss = loss
            self.losses.add(iteration, loss)
        else:
            self.num_skipped += 1
        self.speeds.add(iteration, tokens, seconds)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.samples += int(samples)
        self._recent.append((tokens, seconds))

    def on_sync(self) -> None:
        """Samples count anew: the line of the sync has those before."""
        self.samples = 0

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
