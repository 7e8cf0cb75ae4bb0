"""What a sync decides, from the gathered table alone: who counts, how much, and roll-backs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.config import EditConfig
from megatron_edit.method.detector import DetectorConfig, DetectorState, Verdict, judge
from megatron_edit.method.weights import blend_step_weights, replica_weights

LARGEST_AVERAGE = 1e37  # fp32 ends at 3.4e38


@dataclass(frozen=True)
class Penalty:
    """The pseudo-gradient penalty's settings, in the terms of the method.

    Attributes:
        detector: settings of anomaly elimination.
        eliminate: False leaves out only what is not finite.
        temperature: T of the weights; None is auto.
        uniform: True weighs all accepted replicas alike.
        step_share: rho, share of the step counts in the weights.
    """

    detector: DetectorConfig
    eliminate: bool
    temperature: float | None
    uniform: bool
    step_share: float = 0.0

    @classmethod
    def of(cls, config: EditConfig) -> Penalty:
        """The penalty that a configuration asks for."""
        detector = DetectorConfig(
            config.anomaly_threshold,
            config.anomaly_alpha,
            config.anomaly_warmup_syncs,
            config.anomaly_patience,
        )
        return cls(
            detector,
            eliminate=not config.no_anomaly,
            temperature=config.weight_temperature,
            uniform=config.no_weighting,
            step_share=config.step_weight,
        )


@dataclass(frozen=True)
class Decision:
    """Decisions of one sync; tables are [N, U], equal bit for bit on every rank.

    Attributes:
        norms: float64, the gathered pseudo-gradient norms.
        verdict: who is left out, and the scores.
        weights: float64, weight of each replica in the average.
        rollback: bool [U], units that return to their anchor: every replica is anomalous, or the
            average could overflow.
    """

    norms: Tensor
    verdict: Verdict
    weights: Tensor
    rollback: Tensor


def decide(
    norms: Tensor, detectors: DetectorState, penalty: Penalty, steps: Tensor
) -> tuple[Decision, DetectorState]:
    """Judge the gathered norms and weigh the replicas; method 3.2, 3.3, 3.6 and 5.

    Args:
        norms: float64 [N, U].
        detectors: statistics before this sync.
        penalty: settings.
        steps: int64 [N, U], inner steps of each replica since the unit's own last sync. Who made
            none has weight 0 and teaches no detector: it is judged like a norm that is not finite.

    Returns:
        The decision, and the statistics after this sync.
    """
    counts = steps.double()
    judged = torch.where(steps == 0, torch.full_like(norms, torch.nan), norms)
    verdict, learned = judge(judged, detectors, penalty.detector, enabled=penalty.eliminate)
    weights = replica_weights(
        judged, verdict.anomalous, temperature=penalty.temperature, uniform=penalty.uniform
    )
    weights = blend_step_weights(weights, ~verdict.anomalous, counts, penalty.step_share)
    # ||sum w D|| <= sum w ||D||: below this bound no element of an average can overflow in fp32.
    bound = torch.where(weights > 0, weights * norms, torch.zeros_like(norms)).sum(dim=0)
    rollback = torch.all(verdict.anomalous, dim=0) | (bound > LARGEST_AVERAGE)
    return Decision(norms, verdict, weights, rollback), learned
