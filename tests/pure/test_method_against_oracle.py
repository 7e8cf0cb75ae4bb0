"""The pure method in torch against the oracle in NumPy: detector, weights, clip."""

import copy
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megatron_edit.method.detector import DetectorState, judge
from megatron_edit.method.outer import clip_factor, weighted_contribution_
from megatron_edit.method.settings import Settings
from megatron_edit.method.weights import replica_weights
from tests.reference import oracle
from tests.reference.oracle import OracleSettings

Array = NDArray[np.float64]

EXACT = 1e-12  # same float64 inputs, different order of operations
BORDERLINE = 1e-12  # relative distance to a bound below which rounding decides
UNIT_SIZES = (1, 7, 33, 130)
STATISTICS = tuple(field.name for field in fields(DetectorState))

# Same examples in every run; the first call pays for torch's start.
repeatable = settings(deadline=None, derandomize=True, max_examples=150)


def assert_close(actual: Tensor | Array, expected: Array, *, slack: Array | float = 0.0) -> None:
    """Assert equality (also of NaN and inf) or a difference within EXACT * (|expected| + slack)."""
    got = np.asarray(actual, dtype=np.float64)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(got - expected) <= EXACT * (np.abs(expected) + slack)
    assert np.all(same | (near & np.isfinite(got))), f"{got} is not {expected}"


def config_of(options: OracleSettings) -> Settings:
    """Return the settings of the detector."""
    names = ("threshold", "alpha", "warmup_syncs", "patience")
    return Settings(**{f"anomaly_{name}": getattr(options, name) for name in names})


# --- detector ---------------------------------------------------------------------------------

INDEX = st.integers(0, 59)
EXTREMES = st.sampled_from([math.nan, math.inf, 0.0, 1e300, 1e-300, 1.0])
FACTORS = st.sampled_from([100.0, 3.0, 1.5, 0.01])
# (kind, sync, replica, unit, number): one value, a value for every replica, a spike, or a shift
# that lasts. Indices are taken modulo the size of the table.
DISTURBANCES = st.one_of(
    st.tuples(st.sampled_from(["value", "everyone"]), INDEX, INDEX, INDEX, EXTREMES),
    st.tuples(st.sampled_from(["spike", "shift"]), INDEX, INDEX, INDEX, FACTORS),
)


