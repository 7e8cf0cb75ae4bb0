"""Lengths of rounds and the final synchronous phase, against their formulas."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.config import EditConfig, phase_warning
from megatron_edit.engine.plan import mean_round_loss
from megatron_edit.errors import UsageError
from megatron_edit.method.schedule import (
    LossSchedule,
    RoundStart,
    StagewiseSchedule,
    last_local,
)


def records(*losses: float) -> Any:
    """Control records with the mean losses of a round."""
    return [SimpleNamespace(round_loss=loss) for loss in losses]


@given(st.integers(0, 5000), st.integers(0, 1000))
def test_last_local_step_begins_before_the_final_share(total: int, thousandths: int) -> None:
    """Step i (from 1) is local if i - 1 < (1 - X) T: by counting, in exact fractions."""
    share = 1 - Fraction(thousandths, 1000)
    expected = sum(i - 1 < share * total for i in range(1, total + 1))
    assert last_local(total, thousandths / 1000) == expected


def test_last_local_step_is_exact_for_decimal_shares() -> None:
    """0.9 and 0.1 are not exact in binary. Would catch: a step more or less by rounding."""
    found = [last_local(10, x / 10) for x in range(11)]
    assert found == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert last_local(960, 0.05) == 912


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 6), st.integers(1, 300))
def test_interval_doubles_in_each_stage(warmup: int, tau: int, stages: int, local: int) -> None:
    """tau 2^k in stage k of equal parts of (W, L], found here by the edges of the stages."""
    schedule = StagewiseSchedule(warmup, tau, 1, stages, warmup + local)
    edges = [Fraction(local * k, stages) for k in range(1, stages)]
    for step in range(warmup, warmup + local):
        stage = sum(step - warmup >= edge for edge in edges)
        assert schedule.round_length(RoundStart(step, 1.0)) == tau * 2**stage


def test_stagewise_interval_beyond_the_last_local_step() -> None:
    """A start beyond it, and more stages than steps, give a finite length and no error."""
    schedule = StagewiseSchedule(4, 8, 1, 10**6, 10)
    assert schedule.round_length(RoundStart(4, 1.0)) == 8
    assert schedule.round_length(RoundStart(500, 1.0)) == 2**53
    assert StagewiseSchedule(4, 8, 1, 3, 4).round_length(RoundStart(4, 1.0)) == 8


@given(st.integers(1, 200), st.floats(0.01, 20), st.floats(0.01, 20))
def test_adacomm_rounds_follow_the_square_root_of_the_loss(
    tau: int, loss: float, first: float
) -> None:
    """ceil(tau sqrt(F / F_0)), at least 1."""
    expected = max(1, math.ceil(tau * np.sqrt(loss / first)))
    schedule = LossSchedule(0, tau, 1)
    assert schedule.round_length(RoundStart(0, 1.0, loss, first)) == expected


@pytest.mark.parametrize(
    ("loss", "first"),
    [(None, None), (None, 2.0), (2.0, None), (0.0, 1.0), (1.0, 0.0), (-1.0, 1.0),
     (math.nan, 1.0), (math.inf, 1.0), (1e308, 1e-308)],
)  # fmt: skip
def test_adacomm_round_is_tau_for_unusable_losses(loss: float | None, first: float | None) -> None:
    """Missing, nonpositive, and non-finite losses give no error."""
    assert LossSchedule(0, 7, 1).round_length(RoundStart(0, 1.0, loss, first)) == 7


def test_mean_round_loss_ignores_nonfinite_losses() -> None:
    """The mean over the replicas with a finite loss; None without any."""
    assert mean_round_loss(records(3.0, 1.0)) == 2.0
    assert mean_round_loss(records(3.0, math.nan)) == 3.0
    assert mean_round_loss(records(math.inf, math.nan)) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"final_sync_fraction": 1.5}, "at least 0 and at most 1"),
        ({"final_sync_fraction": -0.1}, "at least 0 and at most 1"),
        ({"final_sync_fraction": math.nan}, "at least 0 and at most 1"),
        ({"final_sync_fraction": 0.1, "strategy": "a-edit"}, "no effect with"),
        ({"final_sync_fraction": 0.1, "strategy": "ddp"}, "no effect with"),
        ({"interval": "adacomm", "strategy": "a-edit"}, "no effect with"),
        ({"stl_stages": 4}, "no effect without --edit-interval stl"),
        ({"interval": "stl", "stl_stages": 0}, "at least 1"),
        ({"interval": "stl", "fragments": 2}, "change their length"),
        ({"interval": "adacomm", "fragments": 2}, "change their length"),
        ({"interval": "stl", "qsr_a": 0.1}, "other schedules do not take it"),
    ],
)
def test_invalid_schedule_settings_are_refused(flags: dict[str, Any], words: str) -> None:
    """The error names the rule that is violated."""
    with pytest.raises(UsageError, match=words):
        EditConfig(use_edit=True, **flags)


def test_warning_where_no_local_step_precedes_the_final_phase() -> None:
    """Where the phase begins in the warm-up; not with X = 1, which is intended."""
    config = EditConfig(use_edit=True, warmup_steps=10, final_sync_fraction=0.5)
    assert "there is no local step" in str(phase_warning(config, 20))
    assert "there is no local step" not in str(phase_warning(config, 22))
    full = EditConfig(use_edit=True, warmup_steps=10, final_sync_fraction=1)
    assert phase_warning(full, 20) is None
