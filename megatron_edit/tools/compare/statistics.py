"""Means over seeds, and differences between runs with the same seeds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Spread:
    """Mean and spread of several values of one quantity."""

    mean: float
    # Standard deviation of the values (not of their mean); None for a single one.
    deviation: float | None
    num: int  # number of values

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Compute it from the known values; None without any, NaN if one is not finite."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        if not all(map(math.isfinite, known)):  # a run that diverged
            return cls(math.nan, None, len(known))
        return cls(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def differences[Key: Hashable](
    values: Mapping[Key, float], others: Mapping[Key, float]
) -> list[float]:
    """Return `values` minus `others`, pair by pair, for the keys (seeds) in both."""
    return [values[key] - others[key] for key in values if key in others]


def quotients[Key: Hashable](
    values: Mapping[Key, float], others: Mapping[Key, float]
) -> list[float]:
    """Return `values` over `others`, pair by pair, for the keys (seeds) in both."""
    return [values[key] / others[key] for key in values if others.get(key)]
