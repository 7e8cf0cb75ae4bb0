"""The loss check: comparison with its oracle, worked examples, and rate of false positives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import ValidationError, structs

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine import round_state, saved_rounds
from megatron_edit.engine.plan import RoundState, plan_round
from megatron_edit.method.loss_check import (
    LossHistory,
    LossVerdict,
    check_losses,
    loss_differences,
)
from tests.harness.engine_settings import settings_of
from tests.reference.loss_check import LossOracle

SETTINGS = settings_of(anomaly_alpha=0.5, anomaly_warmup_syncs=0)
NAN = math.nan


def judge(
    losses: Sequence[float], history: LossHistory, steps: Sequence[int] | None = None
) -> tuple[LossVerdict, LossHistory]:
    """Check the losses of one round; by default all replicas made steps."""
    has_steps = torch.tensor([n > 0 for n in steps or [1] * len(losses)])
    return check_losses(
        torch.tensor(losses, dtype=torch.float64), has_steps, history, SETTINGS.used
    )


def after(rounds: int, num_replicas: int, loss: float = 3.0) -> LossHistory:
    """Return the history after `rounds` rounds whose losses alternate by 0.02."""
    history = LossHistory.fresh(num_replicas)
    for number in range(rounds):
        _, history = judge([loss + 0.02 * (number % 2)] * num_replicas, history)
    return history


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
def test_loss_check_matches_oracle(num_replicas: int) -> None:
    """Catches: a wrong median or weight, a rejected value in the history, patience off by one."""
    rng = np.random.default_rng(num_replicas)
    oracle, history = LossOracle(num_replicas), LossHistory.fresh(num_replicas)
    num_rejected = 0
    for number in range(120):
        losses = 3.0 + 0.1 * rng.standard_normal(num_replicas)
        if number in (20, 21, 60, 61, 62, 63, 64, 65):
            losses[-1] += 3.0
        if number == 30:
            losses[0] = NAN
        if number == 31:
            losses[0] = math.inf
        steps = [0 if number == 40 else 1, *[1] * (num_replicas - 1)]
        verdict, history = judge(losses.tolist(), history, steps)
        assert verdict.rejected.tolist() == oracle.observe(losses.tolist(), steps), number
        num_rejected += int(verdict.rejected.sum())
        for replica in range(num_replicas):
            mean, sigma = oracle.statistics(replica)
            assert float(history.mean[replica]) == pytest.approx(mean, rel=1e-12, abs=1e-12)
            found = math.sqrt(math.pi / 2) * float(history.deviation[replica])
            assert found == pytest.approx(sigma, rel=1e-12, abs=1e-12)
        assert history.accepted.tolist() == [len(values) for values in oracle.values]
    # The first burst, and the second until the patience ends; a lone replica is never rejected.
    assert (num_rejected >= 5) == (num_replicas > 1)


def test_loss_differences_of_worked_examples() -> None:
    """Catches a bad replica that shifts the reference of the others."""
    losses = torch.tensor([3.0, 3.5, 9.0], dtype=torch.float64)
    all_usable = torch.ones(3, dtype=torch.bool)
    assert loss_differences(losses, all_usable).tolist() == [-0.5, 0.0, 5.5]
    low = torch.tensor([3.0, 3.5, 0.0], dtype=torch.float64)
    assert loss_differences(low, all_usable).tolist() == [0.0, 0.5, -3.0]
    four = torch.tensor([3.0, 3.5, 9.0, 3.25], dtype=torch.float64)
    # medians of the others: of 3.5, 9, 3.25; of 3, 9, 3.25; of 3, 3.5, 3.25; of 3, 3.5, 9
    found = loss_differences(four, torch.ones(4, dtype=torch.bool))
    assert found.tolist() == [-0.5, 0.25, 5.75, -0.25]
    two = loss_differences(losses[1:], all_usable[1:]).tolist()
    assert two == [3.5, 9.0]  # with two replicas, each is compared with its own history only
    two_usable = torch.tensor([True, True, False])
    assert all(math.isnan(d) for d in loss_differences(losses, two_usable).tolist())


def test_replica_is_not_judged_before_eight_losses() -> None:
    """Catches a check that is armed one round early or late."""
    for rounds in (0, 1, 7, 8):
        verdict, _ = judge([3.0, 3.0, 8.0], after(rounds, 3))
        assert verdict.rejected.tolist() == [False, False, rounds == 8]
        assert math.isnan(float(verdict.scores[0])) == (rounds < 8)


def test_small_excess_is_accepted_and_scores_agree() -> None:
    """All earlier differences are 0: catches a check that rejects rounding errors, and z-scores
    that disagree with the verdict."""
    below, _ = judge([3.0, 3.0, 3.0999], after(20, 3))
    above, _ = judge([3.0, 3.0, 3.1001], after(20, 3))
    assert not below.rejected.any() and above.rejected.tolist() == [False, False, True]
    assert float(below.scores[2]) < 6.0 < float(above.scores[2])
    lower, _ = judge([3.0, 3.0, 1.0], after(20, 3))
    assert not lower.rejected.any()  # a low loss is never bad data


def test_lasting_loss_shift_does_not_lock_replica_out() -> None:
    """Permanently harder data: three rejections, then a new history that is not armed."""
    history = after(20, 4)
    rejected = []
    for _ in range(8):
        verdict, history = judge([3.0, 3.0, 3.0, 5.0], history)
        rejected.append(bool(verdict.rejected[3]))
    assert rejected == [True] * 3 + [False] * 5
    assert float(history.mean[3]) == 2.0 and history.accepted.tolist() == [28, 28, 28, 5]


def test_loss_rise_of_both_replicas_is_accepted() -> None:
    """After new data or a larger rate for both, units must not be rolled back to the anchor."""
    both, after_both = judge([3.4, 3.5], after(20, 2))
    one, _ = judge([3.0, 3.5], after(20, 2))
    assert not both.rejected.any() and one.rejected.tolist() == [False, True]
    assert after_both.mean.tolist() == [3.4, 3.5] and after_both.accepted.tolist() == [1, 1]


def test_loss_history_round_trips_through_checkpoint() -> None:
    """Bit for bit; a checkpoint without a history starts a new one."""
    history = after(9, 3, loss=1 / 3)
    saved = saved_rounds(replace(RoundState.fresh(3, 1, None), loss_history=history))
    again = round_state(saved, 3).loss_history
    for name, tensor in vars(history).items():
        assert torch.equal(tensor, getattr(again, name)), name
    older = round_state(structs.replace(saved, loss_history={}), 3)
    assert older.loss_history.accepted.tolist() == [0, 0, 0]
    lists: Any = saved.loss_history
    for broken in ({**lists, "mean": [0.0]}, {**lists, "mean": None}, {"mean": [0.0] * 3}):
        with pytest.raises((TypeError, ValueError, ValidationError)):
            round_state(structs.replace(saved, loss_history=broken), 3)


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_clean_losses_are_rarely_rejected(num_replicas: int) -> None:
    """Falling losses with normal noise, 200 runs of 54 rounds: at most 1 rejection in 10,000."""
    rng = np.random.default_rng(0)
    rejections = judged = 0
    for _ in range(200):
        offsets = 0.2 * rng.standard_normal(num_replicas)
        history = LossHistory.fresh(num_replicas)
        for number in range(54):
            common = 3.0 + 4.0 / (1.0 + 0.3 * number) + 0.03 * rng.standard_normal()
            losses = common + offsets + 0.13 * rng.standard_normal(num_replicas)
            verdict, history = judge(losses.tolist(), history)
            rejections += int(verdict.rejected.sum())
            judged += num_replicas
    assert rejections <= 1e-4 * judged, (rejections, judged)


def test_rejected_replica_is_left_out_of_all_units() -> None:
    """Catches a verdict that does not affect the weights, or a norm that enters the detector."""
    state = RoundState.fresh(3, 2, None)
    for number in range(10):
        losses = [3.0 + 0.01 * (number % 2), 3.0, 9.0 if number == 9 else 3.0]
        norms = (1.0, NAN if number == 9 else 2.0)
        records = [
            ControlRecord(
                number, 4 * number, 4, 8, 16, (), norms if r == 1 else (1.0, 2.0), round_loss=loss
            )
            for r, loss in enumerate(losses)
        ]
        before, plan = state, plan_round(state, records, (0, 1), SETTINGS, is_last=False)
        state = plan.after
    assert plan.decision is not None
    assert plan.decision.verdict.anomalous.tolist() == [[False] * 2, [False, True], [True] * 2]
    assert plan.decision.weights.tolist() == [[0.5, 1.0], [0.5, 0.0], [0.0, 0.0]]
    assert plan.decision.reasons() == [[None, None, "loss"], [None, "non-finite", "loss"]]
    learned = state.detectors.accepted - before.detectors.accepted
    assert learned.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert state.loss_history.accepted.tolist() == [10, 10, 9]
