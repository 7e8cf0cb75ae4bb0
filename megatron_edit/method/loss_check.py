"""The loss check: which replicas are left out of a sync because of their training loss.

Bad data (random tokens, a corrupted shard) raises the loss of a replica without changing the norm
of its pseudo-gradient by much. Each replica's loss of a round is compared with the losses of the
others in the same round, and that difference with the replica's own history: a replica whose data
are harder has a steady difference, which its history absorbs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXCESS = 0.1  # nats per token: a smaller rise of the loss is never a reason to leave out
WARMUP_ROUNDS = 8  # accepted values before a history is armed
NEWEST_WEIGHT = 0.05  # of the newest value in an old history; a young one is a plain mean
SIGMA_PER_DEVIATION = math.sqrt(math.pi / 2)  # sigma / mean absolute deviation, of a normal value
FEWEST_COMPARED = 3  # replicas; of two that differ nobody can say which one is wrong


@dataclass(frozen=True)
class LossCheckConfig:
    """Settings of the loss check.

    Attributes:
        threshold: standard deviations above the mean of the replica's own history.
        patience: rejections in a row after which the next value is accepted.
    """

    threshold: float
    patience: int


@dataclass(frozen=True)
class LossHistory:
    """What each replica's accepted differences have been; every tensor is [N].

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

    @classmethod
    def of_lists(cls, lists: Mapping[str, list[float]], num_replicas: int) -> LossHistory:
        """From what a checkpoint holds; fresh where it holds none, or that of another N.

        Args:
            lists: the fields as lists [N]; empty in checkpoints of older versions.
            num_replicas: N of this run.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, or is not a list of numbers.
        """
        if not lists:
            return cls.fresh(num_replicas)
        saved = cls(
            **{n: torch.tensor(lists[n], dtype=torch.float64) for n in ("mean", "deviation")},
            **{n: torch.tensor(lists[n], dtype=torch.int64) for n in ("accepted", "rejected")},
        )
        if len({tensor.shape for tensor in vars(saved).values()}) > 1 or saved.mean.dim() != 1:
            raise ValueError("fields of different lengths")
        return saved if len(saved.mean) == num_replicas else cls.fresh(num_replicas)

    def to_lists(self) -> dict[str, list[float]]:
        """For a checkpoint: exact; see `of_lists`."""
        return {name: tensor.tolist() for name, tensor in vars(self).items()}


@dataclass(frozen=True)
class LossVerdict:
    """What the loss check says of one sync; every tensor is [N].

    Attributes:
        rejected: bool, replicas to leave out of all units of the sync.
        losses: float64, nats per token, mean loss of each replica since the last meeting; NaN
            where it is not known.
        scores: float64, z: excess over the history's mean in standard deviations, of which the
            smallest is MIN_EXCESS / threshold; NaN where the history is not armed or the replica
            is not judged.
    """

    rejected: Tensor
    losses: Tensor
    scores: Tensor

    @classmethod
    def without_check(cls, losses: Tensor) -> LossVerdict:
        """Where nobody is judged.

        Args:
            losses: see the attribute.
        """
        return cls(torch.zeros_like(losses, dtype=torch.bool), losses, losses * torch.nan)


def loss_differences(losses: Tensor, judged: Tensor) -> Tensor:
    """d of each replica: its loss less the median of the others' losses.

    Where the others are even in number, the replica itself counts among them: one bad loss among
    three replicas, high or low, then does not change the differences of the other two. With fewer
    than three replicas d is the loss itself.

    Args:
        losses: float64 [N], nats per token.
        judged: bool [N], replicas whose losses count.

    Returns:
        float64 [N]; NaN for replicas that do not count, or have fewer than two others.
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
    losses: Tensor, has_steps: Tensor, history: LossHistory, config: LossCheckConfig
) -> tuple[LossVerdict, LossHistory]:
    """Judge the losses of one round and learn from those that are accepted.

    A replica is rejected where its history is armed and
    d - mean > max(threshold * sigma, MIN_EXCESS). A rejected value does not enter the history.
    After `patience` rejections in a row the next value is accepted; if it, too, would have been
    rejected, the history starts anew with it: a change of regime must not lock a replica out.
    With fewer than three replicas, where d has nothing to be compared with, a rise of all that are
    judged is such a change at once, and rejects nobody.

    Args:
        losses: float64 [N], nats per token, mean loss of each replica since the last meeting.
        has_steps: bool [N], whether a replica made a step since then; only these are judged, and
            only where the loss is finite.
        history: of all replicas before this round; not changed.
        config: settings.

    Returns:
        The verdict, and the histories after this round.
    """
    values = loss_differences(losses, has_steps & losses.isfinite())
    known = values.isfinite()
    is_tested = known & (history.accepted >= WARMUP_ROUNDS)
    excess = values - history.mean
    sigma = SIGMA_PER_DEVIATION * history.deviation
    bound = (config.threshold * sigma).clamp(min=MIN_EXCESS)
    suspicious = is_tested & (excess > bound)
    rejected = suspicious & (history.rejected < config.patience)
    if len(losses) < FEWEST_COMPARED and bool(suspicious[known].all()):
        rejected = torch.zeros_like(rejected)
    scores = torch.where(is_tested, config.threshold * excess / bound, torch.nan)
    accepted = known & ~rejected
    first = accepted & ((history.accepted == 0) | suspicious)
    learned = _learn(values, history, accepted=accepted, first=first, rejected=rejected)
    return LossVerdict(rejected, losses, scores), learned


def _learn(
    values: Tensor, history: LossHistory, *, accepted: Tensor, first: Tensor, rejected: Tensor
) -> LossHistory:
    later = accepted & ~first
    count = history.accepted.double()
    # The n-th value weighs 1 / n, and the first deviation comes with the second value.
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
