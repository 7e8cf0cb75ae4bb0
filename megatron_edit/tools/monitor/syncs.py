"""The contents of `sync.jsonl`: by sync, replica and unit, in bounded memory."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_edit.constants import LOW_CLIP, SYNC_TIMES
from megatron_edit.observe.records import Array, SyncRecord
from megatron_edit.tools.monitor.series import Merge, Rows

NUM_RECENT = 10
# Columns of one number are also fields of `SyncBrief`.
_MERGES: Mapping[str, Merge] = {
    "round": "last", "iteration": "last", "wire_bytes": "mean", "anomalies": "sum",
    "rollbacks": "sum", "effective": "mean", "clip": "mean", "num_replicas": "last",
    "effective_min": "min", "effective_max": "max", "clip_min": "min", "seconds": "mean",
    "replica_norm": "mean", "replica_z": "max", "replica_weight": "mean",
    "replica_anomalies": "sum", "replica_pairs": "sum",
    "unit_norm": "mean", "unit_rollbacks": "sum",
}  # fmt: skip


class LossRejections(NamedTuple):
    """Syncs from which the loss check left a replica out.

    Attributes:
        num_syncs: number of these syncs.
        iteration: the iteration before the newest of them.
        loss: nats per token, mean of the replica's round before the newest; NaN where not known.
        others: the median of the other replicas' losses there; NaN where not known.
    """

    num_syncs: int
    iteration: int
    loss: float
    others: float


class SyncBrief(NamedTuple):
    """One sync as a row of a table. The norms are over all units and replicas."""

    round: int
    iteration: int
    norm_min: float
    norm_median: float
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
    """All syncs of a run.

    Attributes:
        num_replicas: N; of the newest sync in an elastic run.
        num_columns: replicas that have a column in tables; in an elastic run former members, too.
        rows: data of the charts. Columns are vectors: [1], [5] (`SYNC_TIMES`), [columns], or [U].
        units: column of each unit, by name, in order of first appearance.
        recent: the newest syncs.
        samples: consumed by all replicas, at the newest sync.
        newest_round: number of the newest sync; 0 before the first.
        state_bytes: outer state of one replica; None where not recorded.
        sums: of `SYNC_TIMES`, of bytes (`wire_bytes`), and of `anomalies` and `rollbacks`.
        first_time: Unix seconds of the first sync; None before it.
        last_time: Unix seconds of the newest sync.
        elapsed: seconds between syncs, without the time between two runs.
        low_effective: most syncs in a row whose median unit averaged fewer than N / 2 effective
            replicas.
        loss_rejections: by column, where there are any.
        low_clip: most syncs in a row whose median unit was clipped below 0.5.
    """

    num_replicas: int
    num_columns: int = 0
    rows: Rows = field(default_factory=lambda: Rows(_MERGES))
    units: dict[str, int] = field(default_factory=dict)
    recent: deque[SyncBrief] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    samples: int = 0
    newest_round: int = 0
    state_bytes: int | None = None
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_time: float | None = None
    last_time: float | None = None
    elapsed: float = 0.0
    low_effective: int = 0
    loss_rejections: dict[int, LossRejections] = field(default_factory=dict)
    low_clip: int = 0
    _is_first: bool = True
    _low_effective_run: int = 0
    _low_clip_run: int = 0

    def add(self, sync: SyncRecord, columns: list[int] | None = None) -> None:
        """Add a sync.

        Args:
            sync: the sync.
            columns: of its replicas; None where they are the first ones, in order.
        """
        self.num_replicas = sync.weights.shape[1]
        if columns is None:
            columns = list(range(self.num_replicas))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from rows of NaN only
            brief = self._add_row(sync, columns)
            self._add_rejections(sync, columns)
        self.recent.append(brief)
        self.samples, self.newest_round = sync.samples_all, sync.round
        if sync.state_bytes is not None:
            self.state_bytes = sync.state_bytes
        increments = dict(zip(SYNC_TIMES, sync.seconds.tolist(), strict=True))
        increments |= {
            name: getattr(brief, name) for name in ("wire_bytes", "anomalies", "rollbacks")
        }
        if self._is_first:  # the time before the first one is not known
            increments |= {"first_exposed": brief.exposed, "first_wait": brief.wait}
        else:
            self.elapsed += max(0.0, sync.time - (self.last_time or sync.time))
        for name, value in increments.items():
            self.sums[name] += value
        self.first_time = sync.time if self.first_time is None else self.first_time
        self.last_time, self._is_first = sync.time, False
        self._low_effective_run = self._low_effective_run + 1 if brief.effective < self.half else 0
        self._low_clip_run = self._low_clip_run + 1 if brief.clip < LOW_CLIP else 0
        self.low_effective = max(self.low_effective, self._low_effective_run)
        self.low_clip = max(self.low_clip, self._low_clip_run)

    @property
    def count(self) -> int:
        """Number of syncs so far."""
        return self.rows.count

    @property
    def half(self) -> float:
        """N / 2."""
        return self.num_replicas / 2

    def resume(self, num_replicas: int) -> None:
        """Begin the next run of the training; its lines follow.

        Args:
            num_replicas: of this run.
        """
        self.num_replicas, self.samples, self._is_first = num_replicas, 0, True

    def share(self, name: str) -> float | None:
        """Return the share of the elapsed time that `exposed` or `wait` took; None if not known."""
        if self.count < 2 or self.elapsed <= 0:
            return None
        return (self.sums[name] - self.sums[f"first_{name}"]) / self.elapsed

    def anomaly_shares(self) -> Array:
        """Return the share of its (sync, unit) pairs that each replica was left out of.

        Returns:
            float64 [columns]; NaN before the first sync.
        """
        if not self.count:
            return np.full(self.num_columns, math.nan)
        pairs = np.nansum(self.rows.column("replica_pairs"), axis=0)
        left_out = np.nansum(self.rows.column("replica_anomalies"), axis=0)
        return self._all_columns(left_out / np.maximum(1.0, pairs), 0.0)

    def mean_weights(self) -> Array:
        """Return the mean weight of each replica, float64 [columns]; NaN where there is none."""
        if not self.count:
            return np.full(self.num_columns, math.nan)
        weights = self.rows.column("replica_weight")
        known = np.isfinite(weights).any(axis=0)
        means = np.full(weights.shape[1], math.nan)
        means[known] = np.nanmean(weights[:, known], axis=0)
        return self._all_columns(means, math.nan)

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
            sync.round, sync.iteration,
            float(np.nanmin(sync.norms)), float(np.nanmedian(sync.norms)),
            float(np.nanmax(sync.norms)),
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

    def _add_rejections(self, sync: SyncRecord, columns: list[int]) -> None:
        for replica in sync.rejected:
            before = self.loss_rejections.get(columns[replica])
            self.loss_rejections[columns[replica]] = LossRejections(
                1 if before is None else before.num_syncs + 1,
                sync.iteration,
                float(sync.round_loss[replica]),
                float(np.nanmedian(np.delete(sync.round_loss, replica))),
            )
