"""Data loading by assignments of the ledger, for replicas that run at their own speeds (A-EDiT)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader

from megatron_edit.engine import EditEngine
from megatron_edit.errors import UsageError
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.calls import Call
from megatron_edit.method.ledger import samples_of
from megatron_edit.method.order import SampleOrder


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
        engine: has the assignment.
        share: share of this rank.
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
    """A data loader that restarts at each new assignment.

    Prefetched batches of the previous assignment may now be assigned to other replicas.

    Attributes:
        loader: data loader with an `AssignedSampler`.
        engine: counts the assignments.
    """

    loader: DataLoader[object]
    engine: EditEngine

    def __iter__(self) -> Iterator[object]:
        """Yield the micro-batches of each round."""
        while True:
            epoch = self.engine.status.assignment_epoch
            for batch in self.loader:
                yield batch
                if epoch != self.engine.status.assignment_epoch:
                    break
            else:
                return  # a replica without blocks joins the meeting and reads no more batches


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
        engine: has the assignment.
        host: has the order of samples.
        num_replicas: N, or N0 of an elastic run.
    """
    from megatron.core.datasets.utils import Split

    loader = call.proceed()
    is_assigned, order = engine.status.assignment is not None, host.counters.order
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
    timed = engine.settings.timed
    is_counted = timed is not None and timed.steps is not None
    share = _share_of(host.arguments, num_replicas if is_counted else 1)
    sampler = AssignedSampler(engine, share, order)
    return AssignedLoader(with_sampler(loader, sampler), engine)


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
        loader: of Megatron.
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
