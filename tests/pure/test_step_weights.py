"""Decisions of a sync about replicas that made fewer steps, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_edit.engine.plan import Penalty, decide
from megatron_edit.method.detector import DetectorConfig, DetectorState
from megatron_edit.method.weights import blend_step_weights

STEPS = torch.tensor([[5, 5], [0, 0], [7, 7]])
PENALTY = Penalty(
    DetectorConfig(3.0, 0.02, 20, 3), True, None, False, step_share=0.0, loss_check=None
)


def test_replica_without_steps_has_no_weight_or_verdict() -> None:
    """Its pseudo-gradient is zero: softmax(-norm) would give it the most."""
    norms = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    decision, learned = decide(norms, DetectorState.fresh(3, 2), PENALTY, STEPS, range(2))
    assert decision.weights.tolist() == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    assert learned.accepted.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert not bool(decision.rollback.any())
    assert decision.norms.equal(norms)  # reported unchanged


def test_step_weights_are_blended_over_the_accepted() -> None:
    """w <- (1 - rho) w + rho * steps / sum steps; rejected replicas keep weight 0, sums stay 1."""
    weights = torch.tensor([[0.75, 0.5], [0.25, 0.5], [0.0, 0.0]], dtype=torch.float64)
    steps = torch.tensor([[30.0] * 2, [10.0] * 2, [60.0] * 2], dtype=torch.float64)
    accepted = torch.tensor([[True, True], [True, True], [False, False]])
    assert blend_step_weights(weights, accepted, steps, 0.0) is weights
    blended = blend_step_weights(weights, accepted, steps, 0.5)
    assert blended.tolist() == [[0.75, 0.625], [0.25, 0.375], [0.0, 0.0]]
    assert blend_step_weights(weights, accepted, steps, 1.0)[:, 1].tolist() == [0.75, 0.25, 0.0]
    none = torch.zeros(3, 1, dtype=torch.float64)
    assert blend_step_weights(none, none.bool(), steps[:, :1], 0.5).tolist() == [[0.0]] * 3


def test_accepted_replica_of_weight_zero_keeps_its_step_share() -> None:
    """Would catch: weight 0 taken for a rejection."""
    norms = torch.tensor([[10.0], [900.0]], dtype=torch.float64)  # exp(-890 / T) is 0 at T = 1
    penalty = replace(PENALTY, temperature=1.0, step_share=0.5)
    steps = torch.tensor([[7], [7]])
    decision, _ = decide(norms, DetectorState.fresh(2, 1), penalty, steps, [0])
    assert decision.weights.tolist() == [[0.75], [0.25]]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_blended_columns_sum_to_one(share: float) -> None:
    """For any share, so that the average keeps its scale."""
    weights = torch.softmax(torch.randn(5, 7, dtype=torch.float64), dim=0)
    steps = torch.tensor([[1.0], [2.0], [3.0], [4.0], [50.0]], dtype=torch.float64).expand(5, 7)
    blended = blend_step_weights(weights, torch.ones(5, 7, dtype=torch.bool), steps, share)
    assert torch.allclose(blended.sum(dim=0), torch.ones(7, dtype=torch.float64))
