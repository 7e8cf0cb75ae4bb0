"""Anomaly elimination: which replicas are rejected in which units (paper 3.3, method 3.2).

One detector per (replica, unit) has an exponential mean and variance of the pseudo-gradient norms
that it accepted. Rejected norms never enter its statistics; two rules prevent a permanent rejection
of a replica: the patience, and the restart after a change of regime.

Every rank runs the detectors on the gathered norms, and all must decide alike: only operations that
every processor rounds alike are used, and no powers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.method.rows import rows_of
from megatron_edit.method.settings import Settings

RELATIVE_SIGMA_FLOOR = 0.01  # of the mean: the test must not be too sensitive at a small sigma


@dataclass(frozen=True)
class DetectorState:
    """Statistics of all detectors; every tensor is [N, U].

    Attributes:
        mean: mu, float64; 0 before the first accepted value.
        variance: sigma^2, float64, without the correction for a young history.
        updates: k, int64, number of updates of `variance`.
        accepted: int64, values accepted since the detector started.
        rejected: int64, finite rejections in a row.
    """

    mean: Tensor
    variance: Tensor
    updates: Tensor
    accepted: Tensor
    rejected: Tensor

    @classmethod
    def fresh(cls, num_replicas: int, num_units: int) -> DetectorState:
        """Detectors without any value."""
        real = torch.zeros(num_replicas, num_units, dtype=torch.float64)
        count = torch.zeros(num_replicas, num_units, dtype=torch.int64)
        return cls(real, real.clone(), count, count.clone(), count.clone())

    def of_units(self, units: Sequence[int]) -> DetectorState:
        """The detectors of the given units, in this order."""
        return DetectorState(*(tensor[:, list(units)] for tensor in vars(self).values()))

    def with_units(self, units: Sequence[int], part: DetectorState) -> DetectorState:
        """A copy in which the detectors of the given units are replaced by `part`."""
        merged = DetectorState(*(tensor.clone() for tensor in vars(self).values()))
        for name, tensor in vars(merged).items():
            tensor[:, list(units)] = getattr(part, name)
        return merged

    def of_rows(self, rows: Sequence[int | None]) -> DetectorState:
        """The detectors of these replicas, in this order; None is a new replica."""
        return DetectorState(*(rows_of(tensor, rows) for tensor in vars(self).values()))

    def for_replicas(self, num_replicas: int) -> DetectorState:
        """The detectors for another number of replicas; fresh ones for additional replicas."""
        return self.of_rows([n if n < len(self.mean) else None for n in range(num_replicas)])


@dataclass(frozen=True)
class Verdict:
    """Results of the detectors for one sync.

    Attributes:
        anomalous: bool [N, U], replicas to reject.
        scores: float64 [N, U], z of each norm, for people: no decision depends on them. NaN where
            not armed or the norm is not finite.
    """

    anomalous: Tensor
    scores: Tensor = field(compare=False)

    @classmethod
    def of_finite(cls, norms: Tensor) -> Verdict:
        """The verdict where no norm is tested: only those that are not finite are anomalous."""
        return cls(~norms.isfinite(), torch.full_like(norms, torch.nan))


def judge(norms: Tensor, state: DetectorState, settings: Settings) -> tuple[Verdict, DetectorState]:
    """Test the norms of one sync, and update the statistics with those that are accepted.

    Args:
        norms: float64 [N, U], pseudo-gradient norms G; NaN and inf are allowed.
        state: statistics before this sync; not changed.
        settings: with `no_anomaly`, the ablation, only norms that are not finite are anomalous (a
            NaN must never spread), and the statistics do not change.

    Returns:
        The verdict, and the statistics after this sync.
    """
    finite = torch.isfinite(norms)
    if settings.no_anomaly:
        return Verdict.of_finite(norms), state
    armed = (
        (state.mean > 0) & (state.updates >= 1) & (state.accepted >= settings.anomaly_warmup_syncs)
    )
    excess, scale = norms - state.mean, _scale(state, settings)
    is_tested = armed & finite
    scores = torch.where(is_tested, excess / scale, torch.nan)
    # Compare the difference, not the quotient: the two can round to different sides of the bound.
    suspicious = is_tested & (excess > settings.anomaly_threshold * scale)
    rejected = suspicious & (state.rejected < settings.anomaly_patience)
    accepted = finite & ~rejected
    first = accepted & ((state.accepted == 0) | suspicious)  # a suspicious one restarts it
    return (
        Verdict(~finite | rejected, scores),
        _learn(norms, state, settings, accepted=accepted, first=first, rejected=rejected),
    )


def judge_units(
    norms: Tensor, state: DetectorState, units: Sequence[int], settings: Settings
) -> tuple[Verdict, DetectorState]:
    """Like `judge`, for some of the units.

    Args:
        norms: float64 [N, len(units)].
        state: statistics of all units; not changed.
        units: their positions, in the order of the columns of `norms`.

    Returns:
        The verdict on these units, and the statistics of all.
    """
    verdict, learned = judge(norms, state.of_units(units), settings)
    return verdict, state.with_units(units, learned)


def _scale(state: DetectorState, settings: Settings) -> Tensor:
    """max(sigma, 0.01 mu), with sigma corrected for a young history."""
    # 1 - (1 - alpha)^k is the weight that k updates have given to real values: without it the
    # variance of a young history is far too small. k = 0 is never armed; 1 avoids 0 / 0.
    young = 1.0 - _power(1.0 - settings.anomaly_alpha, state.updates.clamp(min=1))
    return torch.maximum((state.variance / young).sqrt(), RELATIVE_SIGMA_FLOOR * state.mean)


def _power(base: float, exponents: Tensor) -> Tensor:
    """Powers of a number, float64, of the shape of the exponents, int64 >= 0; by products."""
    result, left = torch.ones_like(exponents, dtype=torch.float64), exponents.clone()
    while bool(left.any()):
        result = torch.where(left % 2 == 1, result * base, result)
        base, left = base * base, left // 2
    return result


def _learn(
    norms: Tensor,
    state: DetectorState,
    settings: Settings,
    *,
    accepted: Tensor,
    first: Tensor,
    rejected: Tensor,
) -> DetectorState:
    later, alpha = accepted & ~first, settings.anomaly_alpha
    mean = alpha * norms + (1.0 - alpha) * state.mean
    variance = (1.0 - alpha) * state.variance + alpha * (norms - mean).square()
    zero = torch.zeros_like(state.updates)
    return DetectorState(
        mean=torch.where(first, norms, torch.where(later, mean, state.mean)),
        variance=torch.where(
            first, torch.zeros_like(norms), torch.where(later, variance, state.variance)
        ),
        updates=torch.where(first, zero, state.updates + later),
        accepted=torch.where(first, zero + 1, state.accepted + later),
        # A value that is not finite neither increments nor resets this count.
        rejected=torch.where(accepted, zero, state.rejected + rejected),
    )
