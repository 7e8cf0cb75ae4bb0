"""Hand-computed values of the NumPy oracle, so that oracle and engine do not share an error."""

import math

import numpy as np
import pytest

from tests.reference.oracle import (
    DetectorOracle,
    EditOracle,
    OracleSettings,
    clip_factor,
    median_of,
    unit_weights,
    weighted_average,
)

# alpha 1/2 keeps every number below exact in binary.
QUICK = OracleSettings(threshold=3.0, alpha=0.5, warmup_syncs=1, patience=2)


def detector_after(*norms: float, settings: OracleSettings = QUICK) -> DetectorOracle:
    """A detector that has observed `norms`."""
    detector = DetectorOracle(settings)
    for norm in norms:
        detector.observe(norm)
    return detector


def test_detector_statistics_of_two_values() -> None:
    """Catches: a first value averaged with zero, a variance around the old mean."""
    # 4 starts: mean 4, var 0. 8: mean 4/2 + 8/2 = 6, var 0/2 + (8 - 6)^2/2 = 2, one update.
    detector = detector_after(4.0, 8.0)
    assert (detector.mean, detector.var) == (6.0, 2.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (1, 2, 0)
    # sigma^2 = 2 / (1 - 1/2) = 4.
    assert detector.corrected_sigma() == 2.0


def test_detector_bound_is_strict_and_bias_corrected() -> None:
    """Catches: >= in place of >, and a missing bias correction (12 would have z = 4.2)."""
    # bound 3 * max(2, 0.06) = 6; 12 - 6 = 6 is not more, 12.5 - 6 = 6.5 is.
    at_bound = detector_after(4.0, 8.0).observe(12.0)
    above = detector_after(4.0, 8.0).observe(12.5)
    assert (at_bound.anomalous, at_bound.score) == (False, 3.0)
    assert (above.anomalous, above.score) == (True, 3.25)


def test_detector_tolerates_three_percent_after_constant_norms() -> None:
    """Catches: the floor of sigma lost, so that the first rounding difference is an anomaly."""
    # mean 100, var 0: bound 3 * max(0, 1) = 3.
    assert not detector_after(100.0, 100.0).observe(103.0).anomalous
    judgement = detector_after(100.0, 100.0).observe(103.5)
    assert (judgement.anomalous, judgement.score) == (True, 3.5)


def test_detector_is_armed_after_warmup_with_positive_mean() -> None:
    """Catches: arming on the first value, on a zero mean, or one sync early or late."""
    assert not detector_after(4.0).armed  # no update yet, although warmup_syncs is 1
    assert detector_after(4.0, 4.0).armed
    assert not detector_after(0.0, 0.0, 0.0).armed
    patient = OracleSettings(alpha=0.5, warmup_syncs=4)
    assert not detector_after(4.0, 4.0, 4.0, settings=patient).armed
    assert detector_after(4.0, 4.0, 4.0, 4.0, settings=patient).armed
    unarmed = detector_after(4.0, 4.0, 4.0, settings=patient).observe(1e9)
    assert not unarmed.anomalous
    assert math.isnan(unarmed.score)


def test_rejected_norm_does_not_change_statistics() -> None:
    """Catches: a detector poisoned by the value it has just rejected."""
    detector = detector_after(4.0, 8.0, 1e6)
    assert (detector.mean, detector.var, detector.updates) == (6.0, 2.0, 1)
    assert detector.rejected == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norm_neither_counts_nor_resets_rejections(bad: float) -> None:
    """Catches: a NaN that counts as a rejection, or resets the count of rejections."""
    detector = detector_after(4.0, 8.0, 20.0, bad)
    assert (detector.accepted, detector.rejected) == (2, 1)
    assert DetectorOracle(QUICK).observe(bad).anomalous  # armed or not


def test_detector_restarts_after_change_of_regime() -> None:
    """Catches: a lock-out after a level shift, and statistics of before it that are kept."""
    # Patience 2: two rejections, then 20 is accepted although 20 - 6 > 6.
    detector = detector_after(4.0, 8.0, 20.0, math.nan, 20.0)
    assert not detector.observe(20.0).anomalous
    assert (detector.mean, detector.var) == (20.0, 0.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (0, 1, 0)
    # Unarmed again: 1000 is accepted, mean 20/2 + 1000/2 = 510.
    assert not detector.observe(1000.0).anomalous
    assert detector.mean == 510.0


def test_normal_norm_after_patience_continues_history() -> None:
    """Catches: a restart although the value fits the old statistics."""
    # 6 is the mean: mean stays 6, var 2/2 + 0 = 1, second update, count of rejections reset.
    detector = detector_after(4.0, 8.0, 20.0, 20.0, 6.0)
    assert (detector.mean, detector.var) == (6.0, 1.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (2, 3, 0)


def test_weights_equal_hand_computed_values() -> None:
    """Catches: a wrong sign in the exponent, a wrong median, an anomalous norm in the median."""
    # T = 1: exp(0) : exp(-ln 2) = 2 : 1.
    assert unit_weights([0.0, math.log(2.0)], [False, False], temperature=1.0) == pytest.approx(
        [2 / 3, 1 / 3], rel=1e-15
    )
    # auto: the median of 1 and 3 is 2, so the ratio is exp((3 - 1) / 2) = e.
    weights = unit_weights([1.0, 1e9, 3.0], [False, True, False], temperature=None)
    assert weights[1] == 0.0
    assert weights[0] / weights[2] == pytest.approx(math.e, rel=1e-15)
    assert sum(weights) == pytest.approx(1.0, rel=1e-15)
    assert median_of([4.0, 1.0, 2.0]) == 2.0
    assert median_of([8.0, 1.0, 2.0, 4.0]) == 3.0


def test_weights_of_degenerate_norms() -> None:
    """Catches: 0/0 at large norms, at a zero median, and where no replica is accepted."""
    none_rejected = [False, False, False]
    assert unit_weights([1e300] * 3, none_rejected, temperature=1.0) == [1 / 3] * 3
    assert unit_weights([0.0, 5.0, 0.0], none_rejected, temperature=None) == [1 / 3] * 3
    assert unit_weights([1.0, 9.0, math.nan], [False, False, True], temperature=1.0, uniform=True)[
        :2
    ] == [0.5, 0.5]
    assert unit_weights([math.nan, math.inf], [True, True], temperature=None) == [0.0, 0.0]


def test_average_ignores_nonfinite_excluded_replica() -> None:
    """Catches: 0 * inf in the sum."""
    deltas = [np.array([1.0, 2.0]), np.array([np.inf, np.nan])]
    assert weighted_average(deltas, [1.0, 0.0], [False, True]).tolist() == [1.0, 2.0]


def test_clip_factor_equals_hand_computed_values() -> None:
    """Catches: a factor above 1, a missing epsilon, a disabled clip taken for a clip of zero."""
    assert clip_factor(9.999999, 5.0) == pytest.approx(0.5, rel=1e-15)
    assert clip_factor(5.0, 5.0) < 1.0
    assert clip_factor(1.0, 5.0) == 1.0
    assert clip_factor(1e30, None) == 1.0


def test_two_rounds_equal_hand_computed_values() -> None:
    """Catches: heavy-ball in place of Nesterov, the old momentum in the step, a wrong sign."""
    settings = OracleSettings(outer_lr=0.5, outer_momentum=0.5, max_norm=None, weighting=False)
    oracle = EditOracle.start(2, [np.array([10.0])], settings)
    oracle.theta[0][0] -= 1.0
    oracle.theta[1][0] -= 3.0
    record = oracle.sync()
    # D = 1 and 3, average 2; b = 2; A = 10 - (2 + 2/2)/2 = 8.5.
    assert record.norms.tolist() == [[1.0], [3.0]]
    assert record.update_norm.tolist() == [2.0]
    assert (oracle.momentum[0][0], oracle.anchor[0][0]) == (2.0, 8.5)
    assert [float(oracle.theta[r][0][0]) for r in range(2)] == [8.5, 8.5]
    for r in range(2):
        oracle.theta[r][0] -= 1.0
    oracle.sync()
    # average 1; b = 2/2 + 1 = 2; A = 8.5 - (1 + 2/2)/2 = 7.5.
    assert (oracle.momentum[0][0], oracle.anchor[0][0]) == (2.0, 7.5)


def test_momentum_uses_clipped_average() -> None:
    """Catches: a momentum that takes the average before it is clipped."""
    settings = OracleSettings(outer_lr=1.0, outer_momentum=0.5, max_norm=2.5)
    oracle = EditOracle.start(1, [np.array([0.0, 0.0])], settings)
    oracle.theta[0][0] -= np.array([3.0, 4.0])
    record = oracle.sync()
    # norm 5, c = 2.5 / 5.000001; b = c D; A = -(1 + 1/2) c D.
    factor = 2.5 / 5.000001
    assert record.clip.tolist() == pytest.approx([factor], rel=1e-15)
    assert oracle.momentum[0].tolist() == pytest.approx([3 * factor, 4 * factor], rel=1e-15)
    assert oracle.anchor[0].tolist() == pytest.approx([-4.5 * factor, -6 * factor], rel=1e-15)


def test_unit_without_accepted_replica_alone_is_rolled_back() -> None:
    """Catches: momentum applied or decayed in a roll-back, and a roll-back of other units."""
    settings = OracleSettings(outer_lr=1.0, outer_momentum=0.5)
    oracle = EditOracle.start(2, [np.array([1.0]), np.array([1.0])], settings)
    oracle.momentum[0][:] = 8.0
    for r in range(2):
        oracle.theta[r][0][:] = np.nan
        oracle.theta[r][1] -= 1.0
    record = oracle.sync()
    assert record.rollback.tolist() == [True, False]
    assert record.weights[:, 0].tolist() == [0.0, 0.0]
    assert (oracle.anchor[0][0], oracle.momentum[0][0]) == (1.0, 8.0)
    assert [float(oracle.theta[r][0][0]) for r in range(2)] == [1.0, 1.0]
    # D = 1, b = 1, A = 1 - (1 + 1/2) = -0.5.
    assert oracle.anchor[1][0] == -0.5


def test_sync_of_one_replica_without_momentum_changes_nothing() -> None:
    """Catches: an outer step that is not the identity at N = 1, nu = 1, mu_o = 0."""
    settings = OracleSettings(outer_lr=1.0, outer_momentum=0.0, max_norm=None)
    oracle = EditOracle.start(1, [np.array([1.0, 2.0])], settings)
    oracle.theta[0][0] += np.array([0.25, -0.5])
    oracle.sync()
    assert oracle.anchor[0].tolist() == [1.25, 1.5]
