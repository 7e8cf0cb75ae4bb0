"""What `sync.jsonl` says, sync by sync, by replica and by unit, in bounded memory."""

from __future__ import annotations

import math
import re
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron_edit.constants import BAD_LOSS, LOW_CLIP, SYNC_TIMES
from megatron_edit.tools.monitor.series import Array, Merge, Rows
from megatron_edit.tools.monitor.values import LARGEST_NUMBER, finite, whole

NUM_RECENT = 10
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_MERGES: Mapping[str, Merge] = {
    "round": "last", "iteration": "last", "wire_bytes": "mean", "seconds": "mean",
    "anomalies": "sum", "rollbacks": "sum",
    "effective": "mean", "effective_min": "min", "effective_max": "max",
    "clip": "mean", "clip_min": "min",
    "replica_norm": "mean", "replica_z": "max", "replica_weight": "mean",
    "replica_anomalies": "sum", "replica_pairs": "sum",
    "unit_norm": "mean", "unit_rollbacks": "sum",
}  # fmt: skip


class LossRejections(NamedTuple):
    """Syncs from which the loss check left a replica out.

    Attributes:
        num_syncs: how many.
        iteration: that the newest of them followed.
        loss: nats per token, mean of the replica's round before the newest; NaN where not known.
        others: the median of the other replicas' losses there; NaN where not known.
    """

    num_syncs: int
    iteration: int
    loss: float
    others: float


class SyncBrief(NamedTuple):
    """One sync in a line of a table. Norms are those of all units and replicas."""

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


