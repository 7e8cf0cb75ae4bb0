"""Time series in bounded memory, and the contents of `sync.jsonl` as such series."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from megatron_edit.constants import LOW_CLIP, SYNC_TIMES
from megatron_edit.observe.records import Array, SyncRecord

MAX_POINTS = 512  # more than a chart has columns
NUM_RECENT = 10
Merge = Callable[..., Array]


def last(rows: Array, axis: int) -> Array:
    """Return the last row."""
    found: Array = np.take(rows, -1, axis)
    return found


# How neighbouring rows are merged, by column.
MERGES: Mapping[str, Merge] = {
    "round": last, "iteration": last, "num_replicas": last,
    "wire_bytes": np.nanmean, "rollbacks": np.nansum, "seconds": np.nanmean,
    "effective": np.nanmean, "effective_min": np.nanmin, "effective_max": np.nanmax,
    "clip": np.nanmean, "clip_min": np.nanmin,
    "replica_norm": np.nanmean, "replica_z": np.nanmax, "replica_weight": np.nanmean,
    "replica_anomalies": np.nansum, "replica_pairs": np.nansum,
    "unit_norm": np.nanmean, "unit_rollbacks": np.nansum,
}  # fmt: skip


class Bins:
    """Weighted means of values by place, such as losses by iteration.

    When `capacity` (even) bins are full, each becomes twice as wide.
    """

    def __init__(self, capacity: int = MAX_POINTS) -> None:
        self.width = 1
        self._first: int | None = None
        self._sums = np.zeros((capacity, 2))  # of values and of weights

    def add(self, place: int, value: float, weight: float = 1.0) -> None:
        """Add a value that is already multiplied by its weight; ignore one that is not finite.

        Places never decrease by more than a bin.
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
        """Return centres and means of the bins that are not empty."""
        kept = np.flatnonzero(self._sums[:, 1] > 0)
        first = (self._first or 0) + (self.width - 1) / 2
        middles: Array = first + kept.astype(np.float64) * self.width
        return middles, self._sums[kept, 0] / self._sums[kept, 1]


