"""Numbers over a training of any length, in bounded memory: neighbours are merged as it grows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Merge = Literal["mean", "min", "max", "sum", "last"]
MAX_POINTS = 512  # more than a picture has columns for
_MERGES: Mapping[Merge, Callable[[Array], Array]] = {
    "mean": lambda rows: np.nanmean(rows, axis=0),
    "min": lambda rows: np.nanmin(rows, axis=0),
    "max": lambda rows: np.nanmax(rows, axis=0),
    "sum": lambda rows: np.nansum(rows, axis=0),
    "last": lambda rows: rows[-1],
}


class Bins:
    """Weighted means of values by iteration. Values that are not finite are left out.

    Args:
        capacity: bins, even; where that is not enough, each becomes twice as wide.

    Attributes:
        width: iterations of a bin.
    """

    def __init__(self, capacity: int = MAX_POINTS) -> None:
        self.width = 1
        self._capacity = capacity
        self._first: int | None = None
        self._sums: list[float] = []
        self._weights: list[float] = []

    def add(self, place: int, value: float, weight: float = 1.0) -> None:
        """Count a value; `value` is already multiplied by its weight.

        Args:
            place: the iteration; it never decreases by more than a bin.
            value: any.
            weight: >= 0.
        """
        if not math.isfinite(value) or not math.isfinite(weight):
            return
        if self._first is None:
            self._first = place
        while (index := max(0, place - self._first) // self.width) >= self._capacity:
            self._merge()
        missing = index + 1 - len(self._sums)
        if missing > 0:
            self._sums.extend([0.0] * missing)
            self._weights.extend([0.0] * missing)
        self._sums[index] += value
        self._weights[index] += weight

    def _merge(self) -> None:
        for values in (self._sums, self._weights):
            values[:] = [sum(values[i : i + 2]) for i in range(0, len(values), 2)]
        self.width *= 2

    def curve(self) -> tuple[Array, Array]:
        """Middles of the bins that hold anything, and the means there; both float64 [P]."""
        sums: Array = np.array(self._sums, dtype=np.float64)
        weights: Array = np.array(self._weights, dtype=np.float64)
        kept = np.flatnonzero(weights > 0)
        if not kept.size:
            return np.empty(0), np.empty(0)
        first = (self._first or 0) + (self.width - 1) / 2
        middles: Array = np.asarray(first + kept * self.width, dtype=np.float64)
        return middles, sums[kept] / weights[kept]


class Rows:
    """Rows of several named columns, each a vector; merged in runs of equal length.

    Args:
        merges: how each column is merged.
        capacity: rows, even.

    Attributes:
        width: rows that were added, of each row that is kept.
        count: rows that were added.
    """

    def __init__(self, merges: Mapping[str, Merge], capacity: int = MAX_POINTS) -> None:
        self.width, self.count = 1, 0
        self._capacity = capacity
        self._merges = dict(merges)
        self._kept: dict[str, list[Array]] = {name: [] for name in merges}
        self._pending: dict[str, list[Array]] = {name: [] for name in merges}

    def add(self, row: Mapping[str, Array]) -> None:
        """Take a row. A vector may be longer than those before: they are filled up with NaN."""
        self.count += 1
        for name, pending in self._pending.items():
            pending.append(row[name])
        if self.count % self.width:
            return
        for name, pending in self._pending.items():
            self._kept[name].append(_merged(pending, self._merges[name]))
            pending.clear()
        if self.count // self.width >= self._capacity:
            for name, kept in self._kept.items():
                merge = self._merges[name]
                kept[:] = [_merged(kept[i : i + 2], merge) for i in range(0, len(kept), 2)]
            self.width *= 2

    def column(self, name: str) -> Array:
        """A column, float64 [rows, length of its longest vector]."""
        rows = list(self._kept[name])
        if self._pending[name]:
            rows.append(_merged(self._pending[name], self._merges[name]))
        return _stacked(rows)


def _stacked(rows: list[Array]) -> Array:
    length = max((row.size for row in rows), default=0)
    table = np.full((len(rows), length), math.nan)
    for target, row in zip(table, rows, strict=True):
        target[: row.size] = row
    return table


def _merged(rows: list[Array], merge: Merge) -> Array:
    if len(rows) == 1:
        return rows[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns that hold no number at all
        return _MERGES[merge](_stacked(rows))
