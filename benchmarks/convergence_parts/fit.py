"""How the distance to data parallelism falls: power laws through the runs, and a published one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class PowerLaw:
    """y = scale * x ** exponent."""

    scale: float
    exponent: float

    def at(self, x: float) -> float:
        """Its value; `x` is above 0."""
        return float(self.scale * x**self.exponent)


# arXiv 2503.09799, fit to its Table 4: DiLoCo's loss over that of data parallelism is
# N ** (scale * P ** exponent), with N replicas and P parameters.
PUBLISHED = PowerLaw(1.0923, -0.2342)


def loss_ratio(law: PowerLaw, num_replicas: int, num_parameters: float) -> float:
    """Loss over that of data parallelism by a law for the exponent of N, as `PUBLISHED` is.

    Args:
        law: of the number of parameters.
        num_replicas: N.
        num_parameters: P.
    """
    return float(num_replicas ** law.at(num_parameters))


def exponent_of(ratio: float, num_replicas: int) -> float:
    """The exponent of N that gives a ratio of losses; N is above 1."""
    return math.log(ratio) / math.log(num_replicas)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Least squares of the logarithms.

    Args:
        points: x and y. Those that are not above 0 have no logarithm and are left out: there is
            then no distance to tell.

    Returns:
        None with fewer than two different x.
    """
    known = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in known}) < 2:
        return None
    center_x, center_y = (fmean(values) for values in zip(*known, strict=True))
    spread = sum((x - center_x) ** 2 for x, _ in known)
    slope = sum((x - center_x) * (y - center_y) for x, y in known) / spread
    return PowerLaw(math.exp(center_y - slope * center_x), slope)
