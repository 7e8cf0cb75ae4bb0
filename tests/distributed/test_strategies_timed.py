"""A-EDiT over real process groups, against the NumPy oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed.strategy_runs import Settings
from tests.distributed.test_rounds import SIZES, make_moves
from tests.harness import run_ranks
from tests.reference.outer_rules import settings_for
from tests.reference.strategies import Simulation

SCENARIO = "tests.distributed.strategy_scenarios:run_timed"
TARGET = 60
NAMES = list(SIZES)
# Seconds per step of each replica.
SPEEDS = {"equal": (1.0, 1.0), "uneven": (1.0, 3.0), "three": (1.0, 1.5, 4.0)}
CASES: dict[str, tuple[str, Settings]] = {
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
@pytest.mark.parametrize("name", CASES)
def test_aedit_equals_the_oracle(name: str, ranks: int) -> None:
    """Catches: steps of another round in the weights, a detector that observes no norms, fragments
    in a wrong order, a sync with another pseudo-gradient than that at the meeting, samples lost
    at the end."""
    speeds, more = CASES[name]
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
