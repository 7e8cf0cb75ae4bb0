"""The loss check: which replicas are rejected in a sync because of their training loss.

Bad data (random tokens, a corrupted shard) raises the loss of a replica without changing the norm
of its pseudo-gradient by much. Each replica's loss of a round is compared with the losses of the
others in the same round, and that difference with the replica's own history: harder data cause a
steady difference, which is part of the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.method.rows import rows_of
from megatron_edit.method.settings import Settings

MIN_EXCESS = 0.1  # nats per token: a smaller rise of the loss never rejects a replica
WARMUP_ROUNDS = 8  # accepted values before a history is armed
NEWEST_WEIGHT = 0.05  # of the newest value in a long history; a short one is a plain mean
SIGMA_PER_DEVIATION = math.sqrt(math.pi / 2)  # sigma / mean absolute deviation, of a normal value
FEWEST_COMPARED = 3  # replicas; with two that differ it is unknown which one is wrong


@dataclass(frozen=True)
class LossHistory:
    """Statistics of each replica's accepted differences; every tensor is [N].

    Attributes:
        mean: float64, nats per token; 0 before the first accepted value.
        deviation: float64, mean absolute deviation of a value from the mean before it.
        accepted: int64, values accepted since the history started.
        rejected: int64, rejections in a row.
    """

    mean: Tensor
    deviation: Tensor
    accepted: Tensor
    rejected: Tensor

    @classmethod
    def fresh(cls, num_replicas: int) -> LossHistory:
        """Histories without a value."""
        real = torch.zeros(num_replicas, dtype=torch.float64)
        count = torch.zeros(num_replicas, dtype=torch.int64)
        return cls(real, real.clone(), count, count.clone())

    def of_rows(self, rows: Sequence[int | None]) -> LossHistory:
        """The histories of these replicas, in this order; None is a new replica.

        All are fresh where the replicas become enough to be compared, or too few: before and after
        that, the values are of different kinds.
        """
        if (len(rows) < FEWEST_COMPARED) != (len(self.mean) < FEWEST_COMPARED):
            return LossHistory.fresh(len(rows))
        return LossHistory(*(rows_of(tensor, rows) for tensor in vars(self).values()))


@dataclass(frozen=True)
class LossVerdict:
    """Result of the loss check for one sync; every tensor is [N].

    Attributes:
        rejected: bool, replicas to reject in all units of the sync.
        losses: float64, nats per token, mean loss of each replica since the last meeting; NaN
            where it is not known.
        scores: float64, z: excess over the history's mean in standard deviations, of which the
            smallest is MIN_EXCESS / loss_threshold; NaN where the history is not armed or the
            replica is not tested.
    """

    rejected: Tensor
    losses: Tensor
    scores: Tensor = field(compare=False)

    @classmethod
    def without_check(cls, losses: Tensor) -> LossVerdict:
        """The verdict that rejects no replica.

        Args:
            losses: see the attribute.
        """
        return cls(torch.zeros_like(losses, dtype=torch.bool), losses, losses * torch.nan)


def loss_differences(losses: Tensor, judged: Tensor) -> Tensor:
    """d of each replica: its loss minus the median of the others' losses.

    If the number of others is even, the median includes the replica itself: one bad loss among
    three replicas, high or low, then does not change the differences of the other two. With fewer
    than three replicas d is the loss itself.

    Args:
        losses: float64 [N], nats per token.
        judged: bool [N], replicas with a usable loss.

    Returns:
        float64 [N]; NaN for replicas without a usable loss, or with fewer than two others.
    """
    num_replicas = len(losses)
    differences = torch.full_like(losses, torch.nan)
    for replica in range(num_replicas):
        if not bool(judged[replica]):
            continue
        compared = judged.clone()
        compared[replica] = int(judged.sum()) % 2 == 1
        if num_replicas < FEWEST_COMPARED:
            differences[replica] = losses[replica]
        elif int(judged.sum()) >= FEWEST_COMPARED:
            differences[replica] = losses[replica] - losses[compared].median()
    return differences


def check_losses(
    losses: Tensor, has_steps: Tensor, history: LossHistory, settings: Settings
) -> tuple[LossVerdict, LossHistory]:
    """Test the losses of one round, and update the histories with those that are accepted.

    A replica is rejected if its history is armed and
    d - mean > max(loss_threshold * sigma, MIN_EXCESS). A rejected value does not enter the
    history. After `anomaly_patience` rejections in a row the next value is accepted; if it, too,
    would have been rejected, the history restarts with it: a change of regime must not reject a
    replica for ever.
    With fewer than three replicas, whose d is relative to no other loss, a rise of all tested
    replicas counts as such a change immediately, and rejects none.

    Args:
        losses: float64 [N], nats per token, mean loss of each replica since the last meeting.
        has_steps: bool [N], whether a replica made a step since then; only these are tested, and
            only if the loss is finite.
        history: of all replicas before this round; not changed.

    Returns:
        The verdict, and the histories after this round.
    """
    values = loss_differences(losses, has_steps & losses.isfinite())
    known = values.isfinite()
    is_tested = known & (history.accepted >= WARMUP_ROUNDS)
    excess = values - history.mean
    sigma = SIGMA_PER_DEVIATION * history.deviation
    bound = (settings.loss_threshold * sigma).clamp(min=MIN_EXCESS)
    suspicious = is_tested & (excess > bound)
    rejected = suspicious & (history.rejected < settings.anomaly_patience)
    if len(losses) < FEWEST_COMPARED and bool(suspicious[known].all()):
        rejected = torch.zeros_like(rejected)
    scores = torch.where(is_tested, settings.loss_threshold * excess / bound, torch.nan)
    accepted = known & ~rejected
    first = accepted & ((history.accepted == 0) | suspicious)
    learned = _learn(values, history, accepted=accepted, first=first, rejected=rejected)
    return LossVerdict(rejected, losses, scores), learned


def _learn(
    values: Tensor, history: LossHistory, *, accepted: Tensor, first: Tensor, rejected: Tensor
) -> LossHistory:
    later = accepted & ~first
    count = history.accepted.double()
    # The n-th value has the weight 1 / n; the first deviation is that of the second value.
    mean_weight = (1.0 / (count + 1.0)).clamp(min=NEWEST_WEIGHT)
    deviation_weight = (1.0 / count.clamp(min=1.0)).clamp(min=NEWEST_WEIGHT)
    excess = values - history.mean
    mean = history.mean + mean_weight * excess
    deviation = history.deviation + deviation_weight * (excess.abs() - history.deviation)
    zero, nothing = torch.zeros_like(history.accepted), torch.zeros_like(values)
    return LossHistory(
        mean=torch.where(first, values, torch.where(later, mean, history.mean)),
        deviation=torch.where(first, nothing, torch.where(later, deviation, history.deviation)),
        accepted=torch.where(first, zero + 1, history.accepted + later),
        rejected=torch.where(accepted, zero, history.rejected + rejected),
    )
