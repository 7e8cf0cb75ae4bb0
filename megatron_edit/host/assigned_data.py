"""Data loading by assignments of the ledger, for replicas that run at their own speeds (A-EDiT)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from megatron_edit.engine import EditEngine
from megatron_edit.errors import UsageError
from megatron_edit.host.data import DataParallelView
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.patching import Call
from megatron_edit.method.ledger import SampleOrder, samples_of


@dataclass(frozen=True)
class Share:
    """This rank's share of a block.

    Attributes:
        micro_batch: samples of one micro-batch of one rank.
        ranks: D, data-parallel ranks of the replica.
        micro_batches: micro-batches of one rank in one step.
        rank: d, this data-parallel rank.
        interleaved: see `method.ledger.samples_of`.
    """

    micro_batch: int
    ranks: int
    micro_batches: int
    rank: int
    interleaved: int = 1


class AssignedSampler:
    """A batch sampler over this replica's blocks of the current round.

    Args:
        order: order of samples; block 0 begins at its start.
    """

    def __init__(self, engine: EditEngine, share: Share, order: SampleOrder) -> None:
        self._engine = engine
        self._share = share
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch, from the current step of the round on."""
        status, share = self._engine.status, self._share
        # A resumed round does not begin at step 0.
        order, step = self._order, status.inner_steps
        epoch = status.assignment_epoch
        while epoch == status.assignment_epoch and (block := status.block(step)) is not None:
            for index in range(share.micro_batches):
                numbers = samples_of(block, index=index, **vars(share))
                yield [order.sample(order.start + number) for number in numbers]
            step += 1


@dataclass
class AssignedLoader:
    """A data loader that restarts at each new assignment, and at a final synchronous phase.

    Prefetched batches of the previous assignment may now be assigned to other replicas.

    Attributes:
        loader: data loader with an `AssignedSampler`.
        load_rest: creates the loader of the final phase, which reads the samples that remain.
    """

    loader: DataLoader[object]
    engine: EditEngine
    load_rest: Callable[[], DataLoader[object]]

    def __iter__(self) -> Iterator[object]:
        """Yield the micro-batches of each round, then those of the final phase."""
        status = self.engine.status
        while not status.is_final_phase:
            epoch = status.assignment_epoch
            for batch in self.loader:
                yield batch
                if epoch != status.assignment_epoch:
                    break
            else:
                if not status.is_final_phase:
                    return  # a replica without blocks joins the meeting and reads no more batches
        yield from self.load_rest()


@dataclass(frozen=True)
class ReorderedSampler:
    """Maps the indices of a batch sampler of Megatron to another order of samples.

    Attributes:
        sampler: Megatron's batch sampler.
        order: order of samples.
    """

    sampler: Iterable[list[int]]
    order: SampleOrder

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch."""
        for numbers in self.sampler:
            yield [self.order.sample(number) for number in numbers]


def assigned_loader(
    call: Call[DataLoader[object] | None],
    engine: EditEngine,
    host: MegatronHost,
    num_replicas: int,
) -> DataLoader[object] | AssignedLoader | None:
    """Make Megatron's loader of the training split read the blocks assigned by the ledger.

    Without an assignment Megatron's sampler is kept, with another order of samples if there is one.
    Loaders of other splits are returned unchanged.

    Args:
        call: call of Megatron's `build_pretraining_data_loader`.
        host: has the order of samples.
        num_replicas: N, or N0 of an elastic run.
    """
    from megatron.core.datasets.utils import Split

    loader = call.proceed()
    status, order = engine.status, host.counters.order
    is_assigned = status.assignment is not None and not status.is_final_phase
    if loader is None or not (is_assigned or call.arguments["consumed_samples"] < order.end):
        return loader
    dataset = call.arguments["dataset"]
    if (split := split_of(dataset)) is None:
        raise UsageError(
            f"data set {type(dataset).__name__}",
            "must have an attribute `split` or `index_split` for the assignment of its samples",
            "set it to Megatron's Split.train, Split.valid or Split.test",
        )
    if split is not Split.train:
        return loader
    if not is_assigned:
        return with_sampler(loader, ReorderedSampler(loader.batch_sampler, order))

    def load_rest() -> DataLoader[object]:
        call.arguments["consumed_samples"] = host.arguments.consumed_train_samples
        rest = call.proceed()
        assert rest is not None, "a data set without a loader"
        return with_sampler(rest, ReorderedSampler(rest.batch_sampler, order))

    is_counted = engine.settings.assigns_blocks and not engine.settings.is_timed
    share = _share_of(host.arguments, num_replicas if is_counted else 1)
    sampler = AssignedSampler(engine, share, order)
    return AssignedLoader(with_sampler(loader, sampler), engine, load_rest)


def split_of(dataset: object) -> object:
    """Return the split that a data set belongs to, as Megatron reads it; None if unknown."""
    return getattr(dataset, "split", getattr(dataset, "index_split", None))


def _share_of(args: Namespace, interleaved: int) -> Share:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return Share(
        micro_batch=args.micro_batch_size,
        ranks=parallel_state.get_data_parallel_world_size(),
        micro_batches=get_num_microbatches(),
        rank=parallel_state.get_data_parallel_rank(),
        interleaved=interleaved,
    )


def with_sampler(
    loader: DataLoader[object],
    sampler: Iterable[list[int]],
    dataset: object | None = None,
) -> DataLoader[object]:
    """Return a loader like this one with another sampler, which torch does not allow to replace.

    Args:
        sampler: yields the indices of each batch.
        dataset: replaces that of the loader.
    """
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )


# ---- Shares out the samples of a set that is evaluated completely (`--full-validation`)


_MASK = "loss_mask"


@dataclass(frozen=True)
class FilledSet:
    """A data set after whose last sample others follow that do not count: their loss is masked."""

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
