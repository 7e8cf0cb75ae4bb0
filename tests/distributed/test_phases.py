"""The final synchronous phase, and `adacomm` intervals, over real process groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_edit.comm.wire import Wire
from tests.distributed.phase_scenarios import ALL_REPLICAS
from tests.harness import run_ranks
from tests.reference.wire import AllReduce, Residuals

MODULE = "tests.distributed.phase_scenarios"
FIRST = [1.0, math.nan, 4.0]
SECOND = [3.0, 6.0, math.inf]
COUNTERS = {"step": 8.0, "of 0": 3.0}  # of replica 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"delay_steps": 1, "mix": 0.5}, {"strategy": "co2"}],
    ids=["edit", "delayed", "co2"],
)
def test_inner_state_is_equal_in_the_final_phase(settings: dict[str, object]) -> None:
    """The partial round is synced and lands; moments are the fp32 mean (non-finite values count as
    zero), counters those of replica 0, the schedule position the largest."""
    results = run_ranks(f"{MODULE}:end_rounds", 2, ([FIRST, SECOND], settings), check=True)
    found = [result.value for result in results]
    finite = [np.where(np.isfinite(v), v, 0).astype(np.float32) for v in (FIRST, SECOND)]
    for value in found:
        assert value["phases"] == [(False, False)] * 2 + [(True, True)] * 3
        np.testing.assert_array_equal(value["moments"], (finite[0] + finite[1]) / np.float32(2))
        assert (value["counters"], value["schedule"]) == (COUNTERS, 12)
        assert value["is_local"] == [True, False]
        assert value["sync_steps"] == [2, 3] and not value["has_outer"]
        assert value["loss_steps"] == [1, 2, 3, 4, 5]
        assert any("final synchronous phase after step 3" in m for m in value["messages"])
    assert found[0]["theta"] == found[1]["theta"]


@pytest.mark.parametrize("nonfinite", [[1], [0, 1, 2]], ids=["one", "all"])
def test_final_moments_are_the_mean_of_accepted_replicas(nonfinite: list[int]) -> None:
    """Accepted by the last sync; where it accepted none, the mean is over all. Catches moments of
    bad data in the mean, and moments that stay different."""
    values = [[1.0, 2.0, 4.0], [100.0, 200.0, 400.0], [5.0, 6.0, 8.0]]
    which = nonfinite[0] if len(nonfinite) == 1 else ALL_REPLICAS
    results = run_ranks(f"{MODULE}:end_rounds", 3, (values, {}, which), check=True)
    chosen = [r for r in range(3) if len(nonfinite) == 3 or r not in nonfinite]
    expected = np.array(values, dtype=np.float32)[chosen].mean(axis=0)
    for result in results:
        np.testing.assert_allclose(result.value["moments"], expected, rtol=1e-6)
    assert len({str(result.value["moments"]) for result in results}) == 1


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_encoded_gradients_are_averaged_in_both_phases(dtype: str, replicas: int) -> None:
    """Bit for bit as the reference over sockets, with error feedback that begins at zero in each
    phase; local steps send nothing. Catches residuals of the warm-up in the final phase."""
    rng, numels = np.random.default_rng(1), (700, 5)
    drawn = rng.standard_normal((replicas, 6, sum(numels))).astype(np.float32)
    gradients = [[[row[:700], row[700:]] for row in mine] for mine in drawn]
    lists = [[[s.tolist() for s in step] for step in mine] for mine in gradients]
    results = run_ranks(
        f"{MODULE}:average_in_phases", replicas, (lists, {"warmup_dtype": dtype}), check=True
    )
    has_residual, share = dtype == "int8", np.float32(1 / replicas)
    announced = sum(Wire.of(dtype).payload_bytes(numel, replicas) for numel in numels)
    residuals: list[Residuals | None] = []
    for step in range(6):
        if step in (0, 4):
            residuals = [Residuals.zeros(replicas, n) if has_residual else None for n in numels]
        for shard in range(2):
            addends = [mine[step][shard] * share for mine in gradients]
            is_local = step in (2, 3)
            average = None if is_local else AllReduce(addends).sum(dtype, residuals[shard])
            for replica, result in enumerate(results):
                expected = gradients[replica][step][shard] if average is None else average
                np.testing.assert_array_equal(result.value["gradients"][step][shard], expected)
    for result in results:
        assert result.value["bytes"] == [announced] * 2 + [0, 0] + [announced] * 2
        kept = 2 * has_residual
        assert result.value["residuals"] == [kept, 0, 0, 0, kept, kept]


def test_moments_are_reset_where_one_replica_has_none() -> None:
    """One has applied no step: all reset their moments."""
    results = run_ranks(f"{MODULE}:end_rounds", 2, ([FIRST, None], {}), check=True)
    for result in results:
        assert result.value["is_reset"] and result.value["counters"] == COUNTERS
        assert any("inner moments are reset" in m for m in result.value["messages"])


def test_warmup_waits_as_long_as_its_steps_take() -> None:
    """A replica waits a second for the other one at every step, with time-outs of at least 0.5 s.
    Would catch: a constant time-out until the first round is over."""
    results = run_ranks(f"{MODULE}:wait_in_warmup", 2, ([1.0, 2.0], 0.5), check=True)
    for result in results:
        *warmup, first_round = result.value
        assert min(warmup) >= 4.0  # four steps of this replica
        assert first_round > 4 * 8 * 1.5  # of the round: 8 steps, as long as the slower replica's


@pytest.mark.parametrize("ranks", [1, 2])
def test_adacomm_interval_follows_the_loss(ranks: int) -> None:
    """ceil(tau sqrt(F / F_0)); with two ranks only the last has the loss. Would catch: ranks of a
    replica that use different round lengths and hang."""
    losses = [[4.0] * 8 + [1.0] * 12, [6.0] * 8 + [1.5] * 12]
    results = run_ranks(f"{MODULE}:follow_losses", 2 * ranks, (losses, 4), check=True)
    means = np.array(losses).mean(axis=0)
    expected, start, length, first = [], 0, 4, None
    while start + length <= len(means):
        end = start + length
        # The loss of a step is known after its sync, and belongs to the round that follows.
        loss = float(means[max(0, start - 1) : end - 1].mean())
        first = first or loss
        expected.append(end)
        start, length = end, math.ceil(4 * math.sqrt(loss / first))
    assert [result.value for result in results] == [expected] * (2 * ranks)
    assert len(set(np.diff(expected))) > 1
