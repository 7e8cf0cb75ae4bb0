"""Time series of any length in bounded memory: neighbouring points are merged as they grow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Literal

import numpy as np

from megatron_edit.observe.records import Array

Merge = Literal["mean", "min", "max", "sum", "last"]
MAX_POINTS = 512  # more than a chart has columns
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
        capacity: bins, even; when they are full, each becomes twice as wide.

    Attributes:
        width: iterations per bin.
    """

    def __init__(self, capacity: int = MAX_POINTS) -> None:
        self.width = 1
        self._first: int | None = None
        self._sums = np.zeros((capacity, 2))  # of values and of weights

    def add(self, place: int, value: float, weight: float = 1.0) -> None:
        """Add a value that is already multiplied by its weight.

        Args:
            place: the iteration; it never decreases by more than a bin.
            value: ignored where it is not finite.
            weight: >= 0.
        """
        if not math.isfinite(value) or not math.isfinite(weight):
            return
        if self._first is None:
            self._first = place
        while (index := max(0, place - self._first) // self.width) >= len(self._sums):
            merged = self._sums.reshape(-1, 2, 2).sum(axis=1)
            self._sums = np.concatenate([merged, np.zeros_like(merged)])
            self.width *= 2
        self._sums[index] += value, weight

    def curve(self) -> tuple[Array, Array]:
        """Return centres and means of the bins that are not empty; both float64 [P]."""
        kept = np.flatnonzero(self._sums[:, 1] > 0)
        first = (self._first or 0) + (self.width - 1) / 2
        middles: Array = first + kept.astype(np.float64) * self.width
        return middles, self._sums[kept, 0] / self._sums[kept, 1]


class Rows:
    """Rows of named columns, each a vector; neighbouring rows are merged in groups of equal size.

    Args:
        merges: how each column is merged.
        capacity: rows, even.

    Attributes:
        width: added rows per stored row.
        count: rows added so far.
    """

    def __init__(self, merges: Mapping[str, Merge], capacity: int = MAX_POINTS) -> None:
        self.width, self.count = 1, 0
        self._capacity = capacity
        self._merges = dict(merges)
        self._kept: dict[str, list[Array]] = {name: [] for name in merges}
        self._pending: dict[str, list[Array]] = {name: [] for name in merges}

    def add(self, row: Mapping[str, Array]) -> None:
        """Add a row. Where a vector is longer than earlier ones, those are padded with NaN."""
        self.count += 1
        for name, pending in self._pending.items():
            pending.append(row[name])
            if self.count % self.width == 0:
                self._kept[name].append(self._merge_rows(name, pending))
                pending.clear()
        if self.count // self.width >= self._capacity:
            for name, kept in self._kept.items():
                kept[:] = [self._merge_rows(name, kept[i : i + 2]) for i in range(0, len(kept), 2)]
            self.width *= 2

    def column(self, name: str) -> Array:
        """Return a column, float64 [rows, length of its longest vector]."""
        pending = self._pending[name]
        return _stack_rows(
            [*self._kept[name], *([self._merge_rows(name, pending)] if pending else [])]
        )

    def _merge_rows(self, name: str, rows: list[Array]) -> Array:
        if len(rows) == 1:
            return rows[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from columns of NaN only
            return _MERGES[self._merges[name]](_stack_rows(rows))


def _stack_rows(rows: list[Array]) -> Array:
    """Stack vectors as the rows of a table, padded with NaN."""
    columns = list(zip_longest(*rows, fillvalue=math.nan))
    return np.array(columns, dtype=np.float64).reshape(len(columns), len(rows)).T