class Rows:
    """Rows of named columns, each a vector; `width` neighbouring rows are stored as one."""

    def __init__(self, merges: Mapping[str, Merge], capacity: int = MAX_POINTS) -> None:
        self.width, self.count = 1, 0
        self._capacity, self._merges = capacity, merges
        self._kept: dict[str, list[Array]] = {name: [] for name in merges}
        self._pending: dict[str, list[Array]] = {name: [] for name in merges}

    def add(self, row: Mapping[str, Array]) -> None:
        """Add a row. Where a vector is longer than earlier ones, those are padded with NaN."""
        self.count += 1
        for name, pending in self._pending.items():
            pending.append(row[name])
            if self.count % self.width == 0:
                self._kept[name].append(self._merge(name, pending))
                pending.clear()
        if self.count // self.width >= self._capacity:
            for name, kept in self._kept.items():
                kept[:] = [self._merge(name, kept[i : i + 2]) for i in range(0, len(kept), 2)]
            self.width *= 2

    def column(self, name: str) -> Array:
        """Return a column [rows, length of its longest vector]."""
        pending = self._pending[name]
        return _stack([*self._kept[name], *([self._merge(name, pending)] if pending else [])])

    def vector(self, name: str) -> Array:
        """Return a column of one number per row."""
        return self.column(name)[:, 0]

    def _merge(self, name: str, rows: list[Array]) -> Array:
        if len(rows) == 1:
            return rows[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from columns of NaN only
            return self._merges[name](_stack(rows), axis=0)


def _stack(rows: list[Array]) -> Array:
    columns = list(zip_longest(*rows, fillvalue=math.nan))
    return np.array(columns, dtype=np.float64).reshape(len(columns), len(rows)).T


class LossRejections(NamedTuple):
    """Syncs from which the loss check left a replica out; the losses are those of the last one."""

    num_syncs: int
    iteration: int
    loss: float
    others: float  # the median of the other replicas' losses


class SyncBrief(NamedTuple):
    """One sync as a row of a table. The norms are over all units and replicas."""

    round: int
    iteration: int
    norm_min: float
    norm_max: float
    effective: float
    clip: float
    anomalies: int
    rollbacks: int
    wait: float
    exposed: float
    total: float
    wire_bytes: int
    num_replicas: int


@dataclass
class Syncs:
    """All syncs of a training."""

    num_replicas: int  # of the newest sync or run
    num_columns: int = 0  # replicas that have a column in tables, former members included
    rows: Rows = field(default_factory=lambda: Rows(MERGES))
    units: dict[str, int] = field(default_factory=dict)  # columns, by name
    recent: deque[SyncBrief] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    samples: int = 0  # consumed by all replicas, at the newest sync
    newest_round: int = 0
    state_bytes: int | None = None
    # Sums of `SYNC_TIMES`, `wire_bytes`, `anomalies` and `rollbacks`.
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_time: float | None = None  # Unix seconds
    last_time: float | None = None
    elapsed: float = 0.0  # seconds between syncs, without the time between two runs
    low_effective: int = 0  # most syncs in a row with few effective replicas in the median unit
    low_clip: int = 0
    loss_rejections: dict[int, LossRejections] = field(default_factory=dict)  # by column
    _is_first: bool = True
    _low_now: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, sync: SyncRecord, columns: list[int] | None = None) -> None:
        """Add a sync; its replicas have these columns, or else the first ones in order."""
        self.num_replicas = sync.weights.shape[1]
        columns = list(range(self.num_replicas)) if columns is None else columns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from rows of NaN only
            brief = self._add_row(sync, columns)
            self._add_rejections(sync, columns)
        self.recent.append(brief)
        self.samples, self.newest_round = sync.samples_all, sync.round
        if sync.state_bytes is not None:
            self.state_bytes = sync.state_bytes
        self._add_sums(sync, brief)
        for place, is_low in enumerate((brief.effective < self.half, brief.clip < LOW_CLIP)):
            self._low_now[place] = self._low_now[place] + 1 if is_low else 0
        self.low_effective = max(self.low_effective, self._low_now[0])
        self.low_clip = max(self.low_clip, self._low_now[1])

    def resume(self, num_replicas: int) -> None:
        """Begin the next run of the training; its lines follow."""
        self.num_replicas, self.samples, self._is_first = num_replicas, 0, True

    @property
    def count(self) -> int:
        """Number of syncs so far."""
        return self.rows.count

    @property
    def half(self) -> float:
        """N / 2."""
        return self.num_replicas / 2

    def share(self, name: str) -> float | None:
        """Return the share of the elapsed time that `exposed` or `wait` took; None if not known."""
        if self.count < 2 or self.elapsed <= 0:
            return None
        return (self.sums[name] - self.sums[f"first_{name}"]) / self.elapsed

    def anomaly_shares(self) -> Array:
        """Return the share of its syncs and units that each column was left out of."""
        if not self.count:
            return np.full(self.num_columns, math.nan)
        pairs = np.nansum(self.rows.column("replica_pairs"), axis=0)
        left_out = np.nansum(self.rows.column("replica_anomalies"), axis=0)
        return self._all_columns(left_out / np.maximum(1.0, pairs), 0.0)

    def mean_weights(self) -> Array:
        """Return the mean weight of each column; NaN where there is none."""
        weights = self.rows.column("replica_weight") if self.count else np.empty((0, 0))
        known = np.isfinite(weights)
        means = np.nansum(weights, axis=0) / np.maximum(1, known.sum(axis=0))
        return self._all_columns(np.where(known.any(axis=0), means, math.nan), math.nan)

    def _all_columns(self, values: Array, missing: float) -> Array:
        """Return values by column, also of replicas without a sync."""
        found = np.full(self.num_columns, missing)
        length = min(self.num_columns, values.size)
        found[:length] = values[:length]
        return found

    def _add_row(self, sync: SyncRecord, columns: list[int]) -> SyncBrief:
        """Add the row of a sync, and its new units."""

        def by_column(values: Array) -> Array:
            found = np.full(max(columns) + 1, math.nan)
            found[columns] = values
            return found

        squares = (sync.weights**2).sum(axis=1)
        effective = np.divide(1, squares, out=np.zeros_like(squares), where=squares > 0)
        seconds = dict(zip(SYNC_TIMES, sync.seconds.tolist(), strict=True))
        brief = SyncBrief(
            sync.round, sync.iteration, float(np.nanmin(sync.norms)), float(np.nanmax(sync.norms)),
            float(np.median(effective)), float(np.nanmedian(sync.clip)),
            int(sync.anomalous.sum()), int(sync.rollback.sum()),
            seconds["wait"], seconds["exposed"], seconds["total"], sync.wire_bytes,
            self.num_replicas,
        )  # fmt: skip
        index = [self.units.setdefault(name, len(self.units)) for name in sync.units]
        by_unit = np.full((2, max(index) + 1), math.nan)
        by_unit[:, index] = np.nanmean(sync.norms, axis=1), sync.rollback
        row = {name: np.array([float(value)]) for name, value in brief._asdict().items()}
        self.rows.add(row | {
            "effective_min": effective.min(keepdims=True),
            "effective_max": effective.max(keepdims=True),
            "clip_min": np.nanmin(sync.clip, keepdims=True),
            "seconds": sync.seconds,
            "replica_norm": by_column(np.nanmean(sync.norms, axis=0)),
            "replica_z": by_column(np.nanmax(sync.z, axis=0)),
            "replica_weight": by_column(sync.weights.mean(axis=0)),
            "replica_anomalies": by_column(sync.anomalous.sum(axis=0)),
            "replica_pairs": by_column(np.full(self.num_replicas, float(len(sync.units)))),
            "unit_norm": by_unit[0],
            "unit_rollbacks": by_unit[1],
        })  # fmt: skip
        return brief

    def _add_sums(self, sync: SyncRecord, brief: SyncBrief) -> None:
        new = dict(zip(SYNC_TIMES, sync.seconds.tolist(), strict=True))
        new |= {name: getattr(brief, name) for name in ("wire_bytes", "anomalies", "rollbacks")}
        if self._is_first:  # the time before the first one is not known
            new |= {"first_exposed": brief.exposed, "first_wait": brief.wait}
        else:
            self.elapsed += max(0.0, sync.time - (self.last_time or sync.time))
        for name, value in new.items():
            self.sums[name] += value
        self.first_time = sync.time if self.first_time is None else self.first_time
        self.last_time, self._is_first = sync.time, False

    def _add_rejections(self, sync: SyncRecord, columns: list[int]) -> None:
        for replica in sync.rejected:
            before = self.loss_rejections.get(columns[replica])
            self.loss_rejections[columns[replica]] = LossRejections(
                1 if before is None else before.num_syncs + 1,
                sync.iteration,
                float(sync.round_loss[replica]),
                float(np.nanmedian(np.delete(sync.round_loss, replica))),
            )
