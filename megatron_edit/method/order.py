"""The order in which samples are consumed, after a number of replicas has been changed (method 5).

Replicas that were stopped at different steps leave samples behind. When another number of
replicas goes on, those come first: from then on samples have a number in the order of
consumption, and all but the left ones keep their own.
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
    """Which sample comes when.

    Attributes:
        start: samples consumed when the order was made; from this number on, `displaced` come.
        displaced: ranges of samples that had been left behind, ascending.

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
        """From this number on, samples keep their own."""
        return self.start + sum(high - low for low, high in self.displaced)

    def sample(self, number: int) -> int:
        """The sample that comes as the `number`-th, both from 0."""
        if not self.start <= number < self._end:
            return number
        place = bisect_right(self._first_numbers, number) - 1
        return self.displaced[place][0] + number - self._first_numbers[place]

    def samples(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges of samples that come as numbers `low` ... `high` - 1."""
        if high <= self.start or low >= self._end:
            return [(low, high)]
        return _joined((sample, sample + 1) for sample in map(self.sample, range(low, high)))

    @cached_property
    def _end(self) -> int:
        return self.end

    @cached_property
    def _first_numbers(self) -> list[int]:
        """Of each range of `displaced`."""
        sizes = (high - low for low, high in self.displaced)
        return list(accumulate(sizes, initial=self.start))[:-1]


IN_ORDER = SampleOrder()


def after_counted_steps(
    order: SampleOrder, steps: Sequence[int], batch: int, chunk: int, start: int
) -> SampleOrder:
    """The order after replicas that share every batch made these steps.

    Args:
        order: so far.
        steps: of each replica since number `start`.
        batch: samples of one step of all replicas.
        chunk: samples of one micro-batch of a replica: replica 0 takes the first `chunk` of a
            batch, replica 1 the next, and so on, and around again.
        start: number of the first sample of the first of these steps.
    """
    turn = chunk * len(steps)
    left = [
        start + step * batch + first + replica * chunk
        for step in range(min(steps), max(steps))
        for first in range(0, batch, turn)
        for replica, count in enumerate(steps)
        if step >= count
    ]
    ranges = [(number, number + chunk) for number in left]
    return _displacing(order, ranges, start + max(steps) * batch)


def after_assignment(
    order: SampleOrder, assignment: BlockAssignment, steps: Sequence[int], block: int
) -> SampleOrder:
    """The order after a round was cut short.

    Args:
        order: block b has the numbers from `order.start` + b * `block` on.
        assignment: of the round.
        steps: of each replica in it.
        block: samples of a block.
    """
    settled = assignment.next_round(steps)
    left = [
        (order.start + hole * block, order.start + (hole + 1) * block) for hole in settled.holes
    ]
    return _displacing(order, left, order.start + settled.frontier * block)


def _displacing(order: SampleOrder, left: list[tuple[int, int]], frontier: int) -> SampleOrder:
    """The order after all numbers below `frontier` but those in `left` are consumed."""
    if frontier < order.end:  # of what the last order had displaced, some is still to come
        left = [*left, (frontier, order.end)]
        frontier = order.end
    consumed = frontier - sum(high - low for low, high in left)
    ranges = sorted(pair for low, high in left for pair in order.samples(low, high))
    return SampleOrder(consumed, tuple(_joined(ranges)))


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one range."""
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def share_of(total: int, replica: int, num_replicas: int) -> int:
    """This replica's part of a number of samples; the parts sum to `total`."""
    return total * (replica + 1) // num_replicas - total * replica // num_replicas
