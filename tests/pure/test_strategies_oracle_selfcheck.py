"""The strategy oracle against published numbers, and strategies that must be equal."""

import numpy as np
import pytest

from tests.reference import published
from tests.reference.oracle import Array, EditOracle, OracleSettings
from tests.reference.outer_rules import NO_PENALTY, StrategySettings, settings_for
from tests.reference.strategies import Simulation

SIZES = {"embedding": 13, "layer.0": 7, "layer.1": 1, "layer.2": 5, "head": 3}


def start_units(seed: int = 3) -> dict[str, Array]:
    """Random parameters of odd sizes."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=size) for name, size in SIZES.items()}


def moves(steps: int, replicas: int, seed: int = 4) -> list[list[dict[str, Array]]]:
    """Random displacements, `[step][replica][unit]`."""
    rng = np.random.default_rng(seed)
    return [
        [{n: rng.normal(size=size) * 0.1 for n, size in SIZES.items()} for _ in range(replicas)]
        for _ in range(steps)
    ]


def trajectory(
    settings: StrategySettings, *, steps: int = 13, replicas: int = 3, end: bool = True
) -> Array:
    """Parameters of all replicas and units after every step, [steps, replicas, elements]."""
    simulation = Simulation.start(replicas, start_units(), settings)
    rows = []
    for s, displacements in enumerate(moves(steps, replicas), start=1):
        simulation.step(displacements, lr=0.01 * s, last=end and s == steps)
        rows.append([np.concatenate(list(theta.values())) for theta in simulation.theta])
    return np.array(rows)


def assert_close(found: Array, expected: Array | list[Array]) -> None:
    """Assert equality up to the rounding of a different order of additions in float64."""
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


# ---- published numbers


@pytest.mark.parametrize(("delay", "mix"), list(published.TORCHFT))
def test_oracle_equals_torchft_fixtures(delay: int, mix: float) -> None:
    """Catches: the pseudo-gradient taken at the landing, mix on the wrong side, a wrong anchor."""
    settings = settings_for(
        "streaming-diloco", tau=6, fragments=2, delay=delay, mix=mix, outer_lr=2.0,
        outer_momentum=0.0,
    )  # fmt: skip
    units = {"0": np.array([1.0]), "1": np.array([1.0])}
    schedule = published.torchft_schedule(delay)
    simulation = Simulation.start(2, units, settings, schedule)
    seen = [[1.0], [1.0]]
    anchors: dict[int, list[float]] = {}
    for step in range(1, 16):
        simulation.step([{"0": np.array([-2.0]), "1": np.array([-2.0])}] * 2)
        anchors[step] = [float(simulation.anchor[n][0]) for n in units]
        for fragment, name in enumerate(units):
            assert simulation.theta[0][name] == simulation.theta[1][name]
            seen[fragment].append(float(simulation.theta[0][name][0]))
    assert tuple(seen) == published.TORCHFT[delay, mix]
    if mix == 1.0:
        for fragment in (0, 1):
            for step, anchor in published.TORCHFT_ANCHORS[delay, fragment].items():
                assert anchors[step][fragment] == anchor


def test_oracle_equals_maxtext_numeric_case() -> None:
    """With real gradients. Catches: heavy-ball in place of Nesterov, a sum in place of the mean."""
    settings = settings_for("diloco", tau=3, outer_lr=1.0, outer_momentum=0.9)
    simulation = Simulation.start(2, published.MAXTEXT_START, settings)
    for losses in published.MAXTEXT_LOSSES:
        found = [published.maxtext_gradients(r, **simulation.theta[r]) for r in range(2)]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=5e-6)
        if losses == published.MAXTEXT_LOSSES[-1]:
            break
        simulation.step(
            [{n: -published.MAXTEXT_RATE * g for n, g in grads.items()} for _, grads in found]
        )
    for name, expected in published.MAXTEXT_SYNCED.items():
        # Published with four decimals.
        np.testing.assert_allclose(simulation.anchor[name], expected, rtol=0, atol=5e-5)


# ---- settings without effect, strategies that must be equal


PLAIN = [
    settings_for("local-sgd", tau=4),
    settings_for("post-local-sgd", tau=4, warmup_steps=3),
    settings_for("slowmo", tau=4, warmup_steps=1),
    settings_for("diloco", tau=4),
    settings_for("edit", tau=4, warmup_steps=2),
]


@pytest.mark.parametrize("settings", PLAIN, ids=lambda s: s.strategy)
def test_replicas_equal_the_anchor_after_an_undelayed_sync(settings: StrategySettings) -> None:
    """Catches: a landing that adds progress where there is none."""
    simulation = Simulation.start(3, start_units(), settings)
    for s, displacements in enumerate(moves(12, 3), start=1):
        simulation.step(displacements, lr=0.1)
        if s > settings.warmup_steps and (s - settings.warmup_steps) % 4 == 0:
            for theta in simulation.theta:
                for name, anchor in simulation.anchor.items():
                    np.testing.assert_array_equal(theta[name], anchor)


def test_plain_edit_equals_the_sync_oracle() -> None:
    """Catches: a part of the penalty that is not applied: weights, clip, detectors, momentum."""
    penalty = OracleSettings(warmup_syncs=2, threshold=1.5, max_norm=0.15)
    simulation = Simulation.start(3, start_units(), settings_for("edit", tau=1, penalty=penalty))
    plain = EditOracle.start(3, list(start_units().values()), penalty)
    for displacements in moves(9, 3):
        simulation.step(displacements)
        for theta, move in zip(plain.theta, displacements, strict=True):
            for u, name in enumerate(SIZES):
                theta[u] = theta[u] + move[name]
        expected = plain.sync()
        ours = simulation.records[-len(SIZES) :]
        assert [r.clip for r in ours] == expected.clip.tolist()
        np.testing.assert_array_equal(np.array([r.weights for r in ours]).T, expected.weights)
        np.testing.assert_array_equal(np.array([r.left_out for r in ours]).T, expected.anomalous)
        for u, name in enumerate(SIZES):
            np.testing.assert_array_equal(simulation.anchor[name], plain.anchor[u])
            np.testing.assert_array_equal(simulation.momentum[name], plain.momentum[u])
    assert any(any(r.left_out) for r in simulation.records)
    assert any(r.clip < 1.0 for r in simulation.records)


def test_streaming_without_fragments_or_delay_is_diloco() -> None:
    """Catches: a streaming landing that differs from the plain one at F = 1, d = 0, mix = 0."""
    plain = settings_for("diloco", tau=4)
    streaming = settings_for("streaming-diloco", tau=4, fragments=1, delay=0, mix=0.0)
    np.testing.assert_array_equal(trajectory(plain), trajectory(streaming))


def test_edit_without_penalty_is_diloco() -> None:
    """Catches: detectors, weights or clip that act although they are disabled."""
    rates = {"outer_lr": 0.7, "outer_momentum": 0.9}
    for more in ({}, {"fragments": 2}, {"mix": 0.25}, {"fragments": 3, "delay": 2, "mix": 0.25}):
        edit = settings_for("edit", tau=4, penalty=NO_PENALTY, **rates, **more)
        diloco = settings_for("diloco", tau=4, **more)
        np.testing.assert_array_equal(trajectory(edit), trajectory(diloco))


@pytest.mark.parametrize(
    "settings",
    [
        settings_for("diloco", tau=4, outer_lr=1.0, outer_momentum=0.0),
        settings_for("slowmo", tau=4, outer_lr=1.0, outer_momentum=0.0),
        settings_for("post-local-sgd", tau=4),
        settings_for("edit", tau=4, outer_lr=1.0, outer_momentum=0.0, penalty=NO_PENALTY),
    ],
    ids=lambda s: s.strategy,
)
def test_outer_lr_one_without_momentum_is_local_sgd(settings: StrategySettings) -> None:
    """Catches: an outer step at rate 1 without momentum that is not plain averaging."""
    assert_close(trajectory(settings), trajectory(settings_for("local-sgd", tau=4)))


def test_local_sgd_averages_parameters_every_tau_steps() -> None:
    """Catches: a local SGD that is anything but the mean of the parameters every tau steps."""
    expected = [np.concatenate(list(start_units().values()))] * 3
    found = trajectory(settings_for("local-sgd", tau=4), steps=8, end=False)
    for s, displacements in enumerate(moves(8, 3), start=1):
        expected = [
            theta + np.concatenate(list(move.values()))
            for theta, move in zip(expected, displacements, strict=True)
        ]
        if s % 4 == 0:
            expected = [np.mean(expected, axis=0)] * 3
        assert_close(found[s - 1], expected)


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "edit", "streaming-diloco"])
def test_sync_of_one_replica_changes_nothing(strategy: str) -> None:
    """Catches: a sync that changes anything at N = 1, nu = 1, mu_o = 0, also with a delay."""
    settings = settings_for(
        strategy, tau=4, fragments=2, delay=2 if strategy != "streaming-diloco" else 0, mix=0.5,
        outer_lr=1.0, outer_momentum=0.0, penalty=NO_PENALTY,
    )  # fmt: skip
    found = trajectory(settings, replicas=1)
    moved = np.array([np.concatenate(list(m[0].values())) for m in moves(13, 1)])
    start = np.concatenate(list(start_units().values()))
    assert_close(found[:, 0], start + np.cumsum(moved, axis=0))


def test_endless_warmup_averages_every_step() -> None:
    """Catches: replicas that differ in warm-up, and a sync at the last step without a round."""
    found = trajectory(settings_for("post-local-sgd", tau=4, warmup_steps=100))
    moved = [
        np.mean([np.concatenate(list(m.values())) for m in row], axis=0) for row in moves(13, 3)
    ]
    start = np.concatenate(list(start_units().values()))
    for r in range(3):
        assert_close(found[:, r], start + np.cumsum(moved, axis=0))


def test_fragment_equals_a_plain_run_with_shifted_syncs() -> None:
    """Catches: a unit in a wrong group, a group at a wrong step, a change of another group."""
    found = trajectory(settings_for("diloco", tau=4, fragments=2), end=False)
    shifts = {0: 0, 1: 2}  # floor(f tau / F)
    for i, name in enumerate(SIZES):
        # Group f alone is a plain run whose first round is shift steps long (or tau).
        unit = {name: start_units()[name]}
        alone = Simulation.start(3, unit, settings_for("diloco", tau=4))
        offset = sum(list(SIZES.values())[:i])
        for s, displacements in enumerate(moves(13, 3), start=1):
            for r in range(3):
                alone.advance(r, {name: displacements[r][name]})
            if (s - shifts[i % 2]) % 4 == 0:
                alone.meet([0])
            for r in range(3):
                np.testing.assert_array_equal(
                    found[s - 1, r, offset : offset + SIZES[name]], alone.theta[r][name]
                )


def test_fp32_oracle_is_close_to_fp64() -> None:
    """Catches: state that is converted to float64 although float32 was requested."""
    settings = settings_for("edit", tau=4, fragments=2, delay=1, mix=0.25, dtype=np.float32)
    simulation = Simulation.start(3, start_units(), settings)
    for displacements in moves(9, 3):
        simulation.step(displacements)
    arrays = [*simulation.theta[0].values(), *simulation.anchor.values()]
    assert {a.dtype for a in [*arrays, *simulation.momentum.values()]} == {np.dtype(np.float32)}
    double = trajectory(settings_for("edit", tau=4, fragments=2, delay=1, mix=0.25))
    single = trajectory(settings)
    np.testing.assert_allclose(single, double, rtol=1e-5, atol=1e-5)
    assert not np.array_equal(single, double)


def test_default_penalty_of_each_strategy() -> None:
    """Catches: the strategy `edit` without its penalty."""
    assert settings_for("edit", tau=4).penalty == OracleSettings()
    assert settings_for("diloco", tau=4).penalty == NO_PENALTY
