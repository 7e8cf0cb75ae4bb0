"""The syncs of a training as tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.observe.records import Array, SyncRecord

Value = Callable[[SyncRecord], Array | np.bool | float]


class LossRejections(NamedTuple):
    """Syncs from which the loss check left a replica out; the losses are those of the last one."""

    num_syncs: int
    iteration: int
    loss: float
    others: float  # the median of the other replicas' losses


def effective_replicas(sync: SyncRecord) -> Array:
    """Return 1 / sum of squared weights by unit; 0 where all weights are 0."""
    squares = (sync.weights**2).sum(axis=1)
    return np.divide(1, squares, out=np.zeros_like(squares), where=squares > 0)


@dataclass
class Syncs:
    """All syncs of a training, and the columns of their replicas."""

    records: list[SyncRecord] = field(default_factory=list)
    columns: list[Sequence[int]] = field(default_factory=list)
    elapsed: float = 0.0  # seconds of `_timed` rounds
    _timed: list[SyncRecord] = field(default_factory=list)  # of local steps, but a run's first sync
    _first: int = 0  # place of the run's first sync

    def start_run(self) -> None:
        """The syncs of the next run follow."""
        self._first = len(self.records)

    def add(self, sync: SyncRecord, columns: Sequence[int], *, is_local: bool) -> None:
        """Add a sync; `is_local` if it ends a round of local steps."""
        if is_local and self._first < len(self.records):
            self._timed.append(sync)
            self.elapsed += max(0.0, sync.time - self.records[-1].time)
        self.records.append(sync)
        self.columns.append(columns)

    @property
    def count(self) -> int:
        """Number of syncs so far."""
        return len(self.records)

    def values(self, value: Value) -> Array:
        """Return a value of each sync."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from rows of NaN only
            return np.array([value(sync) for sync in self.records], dtype=np.float64)

    def by_replica(self, value: Callable[[SyncRecord], Array], num_columns: int) -> Array:
        """Return a value of each sync and replica; NaN where it did not take part."""
        return self._table(value, self.columns, num_columns)

    def by_unit(self, value: Callable[[SyncRecord], Array]) -> Array:
        """Return a value of each sync and unit; NaN where it did not take part."""
        places = {name: place for place, name in enumerate(self.units)}
        columns = [[places[name] for name in sync.units] for sync in self.records]
        return self._table(value, columns, len(places))

    def _table(
        self, value: Callable[[SyncRecord], Array], columns: Sequence[Sequence[int]], width: int
    ) -> Array:
        table = np.full((self.count, width), math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for row, sync, places in zip(table, self.records, columns, strict=True):
                row[list(places)] = value(sync)
        return table

    @property
    def units(self) -> list[str]:
        """Names of all units."""
        return list(dict.fromkeys(name for sync in self.records for name in sync.units))

    @property
    def sent_bytes(self) -> int:
        """Bytes that one replica has sent in all syncs."""
        return sum(sync.wire_bytes for sync in self.records)

    @property
    def num_anomalies(self) -> int:
        """Units of replicas that were left out."""
        return sum(int(sync.anomalous.sum()) for sync in self.records)

    @property
    def num_rollbacks(self) -> int:
        """Units that went back to their anchor."""
        return sum(int(sync.rollback.sum()) for sync in self.records)

    @property
    def state_bytes(self) -> int | None:
        """Outer state of one replica, as last recorded; None where not known."""
        known = [sync.state_bytes for sync in self.records if sync.state_bytes is not None]
        return known[-1] if known else None

    def share(self, name: str) -> float | None:
        """Return the share of local rounds that `exposed` or `wait` took; None if not known."""
        if self.elapsed <= 0:
            return None
        place = SYNC_TIMES.index(name)
        return float(sum(sync.seconds[place] for sync in self._timed)) / self.elapsed

    def anomaly_shares(self, num_columns: int) -> Array:
        """Return the share of its syncs and units that each replica was left out of."""
        left_out = self.by_replica(lambda sync: sync.anomalous.sum(axis=0), num_columns)
        pairs = self.by_replica(lambda sync: np.full(len(sync.weights[0]), len(sync.units)),
                                num_columns)  # fmt: skip
        return np.nansum(left_out, axis=0) / np.maximum(1.0, np.nansum(pairs, axis=0))

    def loss_rejections(self) -> dict[int, LossRejections]:
        """Return the rejections by the loss check, by column."""
        found: dict[int, LossRejections] = {}
        for sync, columns in zip(self.records, self.columns, strict=True):
            for replica in sync.rejected:
                before = found.get(columns[replica])
                others = np.delete(sync.round_loss, replica)
                others = others[np.isfinite(others)]
                found[columns[replica]] = LossRejections(
                    1 if before is None else before.num_syncs + 1,
                    sync.iteration,
                    float(sync.round_loss[replica]),
                    float(np.median(others)) if others.size else math.nan,
                )
        return found
