"""Outer steps and landings of all strategies against the reference, one unit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.strategy import STRATEGIES, RuleSettings
from tests.reference.outer_rules import PRESETS, landed, outer_step, settings_for

SIZE = 50
STRATEGIES_WITH_STEPS = sorted(PRESETS)


def arrays(count: int, seed: int = 0) -> list[np.ndarray]:
    """Standard normal numbers, float64 [SIZE] each, exact in fp32."""
    numbers = np.random.default_rng(seed).normal(size=(count, SIZE)).astype(np.float32)
    return list(numbers.astype(np.float64))


def fp32(array: np.ndarray) -> torch.Tensor:
    """Copy to a tensor in fp32."""
    return torch.tensor(array, dtype=torch.float32)


@pytest.mark.parametrize("lr", [0.1, 0.0])
@pytest.mark.parametrize("strategy", STRATEGIES_WITH_STEPS)
def test_outer_steps_equal_the_reference(strategy: str, lr: float) -> None:
    """Three steps in a row; CO2 with a gap and a bound that both bind."""
    config = EditConfig(use_edit=True, strategy=strategy)
    more = {"co2_gap": 2.0, "co2_clip": 0.5} if strategy == "co2" else {}
    settings = settings_for(strategy, tau=8, **more)
    rule = STRATEGIES[strategy].make_rule(
        RuleSettings(config.outer_lr, config.outer_momentum, gap=2.0, bound=0.5)
    )
    anchor, momentum = arrays(1)[0], np.zeros(SIZE)
    ours, ours_momentum = fp32(anchor), fp32(momentum)
    for average in arrays(3, seed=1):
        anchor, momentum = outer_step(settings, anchor, momentum, average, lr=lr)
        rule.step_(ours, ours_momentum, fp32(average), clip=1.0, inner_lr=lr)
    np.testing.assert_allclose(ours.numpy(), anchor, rtol=1e-5, atol=1e-5)
    if strategy not in ("local-sgd", "post-local-sgd"):  # they have no momentum
        np.testing.assert_allclose(ours_momentum.numpy(), momentum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("mix", [0.0, 0.3])
@pytest.mark.parametrize("strategy", ["edit", "streaming-diloco", "co2"])
def test_landings_equal_the_reference(strategy: str, mix: float, delay: int) -> None:
    """With and without progress to keep. Catches progress that is lost, counted twice, or kept
    where the publication drops it; and a landing that wrongly claims equal replicas."""
    its = STRATEGIES[strategy]
    if its.lands_at_next_meeting and (mix or delay):
        return
    rule = LandingRule(delay, mix, its.keeps_progress, its.lands_at_next_meeting)
    theta, snapshot, anchor = arrays(3)
    if rule.is_immediate:
        snapshot = theta
    wanted = landed(settings_for(strategy, tau=8), theta, snapshot, anchor, mix=mix)
    kept = fp32(snapshot) if rule.needs_snapshot else None
    ours = rule.merge_(fp32(theta), fp32(anchor), kept)
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert rule.is_direct_copy == (delay == 0 and mix == 0.0 and strategy != "co2")
    assert rule.is_direct_copy or rule.merges or not its.keeps_progress
