"""The ledger: assignment of samples to replicas that make different numbers of steps (method 5).

Samples are counted in blocks. A block is what one replica consumes in one step: the micro-batches
of all its data-parallel ranks, consecutive samples of the dataset. Replicas that run at their own
speeds cannot negotiate a block before they use it, so a round assigns more blocks than it uses: it
has one list of the remaining blocks, of which each replica has its own entries. At the meeting
every replica computes from the gathered step counts which entries were used. Unused blocks, the
holes, are assigned first in the next round, so that none is delayed for long.

The other replicas must not be idle while a slow one consumes the last blocks: when few are left, a
final round assigns all of them, in proportion to the last step counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, compress, pairwise

FINAL_ROUNDS = 2  # the final round has at most this many rounds' blocks at the fastest speed


@dataclass(frozen=True)
class BlockAssignment:
    """Assignment of the remaining blocks to replicas in one round.

    The list of entries of the round is `holes`, then `frontier`, `frontier` + 1, ... up to
    `target`, in other words all remaining blocks but `late` ones, ascending. Blocks, entries,
    steps and replicas count from 0. Everything follows from the fields: replicas with equal fields
    have the same assignment, and a checkpoint stores only the fields.

    Attributes:
        num_replicas: N.
        target: blocks of the complete training; each of 0 ... target - 1 is consumed exactly once.
        frontier: first block beyond all that earlier rounds consumed. Below it, every block was
            consumed or is a hole; from it on, none was consumed. At the start of local training:
            the number of blocks that the warm-up consumed.
        holes: blocks below the frontier that are not consumed yet, ascending.
        quotas: number of entries of each replica in a final round, assigned as consecutive runs in
            the order of the replicas. None is a normal round: replica r has entries r, r + N, ...
        late: blocks below the frontier that are assigned to nobody in this round, ascending: when
            it had begun, the replica that had consumed them was lost before its round was
            committed. They are holes of the next round.

    Raises:
        ValueError: the fields contradict each other.
    """

    num_replicas: int
    target: int
    frontier: int = 0
    holes: tuple[int, ...] = ()
    quotas: tuple[int, ...] | None = None
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Validate the fields: a damaged checkpoint could lose samples."""
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas {self.num_replicas}: at least 1")
        if not 0 <= self.frontier <= self.target:
            raise ValueError(f"frontier {self.frontier}: in 0 ... target, which is {self.target}")
        for name, blocks in (("holes", self.holes), ("late", self.late)):
            if not all(low < high for low, high in pairwise((-1, *blocks, self.frontier))):
                raise ValueError(f"{name}: ascending in 0 ... frontier - 1, {self.frontier - 1}")
        if not set(self.holes).isdisjoint(self.late):
            raise ValueError("holes, late: no block in both")
        if self.quotas is not None:
            _check_counts("quotas", self.quotas, self.num_replicas)
            if sum(self.quotas) != self._num_entries:
                raise ValueError(f"quotas {self.quotas}: sum to {self._num_entries}, what remains")

    @property
    def remaining(self) -> int:
        """R, remaining blocks when this round starts."""
        return self._num_entries + len(self.late)

    @property
    def _num_entries(self) -> int:
        return len(self.holes) + self.target - self.frontier

    @property
    def num_consumed(self) -> int:
        """Blocks that were consumed before this round."""
        return self.target - self.remaining

    @property
    def unassigned(self) -> tuple[int, ...]:
        """All blocks below the frontier that are not consumed yet, ascending."""
        return tuple(sorted((*self.holes, *self.late))) if self.late else self.holes

    @property
    def is_over(self) -> bool:
        """Whether every block of the training has been consumed."""
        return self.remaining == 0

    @property
    def is_final(self) -> bool:
        """Whether this round assigns all remaining blocks by quota; a replica meets after them."""
        return self.quotas is not None

    def block(self, replica: int, step: int) -> int | None:
        """Block that a replica consumes in one step of this round, in constant time.

        Args:
            replica: r, in 0 ... N - 1.
            step: inner steps that the replica has made in this round before.

        Returns:
            The block, or None if no block is left for the replica, so that it must meet.
        """
        if not 0 <= replica < self.num_replicas or step < 0:
            raise ValueError(
                f"replica {replica}, step {step}: in 0 ... {self.num_replicas - 1}, from 0"
            )
        entries = self._entries[replica]
        if step >= len(entries):
            return None
        entry, num_holes = entries[step], len(self.holes)
        return self.holes[entry] if entry < num_holes else self.frontier + entry - num_holes

    def is_exhausted(self, replica: int, steps: int) -> bool:
        """Whether a replica must meet at once after `steps` steps of this round."""
        return self.block(replica, steps) is None

    def next_round(
        self,
        steps: Sequence[int],
        next_steps: Sequence[int] | None = None,
        *,
        has_final_round: bool = True,
    ) -> BlockAssignment:
        """The assignment of the next round, in time proportional to the entries used.

        Any round may end early, also a final one after a stop request; its unused blocks become
        holes again.

        Args:
            steps: inner steps of each replica in this round, gathered at the meeting.
            next_steps: the same of the replicas of the next round, where these are others.
            has_final_round: whether the last blocks are assigned by quota.

        Raises:
            ValueError: `steps` has not one count per replica, or an impossible count.
        """
        self._check_steps(steps)
        taken = [run[:count] for run, count in zip(self._entries, steps, strict=True) if count]
        touched = max((run[-1] + 1 for run in taken), default=0)  # no entry from here on was used
        # Mark and select runs, not single blocks: there may be tens of thousands of holes.
        unused = bytearray(b"\x01") * touched
        for run in taken:
            unused[run.start : run.stop : run.step] = bytes(len(run))
        frontier = self.frontier + max(0, touched - len(self.holes))
        listed = chain(self.holes[:touched], range(self.frontier, frontier))
        holes = (*compress(listed, unused), *self.holes[touched:])
        if self.late:
            holes = tuple(sorted((*holes, *self.late)))
        remaining = len(holes) + self.target - frontier
        # After a round without a step the speeds are unknown: no final round follows.
        speeds = steps if next_steps is None else next_steps
        is_final = has_final_round and 0 < remaining <= FINAL_ROUNDS * len(speeds) * max(speeds)
        quotas = proportional_shares(remaining, speeds) if is_final else None
        return BlockAssignment(len(speeds), self.target, frontier, holes, quotas)

    def over(self, num_replicas: int) -> BlockAssignment:
        """The blocks that remain, in a round that begins anew with so many replicas."""
        return BlockAssignment(num_replicas, self.target, self.frontier, self.unassigned)

    def without(self, before: BlockAssignment, lost: Mapping[int, int]) -> BlockAssignment:
        """The assignment where some blocks of the round before have not been consumed.

        Args:
            before: the assignment of that round.
            lost: their replicas in `before`, and how many of its blocks each had consumed.
        """
        found = (before.block(replica, step) for replica, n in lost.items() for step in range(n))
        late = sorted(block for block in found if block is not None)
        return replace(self, late=tuple(late)) if late else self

    def consumed_in_round(self, replica: int, steps: int) -> tuple[tuple[int, int], ...]:
        """Runs of blocks that a replica consumes in its first `steps` steps of this round.

        Returns:
            The first block and the number of blocks of each run, in the order of consumption.
        """
        blocks = [self.block(replica, step) for step in range(steps)]
        assert None not in blocks, f"replica {replica} has no blocks for {steps} steps"
        return runs_of(block for block in blocks if block is not None)

    @cached_property
    def _entries(self) -> tuple[range, ...]:
        """Entries of each replica, in the order in which it uses them."""
        if self.quotas is None:
            stop, stride = self._num_entries, self.num_replicas
            return tuple(range(first, stop, stride) for first in range(self.num_replicas))
        ends = accumulate(self.quotas)
        return tuple(range(end - q, end) for q, end in zip(self.quotas, ends, strict=True))

    def _check_steps(self, steps: Sequence[int]) -> None:
        _check_counts("steps", steps, self.num_replicas)
        for replica, (count, entries) in enumerate(zip(steps, self._entries, strict=True)):
            if count > len(entries):
                raise ValueError(
                    f"steps {count} of replica {replica}: it was assigned {len(entries)} blocks"
                )