@dataclass
class Syncs:
    """All syncs of a run.

    Attributes:
        num_replicas: N.
        rows: what is drawn. Columns are vectors: of one number, [5] (`SYNC_TIMES`), [N], or [U].
        units: names in the order in which they were met first; the unit columns follow it.
        recent: the newest ones.
        samples: of each replica, at the newest.
        newest_round: number of the newest; 0 before the first.
        state_bytes: outer state of one replica; None where nobody says.
        sums: of `SYNC_TIMES`, of bytes (`wire_bytes`), and of `anomalies` and `rollbacks`.
        first_time: Unix seconds of the first one; None before it.
        last_time: of the newest.
        elapsed: seconds from sync to sync; not those in which a training was stopped.
        low_effective: longest run of syncs whose median unit stood on less than half of the
            replicas.
        loss_rejections: by replica, where there are any.
        low_clip: longest run of syncs whose median unit was clipped below 0.5.
    """

    num_replicas: int
    rows: Rows = field(default_factory=lambda: Rows(_MERGES))
    units: dict[str, int] = field(default_factory=dict)
    recent: deque[SyncBrief] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    samples: list[int] = field(default_factory=list)
    newest_round: int = 0
    state_bytes: int | None = None
    sums: dict[str, float] = field(default_factory=dict)
    first_time: float | None = None
    last_time: float | None = None
    elapsed: float = 0.0
    low_effective: int = 0
    loss_rejections: dict[int, LossRejections] = field(default_factory=dict)
    low_clip: int = 0
    _is_first: bool = True
    _effective_run: int = 0
    _clip_run: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line.

        Raises:
            ArithmeticError, KeyError, TypeError, ValueError: it is not of that form. Nothing has
            changed then.
        """
        row, brief = self._read(line)
        rejections = _rejections(line, self.num_replicas, self.loss_rejections)
        samples, time = samples_of(line), finite(line["time"])
        state_bytes = line.get("state_bytes")
        state_bytes = self.state_bytes if state_bytes is None else whole(state_bytes)
        for name in line["units"]:
            self.units.setdefault(name, len(self.units))
        self.rows.add(row)
        self.loss_rejections |= rejections
        self.recent.append(brief)
        self.samples = samples
        self.newest_round = brief.round
        self.state_bytes = state_bytes
        counted = dict(zip(SYNC_TIMES, row["seconds"].tolist(), strict=True))
        counted |= {n: float(getattr(brief, n)) for n in ("wire_bytes", "anomalies", "rollbacks")}
        if self._is_first:  # the time before the first one is not known
            counted["first_exposed"], counted["first_wait"] = counted["exposed"], counted["wait"]
        else:
            self.elapsed += max(0.0, time - (self.last_time or time))
        self.first_time = time if self.first_time is None else self.first_time
        self.last_time, self._is_first = time, False
        for name, value in counted.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self._effective_run = self._effective_run + 1 if brief.effective < self.half else 0
        self._clip_run = self._clip_run + 1 if brief.clip < LOW_CLIP else 0
        self.low_effective = max(self.low_effective, self._effective_run)
        self.low_clip = max(self.low_clip, self._clip_run)

    @property
    def count(self) -> int:
        """How many there have been."""
        return self.rows.count

    @property
    def half(self) -> float:
        """N / 2."""
        return self.num_replicas / 2

    def resume(self, num_replicas: int) -> None:
        """A run begins, whose lines come next.

        Args:
            num_replicas: of this run.
        """
        self.num_replicas, self.samples, self._is_first = num_replicas, [], True

    def share(self, name: str) -> float | None:
        """Share of the elapsed time that `exposed` or `wait` took; None where it is not known."""
        if self.count < 2 or self.elapsed <= 0:
            return None
        return (self.sums[name] - self.sums[f"first_{name}"]) / self.elapsed

    def anomaly_shares(self) -> Array:
        """Share of its (sync, unit) pairs in which each replica was left out, float64 [N]."""
        pairs = np.nansum(self.rows.column("replica_pairs"), axis=0)
        left_out = np.nansum(self.rows.column("replica_anomalies"), axis=0)
        shares: Array = left_out / np.maximum(1.0, pairs)
        return shares[: self.num_replicas]

    def _read(self, line: Mapping[str, Any]) -> tuple[dict[str, Array], SyncBrief]:
        names, shape = _names(line["units"]), (len(line["units"]), self.num_replicas)
        norms, scores, weights, anomalous = (
            _table(line[name], shape) for name in ("norms", "z", "weights", "anomalous")
        )
        clip, rollback = (_table(line[name], shape[:1]) for name in ("clip", "rollback"))
        effective = _effective(weights)
        seconds = np.array([finite(line["seconds"][name]) for name in SYNC_TIMES])
        brief = SyncBrief(
            whole(line["round"]), whole(line["iteration"]),
            *_spread(norms),
            _median(effective), _median(clip), int(anomalous.sum()), int(rollback.sum()),
            seconds[0], seconds[3], seconds[4], whole(line["wire_bytes"]),
        )  # fmt: skip
        places = [self.units.get(name) for name in names]
        new = iter(range(len(self.units), len(self.units) + len(names)))
        index = [next(new) if place is None else place for place in places]
        by_unit = np.full((2, max(index, default=-1) + 1), math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of rows without a number
            by_unit[:, index] = np.nanmean(norms, axis=1), rollback
            row = {
                "replica_norm": np.nanmean(norms, axis=0),
                "replica_z": np.nanmax(scores, axis=0),
                "unit_norm": by_unit[0],
                "unit_rollbacks": by_unit[1],
                "effective_min": effective.min(keepdims=True),
                "effective_max": effective.max(keepdims=True),
                "clip_min": np.nanmin(clip, keepdims=True),
            }
        row |= {
            "seconds": seconds,
            "replica_weight": weights.mean(axis=0),
            "replica_anomalies": anomalous.sum(axis=0),
            "replica_pairs": np.full(self.num_replicas, float(len(names))),
        }
        for name in ("round", "iteration", "wire_bytes", "anomalies", "rollbacks", "effective",
                     "clip"):  # fmt: skip
            row[name] = np.array([float(getattr(brief, name))])
        return row, brief


def _rejections(
    line: Mapping[str, Any], num_replicas: int, before: Mapping[int, LossRejections]
) -> dict[int, LossRejections]:
    """Of the replicas that the loss check left out of this sync, with those before it.

    Raises:
        ArithmeticError, KeyError, TypeError, ValueError: the line is not of that form. Those of
            older versions do not have these fields.
    """
    if "why" not in line:
        return {}
    losses, why = _table(line["round_loss"], (num_replicas,)), line["why"]
    if not isinstance(why, list) or any(len(reasons) != num_replicas for reasons in why):
        raise ValueError("no reasons by unit and replica")
    found = {}
    for replica in range(num_replicas):
        if not any(reasons[replica] == BAD_LOSS for reasons in why):
            continue
        count = before[replica].num_syncs if replica in before else 0
        found[replica] = LossRejections(
            count + 1,
            whole(line["iteration"]),
            float(losses[replica]),
            _median(np.delete(losses, replica)),
        )
    return found


def samples_of(line: Mapping[str, Any]) -> list[int]:
    """Of each replica, at a sync.

    Raises:
        KeyError, TypeError, ValueError: the line is not of that form.
    """
    return [whole(number) for number in line["samples"]]


def _table(values: Any, shape: tuple[int, ...]) -> Array:
    """Of numbers and nulls.

    Raises:
        ArithmeticError, TypeError, ValueError: it is not of that shape.
    """
    table = np.array(values, dtype=np.float64)
    if table.shape != shape or not table.size:
        raise ValueError(f"a table of shape {table.shape}, not {shape}")
    if (np.abs(table) > LARGEST_NUMBER).any():  # NaN, from null, is not
        raise ValueError("a number out of range")
    return table


def _names(units: Any) -> list[str]:
    """Names of units, which stand in pictures.

    Raises:
        TypeError, ValueError: there is none, or one that nobody gives to a unit.
    """
    if not isinstance(units, list) or not all(_NAME.fullmatch(name) for name in units):
        raise ValueError("no names of units")
    return units


def _effective(weights: Array) -> Array:
    squares = (weights**2).sum(axis=1)
    return np.where(squares > 0, 1 / np.where(squares > 0, squares, 1.0), 0.0)


def _spread(values: Array) -> tuple[float, float, float]:
    """Smallest, median and largest of what is finite."""
    known = values[np.isfinite(values)]
    if not known.size:
        return math.nan, math.nan, math.nan
    return float(known.min()), float(np.median(known)), float(known.max())


def _median(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan
