"""Samples as the data ledger deals them, where replicas run at their own speeds (A-EDiT)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader

from megatron_edit.engine.pace import TimedPace
from megatron_edit.errors import UsageError
from megatron_edit.host.patching import Patcher
from megatron_edit.method.ledger import samples_of


@dataclass(frozen=True)
class Share:
    """What this rank reads of a block.

    Attributes:
        micro_batch: samples of one micro-batch of one rank.
        ranks: D, data-parallel ranks of the replica.
        micro_batches: in one step of one rank.
        rank: d.
    """

    micro_batch: int
    ranks: int
    micro_batches: int
    rank: int


class DealtSampler:
    """A batch sampler over the blocks of the round that is under way.

    Args:
        pace: holds the dealing.
        share: of this rank.
    """

    def __init__(self, pace: TimedPace, share: Share) -> None:
        self._pace = pace
        self._share = share

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of one micro-batch after another, from the start of the round."""
        dealing, replica, share = self._pace.dealing, self._pace.replica, self._share
        step = 0
        while (block := dealing.block(replica, step)) is not None:
            for index in range(share.micro_batches):
                yield list(samples_of(block, index=index, **vars(share)))
            step += 1


@dataclass
class DealtLoader:
    """A data loader that begins anew with every dealing: what was read ahead under another
    dealing belongs to somebody else now.

    Attributes:
        loader: over a `DealtSampler`.
        pace: holds the dealing.
    """

    loader: DataLoader[Any]
    pace: TimedPace

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches of one round after another."""
        while True:
            epoch = self.pace.epoch
            for batch in self.loader:
                yield batch
                if epoch != self.pace.epoch:
                    break
            else:
                return  # who has nothing left meets, and asks for nothing


def deal_samples(
    patcher: Patcher, pace: Callable[[], TimedPace], args: Callable[[], Namespace]
) -> None:
    """Let Megatron's training split be read as the ledger deals it; the others as ever.

    Args:
        patcher: undoes it.
        pace: the pace, once the engine is built; Megatron builds its loaders later.
        args: Megatron's arguments.
    """
    import megatron.training.training as training
    from megatron.core.datasets.utils import Split

    def around(build: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(build)
        def dealt(dataset: Any, consumed_samples: int) -> Any:
            loader = build(dataset, consumed_samples)
            if loader is None or _split_of(dataset) is not Split.train:
                return loader
            sampler = DealtSampler(pace(), _share_of(args()))
            return DealtLoader(_with_sampler(loader, sampler), pace())

        return dealt

    patcher.wrap(training, "build_pretraining_data_loader", around)


def _split_of(dataset: Any) -> Any:
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    if split is None:
        raise UsageError(
            f"data set {type(dataset).__name__}",
            "with --edit-strategy a-edit it must have an attribute `split` or `index_split`",
            "set it to Megatron's Split.train, Split.valid or Split.test",
        )
    return split


def _share_of(args: Namespace) -> Share:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return Share(
        micro_batch=args.micro_batch_size,
        ranks=parallel_state.get_data_parallel_world_size(),
        micro_batches=get_num_microbatches(),
        rank=parallel_state.get_data_parallel_rank(),
    )


def _with_sampler(loader: DataLoader[Any], sampler: DealtSampler) -> DataLoader[Any]:
    """The same loader over another sampler; torch lets nobody exchange it later."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
