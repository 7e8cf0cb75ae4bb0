"""Every strategy through the engine, over real process groups, against the NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_edit.config import EditConfig
from tests.distributed.strategy_runs import Settings, run_both
from tests.distributed.test_rounds import make_moves
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
