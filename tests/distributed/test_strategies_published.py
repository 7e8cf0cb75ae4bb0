"""The engine against published test cases of DiLoCo and Streaming DiLoCo."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.strategy_runs import SCENARIOS
from tests.harness import run_ranks
from tests.reference import published


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