@st.composite
def norm_tables(draw: st.DrawFn) -> Array:
    """Draw norms [syncs, N, U] around one level, with noise and up to 20 disturbances."""
    shape = (draw(st.integers(1, 60)), draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    level = draw(st.sampled_from([1.0, 1e-3, 1e4, 1e-200, 1e140, 0.0]))
    noise = draw(st.sampled_from([0.05, 0.0, 1e-6, 0.5]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table: Array = level * np.abs(1.0 + noise * generator.standard_normal(shape))
    for kind, *where, number in draw(st.lists(DISTURBANCES, max_size=20)):
        s, r, u = (index % size for index, size in zip(where, shape, strict=True))
        if kind in ("value", "everyone"):
            table[s, r if kind == "value" else slice(None), u] = number
        else:
            table[slice(s, s + 1 if kind == "spike" else None), r, u] *= number
    return table


DETECTOR_SETTINGS = st.builds(
    OracleSettings,
    threshold=st.sampled_from([3.0, 0.5, 10.0]),
    alpha=st.sampled_from([0.02, 0.3, 0.9]),
    warmup_syncs=st.sampled_from([3, 0, 1, 20]),
    patience=st.integers(0, 4),
)


def detector_table(detectors: list[list[oracle.DetectorOracle]], name: str) -> Array:
    """Return one field of all detectors, [N, U]."""
    return np.array([[getattr(detector, name) for detector in row] for row in detectors])


def assert_same_state(state: DetectorState, detectors: list[list[oracle.DetectorOracle]]) -> None:
    """Compare all statistics; the variance of almost equal norms is mostly rounding error."""
    mean = detector_table(detectors, "mean")
    with np.errstate(over="ignore"):
        square = np.where(np.abs(mean) < 1e150, mean * mean, 0.0)
    assert_close(state.mean, mean)
    assert_close(state.variance, detector_table(detectors, "var"), slack=square)
    for name in ("updates", "accepted", "rejected"):
        counts = getattr(state, name)
        assert counts.dtype == torch.int64
        assert counts.tolist() == detector_table(detectors, name).tolist(), name


def run_detectors(table: Array, options: OracleSettings) -> None:
    """Run both implementations sync by sync and compare verdicts and statistics."""
    _, num_replicas, num_units = table.shape
    state = DetectorState.fresh(num_replicas, num_units)
    detectors = [
        [oracle.DetectorOracle(options) for _ in range(num_units)] for _ in range(num_replicas)
    ]
    for norms in table:
        expected = [
            [detectors[r][u].observe(float(norms[r, u])) for u in range(num_units)]
            for r in range(num_replicas)
        ]
        if any(oracle.closeness_of(j) <= BORDERLINE for row in expected for j in row):
            reject()
        before, untouched = state, copy.deepcopy(state)
        verdict, state = judge(torch.from_numpy(norms.copy()), before, config_of(options))
        # In-place statistics would make a repeated or resumed sync count twice.
        assert all(torch.equal(getattr(before, n), getattr(untouched, n)) for n in STATISTICS)
        assert verdict.anomalous.dtype == torch.bool
        assert verdict.anomalous.tolist() == [[j.anomalous for j in row] for row in expected]
        # Excess and scale lose digits of the mean: errors are relative to a standard deviation.
        assert_close(
            verdict.scores, np.array([[j.score for j in row] for row in expected]), slack=1
        )
        assert_same_state(state, detectors)


@repeatable
@given(table=norm_tables(), options=DETECTOR_SETTINGS)
def test_detector_matches_oracle_on_disturbed_norms(table: Array, options: OracleSettings) -> None:
    """Catches errors in arming, bias correction, patience, restart or NaN handling."""
    run_detectors(table, options)


SHORT_NORMS = st.one_of(
    st.sampled_from([1.0, 2.0, 100.0, math.nan, math.inf, 0.0]),
    st.floats(0.0, 1e300, allow_subnormal=False),
)


def test_detector_accepts_lasting_change_of_norm() -> None:
    """Catches a permanent rejection, an early restart, or a NaN that counts (default settings)."""
    calm = [1.0, 1.01, 0.99, 1.02] * 6
    shifted = [50.0, 50.5, math.nan, 49.0, 51.0, 50.0]
    table = np.array(calm + shifted + [50.0] * 25 + [5000.0]).reshape(-1, 1, 1)
    run_detectors(table, OracleSettings())
    state = DetectorState.fresh(1, 1)
    flags = []
    for norms in table:
        verdict, state = judge(torch.from_numpy(norms), state, config_of(OracleSettings()))
        flags.append(bool(verdict.anomalous))
    # Three rejections with a NaN between them, then 51 starts a new history.
    assert flags[24:30] == [True, True, True, True, False, False]
    assert not any(flags[:24] + flags[30:-1])
    assert flags[-1]


def test_detector_bound_is_strict() -> None:
    """Catches >= in place of >; both sides of the comparison are exact in binary."""
    # Mean 6 and sigma 2 after 4 and 8 (see the self-check of the oracle): bound 6.
    config = config_of(OracleSettings(alpha=0.5, warmup_syncs=2))
    state = DetectorState.fresh(1, 2)
    for norm in (4.0, 8.0):
        _, state = judge(torch.full((1, 2), norm, dtype=torch.float64), state, config)
    verdict, _ = judge(torch.tensor([[12.0, 12.0 + 1e-9]], dtype=torch.float64), state, config)
    assert verdict.anomalous.tolist() == [[False, True]]
    assert verdict.scores[0, 0].item() == 3.0


def test_disabled_detector_keeps_its_state() -> None:
    """Catches an ablation that accepts NaN, rejects a finite norm, or updates statistics."""
    config = config_of(OracleSettings(warmup_syncs=0))
    state = DetectorState.fresh(1, 4)
    for _ in range(5):
        _, state = judge(torch.ones(1, 4, dtype=torch.float64), state, config)
    norms = torch.tensor([[1e9, math.nan, math.inf, 0.0]], dtype=torch.float64)
    verdict, after = judge(norms, state, replace(config, no_anomaly=True))
    assert verdict.anomalous.tolist() == [[False, True, True, False]]
    assert all(torch.equal(getattr(after, name), getattr(state, name)) for name in STATISTICS)


# --- weights ----------------------------------------------------------------------------------


@st.composite
def weight_inputs(draw: st.DrawFn) -> tuple[Array, NDArray[np.bool_]]:
    """Draw norms [N, U] and anomalous flags, which include all non-finite norms."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    size = shape[0] * shape[1]
    near = st.floats(0.5, 2.0)
    norms = draw(st.lists(st.one_of(near, SHORT_NORMS), min_size=size, max_size=size))
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    table = np.array(norms).reshape(shape)
    return table, np.array(flags).reshape(shape) | ~np.isfinite(table)


@repeatable
@given(
    inputs=weight_inputs(),
    temperature=st.sampled_from([None, 1.0, 1e-3, 50.0, 0.0]),
    uniform=st.booleans(),
)
def test_weights_match_oracle_on_any_norms(
    inputs: tuple[Array, NDArray[np.bool_]], temperature: float | None, uniform: bool
) -> None:
    """Catches a wrong median, a missing shift, 0/0, and a weight for an anomalous replica."""
    norms, anomalous = inputs
    expected = oracle.weight_table(norms, anomalous, temperature=temperature, uniform=uniform)
    actual = replica_weights(
        torch.from_numpy(norms),
        torch.from_numpy(anomalous),
        temperature=temperature,
        uniform=uniform,
    )
    assert actual.dtype == torch.float64
    # Weights below 1e-288 have lost digits to underflow.
    assert_close(actual, expected, slack=1e-288)
    assert torch.all(actual[torch.from_numpy(anomalous)] == 0.0)
    sums = actual.sum(dim=0).numpy()
    assert_close(sums, np.where(anomalous.all(axis=0), 0.0, 1.0))


@pytest.mark.parametrize(
    ("norms", "temperature"),
    [
        ([1e300, 1e300, 1e300], 1.0),
        ([800.0, 801.0, 802.0], 1.0),  # exp(-800) is 0 in float64
        ([0.0, 0.0, 5.0], None),
        ([1.0, 2.0, 4.0, 9.0], None),
        ([1e-300, 2e-300, 3e-300], None),
    ],
)
def test_weights_match_oracle_on_extreme_norms(
    norms: list[float], temperature: float | None
) -> None:
    """Catches underflow of all weights, T = 0, and the lower median of an even number of norms."""
    table = np.array(norms).reshape(-1, 1)
    none_anomalous = np.zeros(table.shape, dtype=np.bool_)
    actual = replica_weights(
        torch.from_numpy(table), torch.from_numpy(none_anomalous), temperature=temperature
    )
    assert_close(actual, oracle.weight_table(table, none_anomalous, temperature=temperature))


# --- outer step -------------------------------------------------------------------------------


@repeatable
@given(
    norms=st.lists(st.floats(0.0, 1e300), min_size=1, max_size=4),
    max_norm=st.sampled_from([None, 10.0, 1e-3, 1e-6]),
)
def test_clip_factor_matches_oracle(norms: list[float], max_norm: float | None) -> None:
    """Catches a factor above 1, a missing epsilon, and a clip that cannot be switched off."""
    actual = clip_factor(torch.tensor(norms, dtype=torch.float64), max_norm)
    assert actual.dtype == torch.float64
    assert_close(actual, np.array([oracle.clip_factor(norm, max_norm) for norm in norms]))


@pytest.mark.parametrize("size", UNIT_SIZES)
def test_excluded_contribution_is_exactly_zero(size: int) -> None:
    """Catches 0 * inf and 0 * NaN: the zeros are selected, not computed."""
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        contribution = weighted_contribution_(torch.full((size,), poison), 0.0)
        assert contribution.dtype == torch.float32
        assert torch.equal(contribution, torch.zeros(size))
    delta = torch.linspace(-1.0, 3.0, size)
    contribution = weighted_contribution_(delta.clone(), 0.3)
    expected = 0.3 * delta.double().numpy()
    np.testing.assert_allclose(contribution.double().numpy(), expected, rtol=1e-6, atol=0.0)
    assert torch.equal(delta, torch.linspace(-1.0, 3.0, size))
