"""Every strategy through the engine, over real process groups, against the NumPy oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_edit.config import EditConfig
from tests.distributed.strategy_runs import SCENARIOS, Settings, run_both
from tests.distributed.test_rounds import SIZES, make_moves
from tests.harness import run_ranks
from tests.reference import published
from tests.reference.outer_rules import PRESETS, settings_for
from tests.reference.strategies import Simulation

WORLDS = [(2, 1), (3, 1), (2, 2)]  # replicas, ranks of each

CASES: dict[str, Settings] = {
    # as published
    "local-sgd": {"strategy": "local-sgd"},
    "post-local-sgd": {"strategy": "post-local-sgd", "warmup_steps": 2},
    "slowmo": {"strategy": "slowmo"},
    "slowmo-slower": {"strategy": "slowmo", "outer_lr": 0.5, "outer_momentum": 0.3},
    "diloco": {"strategy": "diloco", "warmup_steps": 1},
    "co2": {"strategy": "co2"},
    "co2-gap-clip": {"strategy": "co2", "co2_gap": 2.0, "co2_clip": 0.05, "outer_lr": 0.7},
    "streaming-diloco": {"strategy": "streaming-diloco", "sync_interval": 9, "warmup_steps": 1},
    "edit": {"strategy": "edit", "warmup_steps": 1, "clip": 0.5},
    "sparse-loco": {"strategy": "sparse-loco", "warmup_steps": 1, "outer_lr": 0.7},
    # staggered
    "local-sgd-F2": {"strategy": "local-sgd", "fragments": 2},
    "co2-F2": {"strategy": "co2", "fragments": 2, "warmup_steps": 1},
    "edit-F3": {"strategy": "edit", "fragments": 3, "sync_interval": 5, "warmup_steps": 2},
    "edit-F4-tau4": {"strategy": "edit", "fragments": 4, "sync_interval": 4},
    # delayed
    "edit-d2": {"strategy": "edit", "delay_steps": 2},
    "edit-d3": {"strategy": "edit", "delay_steps": 3, "warmup_steps": 1},
    "diloco-d2": {"strategy": "diloco", "delay_steps": 2},
    "sparse-loco-F2-d1": {"strategy": "sparse-loco", "fragments": 2, "delay_steps": 1},
    # mixed
    "edit-mix": {"strategy": "edit", "mix": 0.25},
    "streaming-F2-d1": {
        "strategy": "streaming-diloco", "fragments": 2, "delay_steps": 1, "mix": 0.25,
    },
    "streaming-plain": {
        "strategy": "streaming-diloco", "fragments": 1, "delay_steps": 0, "mix": 0.0,
    },
    # all of it
    "edit-F2-d2-mix": {
        "strategy": "edit", "fragments": 2, "delay_steps": 2, "mix": 0.5, "clip": 0.5,
    },
    "edit-F3-d4-mix": {
        "strategy": "edit", "fragments": 3, "delay_steps": 4, "mix": 0.25, "sync_interval": 5,
        "warmup_steps": 1,
    },
    "diloco-F4-d3-mix": {"strategy": "diloco", "fragments": 4, "delay_steps": 3, "mix": 0.25},
    "slowmo-F2-d1-mix": {"strategy": "slowmo", "fragments": 2, "delay_steps": 1, "mix": 0.5},
    "post-local-F2-d1": {
        "strategy": "post-local-sgd", "fragments": 2, "delay_steps": 1, "warmup_steps": 3,
    },
}  # fmt: skip

# Each case runs in one world in the core tier, and in the others in the full tier.
CASES_IN_WORLDS = [
    pytest.param(
        name,
        world,
        id=f"{name}-{world[0]}x{world[1]}",
        marks=() if place == index % len(WORLDS) else pytest.mark.full,
    )
    for index, name in enumerate(CASES)
    for place, world in enumerate(WORLDS)
]


@pytest.mark.parametrize(("name", "world"), CASES_IN_WORLDS)
def test_every_strategy_equals_the_oracle(name: str, world: tuple[int, int]) -> None:
    """Three rounds and a partial one. Catches: a landing a step early or late, swapped fragments,
    a wrong rule, a wrong preset, a partial round lost or counted twice at the end."""
    config = {"sync_interval": 4, **CASES[name]}
    num_steps = config.get("warmup_steps", 0) + 3 * config["sync_interval"] + 2
    start, moves = make_moves(num_steps, world[0], seed=len(name))
    _, simulation, _ = run_both(config, world, moves, start, [0.5] * num_steps)
    assert len({record.step for record in simulation.records}) >= 3
    if config.get("clip") or config.get("co2_clip"):
        assert has_clipped(simulation)


def has_clipped(simulation: Simulation) -> bool:
    """Whether a clip has acted."""
    settings = simulation.settings
    if settings.co2_clip is None:
        return any(record.clip < 1.0 for record in simulation.records)
    return any((np.abs(m) == settings.co2_clip).any() for m in simulation.momentum.values())


@pytest.mark.parametrize("strategy", ["edit", "co2", "slowmo", "streaming-diloco"])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_training_may_end_at_any_step_of_a_round(strategy: str, extra: int) -> None:
    """At a sync, while a sync is in flight, and after a landing. Catches: a second sync at the end,
    which momentum turns into a step; a landing after the sync that it should precede."""
    config: Settings = {"strategy": strategy, "sync_interval": 4}
    if strategy != "co2":
        config |= {"fragments": 2, "delay_steps": 1, "mix": 0.25}
    start, moves = make_moves(8 + extra, 2, seed=20 + extra)
    run_both(config, (2, 1), moves, start, [0.5] * (8 + extra))


def test_slowmo_uses_the_learning_rate_of_the_sync_step() -> None:
    """Catches: the learning rate of another step, a division by a rate of zero."""
    start, moves = make_moves(14, 2, seed=31)
    lrs = [0.05 * s for s in range(1, 8)] + [0.0, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01]
    _, simulation, frames = run_both(
        {"strategy": "slowmo", "sync_interval": 4}, (2, 1), moves, start, lrs
    )
    assert [r.step for r in simulation.records if r.unit == "final"] == [4, 8, 12, 14]
    # at rate 0 parameters are only averaged: the momentum does not change
    np.testing.assert_array_equal(frames[7].momentum["layer.1"], frames[3].momentum["layer.1"])


def test_qsr_uses_the_learning_rate_of_the_round_start() -> None:
    """Catches: rounds counted from the end of warm-up, the rate of their end, no lower bound."""
    start, moves = make_moves(17, 2, seed=33)
    lrs = [1.0] * 4 + [0.45] * 3 + [0.35] * 10
    _, simulation, _ = run_both(
        {
            "strategy": "edit", "sync_interval": 3, "interval": "qsr", "qsr_a": 1.0,
            "warmup_steps": 1,
        },
        (2, 1), moves, start, lrs,
    )  # fmt: skip
    # 3 steps at rate 1, floor(1/0.45^2) = 4, floor(1/0.35^2) = 8, the end.
    assert [r.step for r in simulation.records if r.unit == "final"] == [4, 8, 16, 17]


# ---- settings


@pytest.mark.parametrize("strategy", [name for name in PRESETS if name != "a-edit"])
def test_strategy_presets_and_overrides(strategy: str) -> None:
    """Catches: a preset that differs from the publication, an explicit value without effect."""
    config = EditConfig(use_edit=True, strategy=strategy)
    preset = settings_for(strategy, tau=1)
    if strategy not in ("local-sgd", "post-local-sgd"):  # they have no outer step
        assert (config.outer_lr, config.outer_momentum) == (preset.outer_lr, preset.outer_momentum)
    assert config.fragments == preset.fragments
    assert (config.delay_steps, config.mix) == (preset.delay, preset.mix)
    if strategy == "local-sgd":
        assert config.warmup_steps == 0
    changed = EditConfig(use_edit=True, strategy=strategy, outer_lr=0.25, fragments=2)
    assert (changed.outer_lr, changed.fragments) == (0.25, 2)


# ---- Bad replicas under every strategy, while a sync is in flight or not, against the oracle


BAD_STRATEGIES: dict[str, Settings] = {
    "edit": {"strategy": "edit", "fragments": 2, "delay_steps": 2, "mix": 0.25},
    "streaming-diloco": {"strategy": "streaming-diloco", "fragments": 2, "delay_steps": 2},
    "diloco": {"strategy": "diloco", "delay_steps": 2},
    "slowmo": {"strategy": "slowmo"},
    "local-sgd": {"strategy": "local-sgd", "fragments": 2, "delay_steps": 2},
    "co2": {"strategy": "co2"},
    "sparse-loco": {"strategy": "sparse-loco"},
}


# layer.1 is in fragment 1: with F = 2 and tau = 4 it starts after steps 2, 6, 10, ... and lands two
# steps later; with F = 1 after 4, 8, ... So a sync is in flight at step 7 with F = 2, at step 9
# with F = 1.
BAD_CASES = [
    pytest.param(
        name,
        what,
        step,
        world,
        id=f"{name}-{what}-{step}-{world[0]}x{world[1]}",
        marks=() if name == "edit" or (what == "nan" and step == 7) else pytest.mark.full,
    )
    for name in BAD_STRATEGIES
    for what in ("nan", "inf")
    for step in (7, 9)
    # With 2x2 one rank of the replica has it, and both must find it; the code is that of all.
    for world in ([(3, 1), (2, 2)] if name == "edit" and what == "nan" else [(3, 1)])
]


@pytest.mark.parametrize(("name", "what", "bad_step", "world"), BAD_CASES)
def test_nonfinite_replica_is_left_out_and_recovers(
    name: str, what: str, bad_step: int, world: tuple[int, int]
) -> None:
    """Catches: NaN that reaches other replicas, that survives a landing through mix or progress, or
    that only the rank with the NaN finds, and not the other of its replica (2x2)."""
    config = {"sync_interval": 4, **BAD_STRATEGIES[name]}
    start, moves = make_moves(16, world[0], seed=41)
    moves[bad_step - 1][1]["layer.1"][3] = float(what)
    _, simulation, frames = run_both(config, world, moves, start, [0.5] * 16)
    damaged = [
        step
        for step, frame in enumerate(frames, start=1)
        if not np.isfinite(frame.theta[1]["layer.1"]).all()
    ]
    assert damaged and damaged[0] == bad_step and damaged[-1] < 13  # it has recovered
    assert all(np.isfinite(frame.theta[0]["layer.1"]).all() for frame in frames)
    assert simulation.records[-1].left_out == (False,) * world[0]


@pytest.mark.parametrize("bad_step", [15, 17], ids=["in-flight", "none-in-flight"])
@pytest.mark.parametrize("world", [(3, 1), (2, 2)], ids=["3x1", "2x2"])
def test_anomalous_replica_loses_its_progress(bad_step: int, world: tuple[int, int]) -> None:
    """x100 in one step of replica 1, while a sync is in flight or not. Catches: an anomalous
    replica that keeps its rejected update through mix or progress; a lock-out."""
    config: Settings = {
        "strategy": "edit", "sync_interval": 4, "fragments": 2, "delay_steps": 2, "mix": 0.25,
        "anomaly_warmup_syncs": 3, "anomaly_threshold": 12.0,
    }  # fmt: skip
    start, moves = make_moves(28, world[0], seed=43)
    move = moves[bad_step - 1][1]
    move["layer.1"] = move["layer.1"] * np.float32(100.0)
    _, simulation, _ = run_both(config, world, moves, start, [0.5] * 28)
    out = [(r.step, r.unit) for r in simulation.records if r.left_out[1]]
    # layer.1 starts after 14, 18, 22, ...: step 15 is found after 18, not in the sync of 14
    assert out == [(18, "layer.1")]
    assert min(r.closeness for r in simulation.records) > 1e-3  # no decision depends on rounding


def test_delayed_sync_is_rolled_back_where_no_replica_is_finite() -> None:
    """Catches: an outer step without an average, progress kept in a roll-back."""
    config: Settings = {"strategy": "edit", "sync_interval": 4, "delay_steps": 2, "mix": 0.25}
    start, moves = make_moves(13, 2, seed=47)
    moves[6][0]["final"][0], moves[6][1]["final"][0] = np.nan, np.inf
    _, simulation, frames = run_both(config, (2, 1), moves, start, [0.5] * 13)
    # What started after step 4 has landed after step 6; the next starts after 8 and lands after 10.
    assert [(r.step, r.unit) for r in simulation.records if r.rolled_back] == [(8, "final")]
    np.testing.assert_array_equal(frames[9].anchor["final"], frames[6].anchor["final"])
    np.testing.assert_array_equal(frames[9].momentum["final"], frames[6].momentum["final"])
    np.testing.assert_array_equal(frames[9].theta[0]["final"], frames[9].anchor["final"])


# ---- The engine against published test cases of DiLoCo and Streaming DiLoCo


@pytest.mark.parametrize(("delay", "mix"), list(published.TORCHFT))
def test_engine_equals_torchft_fixtures(delay: int, mix: float) -> None:
    """Catches: a pseudo-gradient taken at the landing, mix on the wrong side, a wrong schedule."""
    config = {
        "num_replicas": 2, "strategy": "streaming-diloco", "warmup_steps": 0, "sync_interval": 6,
        "fragments": 2, "delay_steps": delay, "mix": mix, "outer_lr": 2.0, "outer_momentum": 0.0,
    }  # fmt: skip
    start = {"embedding": [1.0], "final": [1.0]}
    move = {"embedding": [-2.0], "final": [-2.0]}
    table = published.torchft_schedule(delay)
    results = run_ranks(
        f"{SCENARIOS}:run_table", 2, (config, start, [move] * 15, table.starts), check=True
    )
    for result in results:
        seen = tuple([1.0, *(float(r["theta"][n][0]) for r in result.value)] for n in start)
        assert seen == published.TORCHFT[delay, mix]
        if mix == 1.0:
            for fragment, name in enumerate(start):
                for step, anchor in published.TORCHFT_ANCHORS[delay, fragment].items():
                    assert result.value[step - 1]["anchor"][name] == anchor


def test_engine_equals_maxtext_numeric_case() -> None:
    """With real gradients. Catches: heavy-ball in place of Nesterov, a sum in place of the mean."""
    config = {
        "num_replicas": 2, "strategy": "diloco", "warmup_steps": 0, "sync_interval": 3,
        "outer_lr": 1.0, "outer_momentum": 0.9,
    }  # fmt: skip
    results = run_ranks(f"{SCENARIOS}:train_linear", 2, (config, 4), check=True)
    for replica, result in enumerate(results):
        losses = [loss for loss, _ in result.value]
        assert losses == pytest.approx(
            [pair[replica] for pair in published.MAXTEXT_LOSSES], rel=5e-6
        )
        synced = result.value[2][1]
        for name, ours in (("w", "embedding"), ("b", "final")):
            expected = published.MAXTEXT_SYNCED[name]  # published with four decimals
            np.testing.assert_allclose(synced["theta"][ours], expected, rtol=0, atol=5e-5)


# ---- A-EDiT over real process groups, against the NumPy oracle


SCENARIO = "tests.distributed.strategy_runs:run_timed"
TARGET = 60
NAMES = list(SIZES)
# Seconds per step of each replica.
SPEEDS = {"equal": (1.0, 1.0), "uneven": (1.0, 3.0), "three": (1.0, 1.5, 4.0)}
TIMED_CASES: dict[str, tuple[str, Settings]] = {
    "equal": ("equal", {}),
    "uneven": ("uneven", {}),
    "three": ("three", {}),
    "step-weights": ("three", {"step_weight": 0.5}),
    "by-steps-alone": ("uneven", {"step_weight": 1.0}),
    "extended": ("uneven", {"min_round_steps": 12}),
    "fragments": ("three", {"fragments": 2, "step_weight": 0.25}),
}


def replay(
    config: Settings, moves: Any, start: Any, syncs: list[tuple[int, tuple[int, ...]]]
) -> tuple[list[list[dict[str, Any]]], Simulation]:
    """Run the oracle with the steps that the replicas made before each sync.

    Returns:
        Parameters of every replica after each of its steps; and the oracle at the end.
    """
    names = {"fragments": "fragments", "step_weight": "rho"}
    changes = {ours: config[name] for name, ours in names.items() if name in config}
    simulation = Simulation.start(len(moves), start, settings_for("a-edit", tau=4, **changes))
    frames: list[list[dict[str, Any]]] = [[] for _ in moves]
    for place, (first, counts) in enumerate(syncs):
        for replica, count in enumerate(counts):
            for _ in range(count):
                simulation.advance(replica, moves[replica][len(frames[replica])])
                frames[replica].append(dict(simulation.theta[replica]))
        if place + 1 == len(syncs):
            simulation.finish()
        else:
            simulation.meet([first % config.get("fragments", 1)])
        for replica, count in enumerate(counts):
            if count:
                frames[replica][-1] = dict(simulation.theta[replica])
    return frames, simulation


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", TIMED_CASES)
def test_aedit_equals_the_oracle(name: str, ranks: int) -> None:
    """Catches: steps of another round in the weights, a detector that observes no norms, fragments
    in a wrong order, a sync with another pseudo-gradient than that at the meeting, samples lost
    at the end."""
    speeds, more = TIMED_CASES[name]
    step_seconds = SPEEDS[speeds]
    config: Settings = {
        "strategy": "a-edit", "warmup_steps": 0, "sync_seconds": 6.0, "min_round_steps": 1, **more,
    }  # fmt: skip
    start, rows = make_moves(TARGET, len(step_seconds), seed=len(name))
    moves = [list(column) for column in zip(*rows, strict=True)]
    settings = {"num_replicas": len(step_seconds), **config}
    results = run_ranks(
        SCENARIO,
        len(step_seconds) * ranks,
        (settings, SIZES, start, moves, step_seconds, TARGET),
        check=True,
    )
    syncs = results[0].value[1]
    assert all(result.value[1] == syncs for result in results)
    totals = [sum(counts) for _, counts in syncs]
    assert sum(totals) == TARGET and len(syncs) >= (2 if "min_round_steps" in more else 3)
    assert totals[0] >= more.get("min_round_steps", 1)
    is_uneven = any(len(set(counts)) > 1 for _, counts in syncs)
    assert is_uneven == (speeds != "equal")
    frames, simulation = replay(config, moves, start, syncs)
    for result in results:
        compare(result.value[0], frames[result.rank // ranks], simulation)


def compare(ours: list[dict[str, Any]], frames: list[dict[str, Any]], oracle: Simulation) -> None:
    """Compare parameters after each step of a replica; anchor and momentum at the end."""
    assert len(ours) == len(frames)
    for step, (state, theta) in enumerate(zip(ours, frames, strict=True), start=1):
        for name in NAMES:
            np.testing.assert_allclose(
                state["theta"][name], theta[name][state["slices"][name]],
                rtol=1e-5, atol=1e-5, err_msg=f"{name} after its step {step}",
            )  # fmt: skip
    for name in NAMES:
        piece = ours[-1]["slices"][name]
        for key, full in (("anchor", oracle.anchor), ("momentum", oracle.momentum)):
            np.testing.assert_allclose(ours[-1][key][name], full[name][piece], rtol=1e-5, atol=1e-5)
