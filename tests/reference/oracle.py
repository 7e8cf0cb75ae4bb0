"""The EDiT method in slow, readable NumPy float64: the expected values of the tests.

Written from the description of the method alone. It shares no code with `megatron_edit`, has no
process groups and no shards, and uses loops over replicas instead of tensor expressions. Inputs of
any dtype are converted to float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

SIGMA_FLOOR = 0.01  # of the mean: a detector whose history is constant still tolerates 1 percent
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class OracleSettings:
    """The settings of the penalty, with the defaults of the method.

    Attributes:
        threshold: delta, in standard deviations.
        alpha: weight of the newest norm in the moving statistics, in (0, 1).
        warmup_syncs: accepted norms needed before a detector is armed.
        patience: finite rejections in a row after which the next finite norm is accepted.
        temperature: T of the weights; None is `auto`, the median of the accepted norms.
        max_norm: phi of the clip; None is off.
        anomaly_elimination: if off, only non-finite norms are left out, and statistics are frozen.
        weighting: if off, all accepted replicas have the same weight.
    """

    threshold: float = 3.0
    alpha: float = 0.02
    warmup_syncs: int = 20
    patience: int = 3
    temperature: float | None = None
    max_norm: float | None = 10.0
    anomaly_elimination: bool = True
    weighting: bool = True


@dataclass(frozen=True)
class Judgement:
    """The verdict of a detector on one norm.

    Attributes:
        anomalous: the replica is left out of the unit.
        score: z; NaN where the detector is not armed or the norm is not finite.
        excess: norm - mean, the left side of the test; NaN where there was no test.
        bound: the right side of the test; NaN where there was no test.
    """

    anomalous: bool
    score: float = math.nan
    excess: float = math.nan
    bound: float = math.nan


@dataclass
class DetectorOracle:
    """The anomaly detector of one replica in one unit; its history counts syncs."""

    settings: OracleSettings
    mean: float = 0.0
    var: float = 0.0
    updates: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def armed(self) -> bool:
        """Whether the detector may reject a finite norm."""
        enough = self.accepted >= self.settings.warmup_syncs
        return self.mean > 0.0 and self.updates >= 1 and enough

    def corrected_sigma(self) -> float:
        """Return the standard deviation with bias correction for the zero initial variance."""
        correction = 1.0 - (1.0 - self.settings.alpha) ** self.updates
        return math.sqrt(self.var / correction)

    def observe(self, norm: float) -> Judgement:
        """Judge one norm and update the statistics accordingly."""
        if not math.isfinite(norm):
            # Always left out; does not change the number of rejections in a row.
            return Judgement(anomalous=True)
        if not self.armed:
            self._accept(norm)
            return Judgement(anomalous=False)

        excess = norm - self.mean
        floor = SIGMA_FLOOR * self.mean
        scale = max(self.corrected_sigma(), floor)
        bound = self.settings.threshold * scale
        score = quotient(excess, scale)
        suspicious = excess > bound

        if not suspicious:
            self._accept(norm)
            return Judgement(False, score, excess, bound)
        if self.rejected >= self.settings.patience:
            # A change of regime: the value is accepted and starts a new history.
            self._restart(norm)
            return Judgement(False, score, excess, bound)
        self.rejected += 1
        return Judgement(True, score, excess, bound)

    def _accept(self, norm: float) -> None:
        if self.accepted == 0:
            self._restart(norm)
            return
        alpha = self.settings.alpha
        self.mean = alpha * norm + (1.0 - alpha) * self.mean
        deviation = norm - self.mean
        self.var = (1.0 - alpha) * self.var + alpha * (deviation * deviation)
        self.updates += 1
        self.accepted += 1
        self.rejected = 0

    def _restart(self, norm: float) -> None:
        self.mean = norm
        self.var = 0.0
        self.updates = 0
        self.accepted = 1
        self.rejected = 0


def quotient(excess: float, scale: float) -> float:
    """Divide as in IEEE 754: inf if only the scale is 0 (means whose floor underflows)."""
    if scale > 0.0:
        return excess / scale
    return math.nan if excess == 0.0 else math.copysign(math.inf, excess)


def median_of(values: Sequence[float]) -> float:
    """Return the median; the mean of the two middle values if their number is even."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2.0


def unit_weights(
    norms: Sequence[float],
    anomalous: Sequence[bool],
    *,
    temperature: float | None,
    uniform: bool = False,
) -> list[float]:
    """Return the weights of all replicas in one unit.

    Args:
        norms: one pseudo-gradient norm per replica.
        anomalous: which replicas are left out.
        temperature: T; None is the median of the accepted norms.
        uniform: whether the weighting is switched off.

    Returns:
        One weight per replica: their sum is 1, or all are 0 when no replica is accepted.
    """
    accepted = [r for r in range(len(norms)) if not anomalous[r]]
    weights = [0.0] * len(norms)
    if not accepted:
        return weights
    if temperature is None:
        temperature = median_of([float(norms[r]) for r in accepted])
    if uniform or temperature == 0.0:
        for r in accepted:
            weights[r] = 1.0 / len(accepted)
        return weights

    # The smallest norm gets exp(0) = 1, so the sum can never be zero.
    smallest = min(float(norms[r]) for r in accepted)
    for r in accepted:
        weights[r] = math.exp(-(float(norms[r]) - smallest) / temperature)
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def weight_table(
    norms: Array, anomalous: BoolArray, *, temperature: float | None, uniform: bool = False
) -> Array:
    """Apply `unit_weights` to every column of a table [N, U]."""
    table = np.zeros(norms.shape, dtype=np.float64)
    for u in range(norms.shape[1]):
        table[:, u] = unit_weights(
            norms[:, u].tolist(), anomalous[:, u].tolist(), temperature=temperature, uniform=uniform
        )
    return table


def weighted_average(
    deltas: Sequence[Array], weights: Sequence[float], anomalous: Sequence[bool]
) -> Array:
    """Return the weighted sum of pseudo-gradients; those of anomalous replicas are not read."""
    total = np.zeros(deltas[0].shape, dtype=np.float64)
    for delta, weight, is_anomalous in zip(deltas, weights, anomalous, strict=True):
        if not is_anomalous:
            total = total + weight * delta
    return total


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return c = min(1, phi / (norm + 1e-6)); 1 if the clip is off."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


def nesterov(
    anchor: Array, momentum: Array, step: Array, *, lr: float, momentum_coefficient: float
) -> tuple[Array, Array]:
    """Make one outer step with the clipped average `step`; return (new anchor, new momentum)."""
    new_momentum = momentum_coefficient * momentum + step
    new_anchor = anchor - lr * (step + momentum_coefficient * new_momentum)
    return new_anchor, new_momentum


def norm_of(delta: Array) -> float:
    """Return the Euclidean norm; NaN and inf propagate."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.sum(delta * delta)))


def closeness_of(judgement: Judgement) -> float:
    """Return the relative distance between both sides of a test; inf if there was none."""
    if math.isnan(judgement.excess) or math.isinf(judgement.bound):
        return math.inf
    scale = max(abs(judgement.excess), abs(judgement.bound))
    return abs(judgement.excess - judgement.bound) / scale if scale > 0.0 else math.inf
