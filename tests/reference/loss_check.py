"""The loss check, implemented from its formulas one replica at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class LossOracle:
    """Loss histories of all replicas.

    Attributes:
        num_replicas: N.
        threshold: largest accepted excess, in standard deviations.
        patience: largest number of rejections in a row.
        values: accepted differences d since the start of the history, per replica.
        rejected: current number of rejections in a row, per replica.
    """

    num_replicas: int
    threshold: float = 6.0
    patience: int = 3
    values: list[list[float]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [[] for _ in range(self.num_replicas)]
        self.rejected = [0] * self.num_replicas

    def statistics(self, replica: int) -> tuple[float, float]:
        """Return mean and sigma of a history: plain means at first, later exponential ones."""
        mean = deviation = 0.0
        for count, value in enumerate(self.values[replica]):
            if count == 0:
                mean = value
                continue
            away = abs(value - mean)
            weight = max(1.0 / count, 0.05)
            deviation = (1.0 - weight) * deviation + weight * away
            weight = max(1.0 / (count + 1), 0.05)
            mean = (1.0 - weight) * mean + weight * value
        return mean, math.sqrt(math.pi / 2.0) * deviation

    def observe(self, losses: Sequence[float], steps: Sequence[int]) -> list[bool]:
        """Return which replicas are rejected in one round."""
        usable = [
            math.isfinite(loss) and count > 0 for loss, count in zip(losses, steps, strict=True)
        ]
        differences = [self._difference(losses, usable, r) for r in range(self.num_replicas)]
        known = [r for r in range(self.num_replicas) if not math.isnan(differences[r])]
        rise = self.num_replicas <= 2 and all(self._is_high(r, differences[r]) for r in known)
        return [self._judge(r, differences[r], rise) for r in range(self.num_replicas)]

    def _difference(self, losses: Sequence[float], usable: list[bool], replica: int) -> float:
        if not usable[replica]:
            return math.nan
        if self.num_replicas <= 2:
            return losses[replica]
        others = [losses[r] for r in range(len(losses)) if usable[r] and r != replica]
        if len(others) < 2:
            return math.nan
        if len(others) % 2 == 0:
            others.append(losses[replica])
        return losses[replica] - sorted(others)[len(others) // 2]

    def _is_high(self, replica: int, difference: float) -> bool:
        mean, sigma = self.statistics(replica)
        is_armed = len(self.values[replica]) >= 8
        return is_armed and difference - mean > max(self.threshold * sigma, 0.1)

    def _judge(self, replica: int, difference: float, is_common_rise: bool) -> bool:
        if math.isnan(difference):
            return False
        if self._is_high(replica, difference):
            if self.rejected[replica] < self.patience and not is_common_rise:
                self.rejected[replica] += 1
                return True
            self.values[replica] = []
        self.values[replica].append(difference)
        self.rejected[replica] = 0
        return False