def runs_of(blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Blocks as runs of consecutive ones: the first, and how many."""
    ranges = _joined((block, block + 1) for block in blocks)
    return tuple((first, stop - first) for first, stop in ranges)


def proportional_shares(total: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Integer shares of `total` in proportion to `counts`, by largest remainder.

    Ties go to the lower index. Shares are as equal as possible if all counts are zero.

    Args:
        counts: one or more numbers >= 0; a count of 0 gets the share 0, unless all are 0.
    """
    counts = counts if any(counts) else [1] * len(counts)
    divisor = sum(counts)
    # Integers only: every replica must find exactly the same shares.
    shares = [total * count // divisor for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda index: -(total * counts[index] % divisor))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def samples_of(
    block: int,
    *,
    micro_batch: int,
    ranks: int,
    micro_batches: int,
    rank: int,
    index: int,
    interleaved: int = 1,
) -> range:
    """Samples of the dataset in one micro-batch of one data-parallel rank of a replica.

    A block holds micro_batches x ranks x micro_batch samples. Their order in it is that of
    Megatron's sampler: the micro-batches in order, each split over the ranks.

    Args:
        block: number of the block, from 0.
        micro_batch: samples of one micro-batch of one rank.
        ranks: D, data-parallel ranks of one replica.
        micro_batches: micro-batches of one rank in one step.
        rank: d, in 0 ... D - 1.
        index: m, number of the micro-batch in the step, from 0.
        interleaved: blocks of which the micro-batches alternate, as those of so many replicas do in
            Megatron's sampler; 1: the samples of a block are consecutive.

    Raises:
        ValueError: a number is out of its range; another rank or block would hold the samples.
    """
    if block < 0 or not 0 <= rank < ranks or not 0 <= index < micro_batches:
        raise ValueError(
            f"block {block}, rank {rank}, micro-batch {index}: from 0, "
            f"and below {ranks} ranks and {micro_batches} micro-batches"
        )
    step, place = divmod(block, interleaved)
    start = (((step * micro_batches + index) * interleaved + place) * ranks + rank) * micro_batch
    return range(start, start + micro_batch)


def _check_counts(name: str, counts: Sequence[int], num_replicas: int) -> None:
    if len(counts) != num_replicas or any(count < 0 for count in counts):
        raise ValueError(f"{name} {tuple(counts)}: {num_replicas} numbers, from 0")


# ---- The order in which samples are consumed after the number of replicas has changed (method 5)
#
# Replicas that were stopped at different steps have skipped some samples. When another number of
# replicas resumes, these come first: from then on samples are numbered in the order of
# consumption, and only the skipped ones have another number than before.


@dataclass(frozen=True)
class SampleOrder:
    """Order of consumption of the samples.

    Attributes:
        start: samples consumed when the order was created; the first number of `displaced`.
        displaced: ranges of samples that had been skipped, ascending.

    Raises:
        ValueError: the fields contradict each other.
    """

    start: int = 0
    displaced: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        bounds = [0, *(bound for pair in self.displaced for bound in pair), self.end]
        is_ascending = all(low <= high for low, high in pairwise(bounds))
        if self.start < 0 or not is_ascending or any(low == high for low, high in self.displaced):
            raise ValueError(f"order of samples: start {self.start}, displaced {self.displaced}")

    @cached_property
    def end(self) -> int:
        """First number from which on the number of a sample is its own index."""
        return self.start + sum(high - low for low, high in self.displaced)

    def sample(self, number: int) -> int:
        """The sample with the given number in the order, both from 0."""
        if not self.start <= number < self.end:
            return number
        place = bisect_right(self._first_numbers, number) - 1
        return self.displaced[place][0] + number - self._first_numbers[place]

    def samples(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges of samples with the numbers `low` ... `high` - 1."""
        if high <= self.start or low >= self.end:
            return [(low, high)]
        return _joined((sample, sample + 1) for sample in map(self.sample, range(low, high)))

    @cached_property
    def _first_numbers(self) -> list[int]:
        """First number of each range of `displaced`."""
        sizes = (high - low for low, high in self.displaced)
        return list(accumulate(sizes, initial=self.start))[:-1]


IN_ORDER = SampleOrder()


def after_counted_steps(
    order: SampleOrder, steps: Sequence[int], batch: int, chunk: int, start: int
) -> SampleOrder:
    """The order after replicas that share every batch have made different numbers of steps.

    Args:
        order: before these steps.
        steps: of each replica since number `start`.
        batch: samples of one step of all replicas.
        chunk: samples of one micro-batch of a replica: replica 0 takes the first `chunk` of a
            batch, replica 1 the next, and so on, cyclically.
        start: number of the first sample of the first of these steps.
    """
    stride = chunk * len(steps)
    left = [
        start + step * batch + first + replica * chunk
        for step in range(min(steps), max(steps))
        for first in range(0, batch, stride)
        for replica, count in enumerate(steps)
        if step >= count
    ]
    ranges = [(number, number + chunk) for number in left]
    return _displacing(order, ranges, start + max(steps) * batch)


def after_assignment(
    order: SampleOrder, assignment: BlockAssignment, steps: Sequence[int], block: int
) -> SampleOrder:
    """The order after an unfinished round with an assignment of blocks.

    Args:
        order: before the round; block b has the numbers from `order.start` + b * `block` on.
        steps: of each replica in it.
        block: samples of a block.
    """
    following = assignment.next_round(steps)
    left = [
        (order.start + hole * block, order.start + (hole + 1) * block) for hole in following.holes
    ]
    return _displacing(order, left, order.start + following.frontier * block)


def _displacing(order: SampleOrder, left: list[tuple[int, int]], frontier: int) -> SampleOrder:
    """The order after all numbers below `frontier` except those in `left` are consumed."""
    if frontier < order.end:  # some samples that the last order displaced are not consumed yet
        left = [*left, (frontier, order.end)]
        frontier = order.end
    consumed = frontier - sum(high - low for low, high in left)
    ranges = sorted(pair for low, high in left for pair in order.samples(low, high))
    return SampleOrder(consumed, tuple(_joined(ranges)))


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges."""
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def share_of(total: int, replica: int, num_replicas: int) -> int:
    """This replica's share of a number of samples; the shares sum to `total`."""
    return total * (replica + 1) // num_replicas - total * replica // num_replicas
