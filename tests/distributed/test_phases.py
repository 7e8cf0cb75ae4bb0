"""The final synchronous phase, and `adacomm` intervals, over real process groups."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from megatron_edit.comm import timeouts
from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT
from tests.distributed.toy import build_engine
from tests.harness import run_ranks

MODULE = "tests.distributed.test_phases"
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


# ---- Functions that ranks run in the tests of the final synchronous phase and of `adacomm`


SIZES = {"embedding": 13, "final": 3}
ALL_REPLICAS = -2
START = {name: [0.5] * size for name, size in SIZES.items()}


def end_rounds(
    values: list[list[float] | None], settings: dict[str, Any], nonfinite: int = -1
) -> dict[str, Any]:
    """Make three local steps and then two in the final phase.

    Args:
        values: the first moment of the unit "final", by replica; None where it has no moments.
        settings: of the run.
        nonfinite: replica whose unit "final" is not finite at the last sync, or `ALL_REPLICAS`.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=2, digest_interval=1,
                        num_replicas=len(values), **settings)  # fmt: skip
    engine, host, reporter = build_engine(config, SIZES, START)
    engine.start()
    replica = engine.groups.sync.rank
    own = values[replica]
    if own is not None:
        host.set_moments(FIRST_MOMENT, {"embedding": [0.0] * 13, "final": own})
    host.counters = {"step": 8.0 * (replica + 1), f"of {replica}": 3.0 + replica}
    host.schedule_position = 10 - replica
    phases = []
    for step in range(1, 6):
        host.begins_final = step >= 3
        # Only replica 0 applies the last local step, which advances its schedule.
        host.pending_schedule = 2 if step == 3 and replica == 0 else 0
        engine.before_step()
        if step <= 3:  # afterwards gradients are averaged: a toy has none
            host.move({name: [0.1 * (replica + step)] * size for name, size in SIZES.items()})
        if step == 3 and nonfinite in (replica, ALL_REPLICAS):
            host.full["final"][0] = float("nan")
        engine.after_step()
        engine.record_loss(float(step))
        if step == 3:
            schedule = host.schedule_position + host.pending_schedule
        phases.append((engine.status.is_warmup, engine.status.is_final_phase))
    moments = host.moments.get(FIRST_MOMENT, {})
    return {
        "phases": phases,
        "theta": {name: value.tolist() for name, value in host.full.items()},
        "moments": moments["final"].tolist() if moments else [],
        "counters": host.counters,
        "schedule": schedule,
        "is_local": host.is_local,
        "is_reset": host.is_reset,
        "sync_steps": [report.step for report in reporter.syncs],
        "loss_steps": [step for step, _ in reporter.losses],
        "messages": reporter.messages,
        "has_outer": engine.syncs.has_outer_state,
    }


def follow_losses(losses: list[list[float]], tau: int) -> list[int]:
    """Train with `adacomm`; returns the steps after which replicas sync.

    Args:
        losses: by replica and step.
        tau: interval of the first round.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=tau, interval="adacomm",
                        num_replicas=len(losses))  # fmt: skip
    engine, _, reporter = build_engine(config, SIZES, START)
    engine.start()
    mine = losses[engine.groups.sync.rank]
    has_loss = engine.groups.control.rank == engine.groups.control.size - 1  # the last stage
    for loss in mine:
        engine.before_step()
        engine.after_step()
        engine.record_loss(loss if has_loss else float("nan"))
    return [report.step for report in reporter.syncs]


def wait_in_warmup(seconds: list[float], minimum: float) -> list[float]:
    """Make three steps of the warm-up and one after it, of unequal length.

    Args:
        seconds: of a step, by replica.
        minimum: lower bound of time-outs, instead of ten minutes.

    Returns:
        The time-out after each step.
    """
    config = EditConfig(use_edit=True, warmup_steps=3, sync_interval=8, num_replicas=len(seconds))
    engine, _, _ = build_engine(config, SIZES, START)
    engine.start()
    timeouts.MIN_TIMEOUT_SECONDS = minimum  # type: ignore[attr-defined]
    for group in (engine.groups.sync, engine.groups.meeting):
        timeouts.set_timeout(group, timedelta(seconds=minimum))
    found = []
    for _ in range(4):
        engine.before_step()
        time.sleep(seconds[engine.groups.sync.rank])
        engine.before_gradients()
        engine.average_gradients()
        engine.after_step()
        found.append(engine.status.timeout_seconds)
    return found
