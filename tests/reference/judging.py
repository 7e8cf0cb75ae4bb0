"""The start of a sync: accepted replicas, their weights, and the state kept until the landing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.reference.oracle import (
    Array,
    DetectorOracle,
    clip_factor,
    closeness_of,
    norm_of,
    unit_weights,
    weighted_average,
)
from tests.reference.outer_rules import StrategySettings


@dataclass(frozen=True)
class UnitRecord:
    """The decision about one unit in one sync.

    Attributes:
        unit: its name.
        step: the attempted step after which the sync started.
        norms: one per replica.
        weights: one per replica, 0 for replicas left out.
        left_out: one per replica, whether it is left out.
        update_norm: norm of the average before the clip; 0 where rolled back.
        clip: the factor; 1 where rolled back.
        closeness: smallest relative distance of a tested norm to its bound.
    """

    unit: str
    step: int
    norms: tuple[float, ...]
    weights: tuple[float, ...]
    left_out: tuple[bool, ...]
    update_norm: float
    clip: float
    closeness: float = math.inf

    @property
    def rolled_back(self) -> bool:
        """Whether all replicas were left out."""
        return all(self.left_out)


@dataclass
class Pending:
    """A sync that has started and has not landed everywhere.

    Attributes:
        started: steps that each replica had made at the start.
        snapshots: parameters at the start, snapshots[replica][unit].
        averages: the weighted, clipped average of every unit.
        records: the decisions, by unit.
        lr: inner learning rate at the start.
        result: new anchor and momentum by unit, once the first replica has landed.
        waiting: replicas that have not landed.
    """

    started: list[int]
    snapshots: list[dict[str, Array]]
    averages: dict[str, Array]
    records: dict[str, UnitRecord]
    lr: float
    waiting: set[int]
    result: dict[str, tuple[Array, Array]] = field(default_factory=dict)


def judge(
    settings: StrategySettings,
    unit: str,
    step: int,
    deltas: Sequence[Array],
    steps: Sequence[int],
    detectors: Sequence[DetectorOracle],
) -> tuple[Array, UnitRecord]:
    """Run steps 1 to 5 of the sync of one unit.

    Args:
        settings: the strategy; without a penalty only non-finite replicas are left out.
        unit: its name, for the record.
        step: the attempted step, for the record.
        deltas: A - theta, one per replica.
        steps: steps of each replica since the last sync of the unit. A replica without a step is
            left out, and its detector is not updated.
        detectors: of each replica for this unit; updated in place.

    Returns:
        The average after the clip, zero if all replicas are left out, and the decision.
    """
    penalty = settings.penalty
    norms = [norm_of(delta.astype(np.float64)) for delta in deltas]
    left_out, closeness = [], math.inf
    for norm, count, detector in zip(norms, steps, detectors, strict=True):
        if count == 0:
            left_out.append(True)
        elif not penalty.anomaly_elimination:
            left_out.append(not math.isfinite(norm))
        else:
            judgement = detector.observe(norm)
            left_out.append(judgement.anomalous)
            closeness = min(closeness, closeness_of(judgement))
    weights = unit_weights(
        norms, left_out, temperature=penalty.temperature, uniform=not penalty.weighting
    )
    weights = step_weighted(weights, steps, left_out, rho=settings.rho)
    average = weighted_average(deltas, weights, left_out)
    update_norm = norm_of(average)
    factor = clip_factor(update_norm, penalty.max_norm)
    record = UnitRecord(
        unit, step, tuple(norms), tuple(weights), tuple(left_out), update_norm, factor, closeness
    )
    return (factor * average).astype(settings.dtype), record


def step_weighted(
    weights: Sequence[float], steps: Sequence[int], left_out: Sequence[bool], *, rho: float
) -> list[float]:
    """Mix weights with step shares, w <- (1 - rho) w + rho n_r / sum n, and renormalise."""
    if rho == 0.0 or all(left_out):
        return list(weights)
    counted = [0 if out else n for n, out in zip(steps, left_out, strict=True)]
    mixed = [
        (1.0 - rho) * w + rho * n / sum(counted) for w, n in zip(weights, counted, strict=True)
    ]
    return [w / sum(mixed) for w in mixed]
