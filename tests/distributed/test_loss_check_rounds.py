"""The loss check over real process groups: a burst of bad loss on one replica."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.harness import run_ranks

SCENARIO = "tests.distributed.scenarios:run_rounds_with_losses"
NUM_ROUNDS, FIRST_BAD, NUM_BAD = 16, 12, 2  # a burst of two complete rounds


def losses_of(num_replicas: int) -> list[list[float]]:
    """Losses `[round][replica]`: small differences, and a burst on replica 1."""
    return [
        [
            3.0 + 0.01 * ((round_ + replica) % 3) + (4.0 if replica == 1 and is_bad else 0.0)
            for replica in range(num_replicas)
        ]
        for round_ in range(NUM_ROUNDS)
        for is_bad in [FIRST_BAD <= round_ < FIRST_BAD + NUM_BAD]
    ]


def run(num_replicas: int, ranks: int, **settings: Any) -> list[list[dict[str, Any]]]:
    """The decisions of all syncs, by rank."""
    args = (losses_of(num_replicas), settings)
    results = run_ranks(SCENARIO, num_replicas * ranks, args, check=True)
    return [result.value for result in results]


@pytest.mark.parametrize(("num_replicas", "ranks"), [(3, 1), (3, 2), (2, 1)])
def test_loss_burst_is_rejected_at_its_first_sync(num_replicas: int, ranks: int) -> None:
    """Catches: a rank without the loss that decides differently, a late or missing rejection."""
    seen = run(num_replicas, ranks)
    for syncs in seen:
        for number, sync in enumerate(syncs):
            assert sync["why"] == seen[0][number]["why"]
            assert sync["digest"] == seen[0][number]["digest"]
            assert not any(sync["rollback"])
            # The loss of a round's last step is known only after its sync.
            is_rejected = FIRST_BAD <= number <= FIRST_BAD + NUM_BAD
            expected = ["loss" if is_rejected and r == 1 else None for r in range(num_replicas)]
            assert sync["why"] == [expected] * 3, number
            assert (sync["weights"][1] == [0.0] * 3) == is_rejected
    assert seen[0][0]["round_loss"][1] == pytest.approx(3.01)  # of its first step only
    assert seen[0][FIRST_BAD]["round_loss"][1] == pytest.approx(5.01, abs=0.02)


@pytest.mark.parametrize("switch", ["no_loss_check", "no_anomaly"])
def test_disabled_loss_check_rejects_nothing(switch: str) -> None:
    """The losses are still reported."""
    for syncs in run(3, 1, **{switch: True}):
        assert all(sync["why"] == [[None] * 3] * 3 for sync in syncs)
        assert not any(math.isnan(loss) for sync in syncs for loss in sync["round_loss"])


def test_loss_check_with_delayed_syncs_and_fragments() -> None:
    """Losses are judged at the meeting, for the units that sync; reported at the landing."""
    for syncs in run(3, 1, sync_interval=4, fragments=2, delay_steps=1):
        rejected = [sync for sync in syncs if any("loss" in row for row in sync["why"])]
        assert rejected and all(
            row == [None, "loss", None] for sync in rejected for row in sync["why"]
        )
        assert {len(sync["units"]) for sync in syncs[:-1]} == {1, 2}
