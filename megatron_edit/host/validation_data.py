"""Shares out the samples of a set that is evaluated completely (`--full-validation`)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from megatron_edit.errors import UsageError
from megatron_edit.host.assigned_data import with_sampler
from megatron_edit.host.data import DataParallelView

_MASK = "loss_mask"


@dataclass(frozen=True)
class FilledSet:
    """A data set after whose last sample others follow that do not count: their loss is masked.

    Attributes:
        samples: the data set.
    """

    samples: Sequence[Any]

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or a masked one for an index beyond the last."""
        if index < len(self.samples):
            return self.samples[index]
        first = self.samples[0]
        return {**first, _MASK: first[_MASK] * 0}


@dataclass(frozen=True)
class FullSampler:
    """A batch sampler that gives each sample to one rank, once, and as many batches to each rank.

    Megatron's gives some ranks fewer batches than others, or none, so that they repeat samples, or
    wait for each other for ever.

    Attributes:
        num_samples: samples of the set.
        micro_batch: samples of a batch.
        micro_batches: batches of a rank in one iteration of the evaluation.
        ranks: ranks that share the set.
        rank: this one of them.
    """

    num_samples: int
    micro_batch: int
    micro_batches: int
    ranks: int
    rank: int

    def __len__(self) -> int:
        """Return the number of iterations, which Megatron takes for `--eval-iters`."""
        return -(-self.num_samples // self._batch)

    @property
    def num_filled(self) -> int:
        """Places after the last sample."""
        return len(self) * self._batch - self.num_samples

    @property
    def _batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each batch; those beyond the last sample fill the last ones."""
        for number in range(len(self) * self.micro_batches):
            start = (number * self.ranks + self.rank) * self.micro_batch
            yield list(range(start, start + self.micro_batch))


def full_loader(
    loader: DataLoader[Any], args: Namespace, parallel_state: DataParallelView
) -> DataLoader[Any]:
    """Return a loader like Megatron's, which reads this rank's share of a complete set.

    Args:
        loader: of a validation set.
        args: Megatron's.
        parallel_state: gives the ranks that share the set.

    Raises:
        UsageError: a share has to be filled up, and the samples have no loss mask.
    """
    samples: Any = loader.dataset
    micro_batch = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    batch = getattr(args, "eval_global_batch_size", args.global_batch_size)
    sampler = FullSampler(
        len(samples),
        micro_batch,
        batch // (micro_batch * args.data_parallel_size),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    )
    first = samples[0] if sampler.num_filled else {_MASK: None}
    if not isinstance(first, Mapping) or _MASK not in first:
        raise UsageError(
            f"--full-validation with data set {type(samples).__name__}",
            f"needs samples with a {_MASK}, to fill up the shares of the ranks",
            "drop --full-validation",
        )
    return with_sampler(loader, sampler, FilledSet(samples))
