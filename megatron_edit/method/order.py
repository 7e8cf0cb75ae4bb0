"""The order in which samples are consumed after the number of replicas has changed (method 5).

Replicas that were stopped at different steps have skipped some samples. When another number of
replicas resumes, these come first: from then on samples are numbered in the order of consumption,
and only the skipped ones have another number than before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_edit.method.ledger import BlockAssignment


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

    @property
    def end(self) -> int:
        """First number from which on the number of a sample is its own index."""
        return self.start + sum(high - low for low, high in self.displaced)

    def sample(self, number: int) -> int:
        """The sample with the given number in the order, both from 0."""
        if not self.start <= number < self._end:
            return number
        place = bisect_right(self._first_numbers, number) - 1
        return self.displaced[place][0] + number - self._first_numbers[place]

    def samples(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges of samples with the numbers `low` ... `high` - 1."""
        if high <= self.start or low >= self._end:
            return [(low, high)]
        return _joined((sample, sample + 1) for sample in map(self.sample, range(low, high)))

    @cached_property
    def _end(self) -> int:
        return self.end

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
        assignment: of the round.
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
