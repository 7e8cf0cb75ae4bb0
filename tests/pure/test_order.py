"""The order of samples when the number of replicas changes: every sample once, none left behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.order import (
    IN_ORDER,
    SampleOrder,
    after_counted_steps,
    after_assignment,
    share_of,
)

BATCH, TARGET = 24, 24 * 12  # samples of a step of all replicas, and of the whole training
REPLICAS = st.sampled_from([1, 2, 3, 4, 6, 8])  # they divide the batch
repeatable = settings(deadline=None, derandomize=True, max_examples=150)


class Training:
    """Replicas with sets and lists: what they consume, and what the order makes of it."""

    def __init__(self) -> None:
        self.order, self.consumed = IN_ORDER, set[int]()

    def consume(self, numbers: Iterable[int]) -> None:
        """Each sample for the first time."""
        samples = [self.order.sample(number) for number in numbers]
        assert len(set(samples)) == len(samples) and self.consumed.isdisjoint(samples)
        self.consumed.update(samples)

    def change(self, order: SampleOrder) -> None:
        """From here on, all that has not been consumed comes, each once, and nothing else."""
        self.order = order
        assert order.start == len(self.consumed)
        rest = [order.sample(number) for number in range(order.start, TARGET)]
        assert len(set(rest)) == len(rest) and self.consumed.isdisjoint(rest)
        assert self.consumed.union(rest) == set(range(TARGET))

    def count_steps(self, num: int, chunk: int, equal: int, steps: Sequence[int]) -> None:
        """Stock sampling: micro-batches in order, each split over the replicas."""
        start = self.order.start
        for begin, counts in ((start, [equal] * num), (start + equal * BATCH, steps)):
            for replica, count in enumerate(counts):
                for batch in range(begin, begin + count * BATCH, BATCH):
                    for first in range(batch, batch + BATCH, num * chunk):
                        low = first + replica * chunk
                        self.consume(range(low, low + chunk))
        begin = start + equal * BATCH
        self.change(after_counted_steps(self.order, steps, BATCH, chunk, begin))

    def deal(self, num: int, rounds: Sequence[Sequence[int]]) -> None:
        """Rounds of replicas with clocks; the last is cut short."""
        start, block = self.order.start, BATCH // num
        assignment = BlockAssignment(num, (TARGET - start) // block)
        for number, wishes in enumerate(rounds, 1):
            steps = [0] * num
            for replica, wish in enumerate(wishes):
                while steps[replica] < wish:
                    if (taken := assignment.block(replica, steps[replica])) is None:
                        break
                    self.consume(range(start + taken * block, start + (taken + 1) * block))
                    steps[replica] += 1
            if number < len(rounds):
                assignment = assignment.next_round(steps)
        self.change(after_assignment(self.order, assignment, steps, block))


@st.composite
def generations(draw: st.DrawFn) -> tuple[Any, ...]:
    """What one number of replicas does: by count, or by the clock."""
    num = draw(REPLICAS)
    few = st.lists(st.integers(0, 4), min_size=num, max_size=num)
    if draw(st.booleans()):
        return num, draw(st.lists(few, min_size=1, max_size=3))
    sizes = [size for size in range(1, BATCH) if BATCH // num % size == 0]
    return num, draw(st.sampled_from(sizes)), draw(st.integers(0, 2)), draw(few)


def train(training: Training, *chain: tuple[Any, ...]) -> None:
    """One number of replicas after the other, as long as there are whole batches left."""
    for num, *how in chain:
        if len(how) == 1:
            training.deal(num, how[0])
        else:
            chunk, equal, steps = how
            left = (TARGET - training.order.start) // BATCH
            equal = min(equal, left)
            steps = [min(count, left - equal) for count in steps]
            training.count_steps(num, chunk, equal, steps)


@repeatable
@given(generations())
def test_one_change(generation: tuple[Any, ...]) -> None:
    """Stopped anywhere: would catch a sample that is left behind, or consumed again."""
    train(Training(), generation)


@repeatable
@given(st.lists(generations(), min_size=2, max_size=5))
def test_changes_in_a_row(chain: list[tuple[Any, ...]]) -> None:
    """Also before what the last change left behind has been consumed: the orders add up.

    Would catch an order that forgets the one before it.
    """
    train(Training(), *chain)


def test_a_change_right_after_a_change() -> None:
    """The smallest case: two replicas leave 12 ... 23 and 36 ... 47, the next make no step."""
    training = Training()
    train(training, (2, 12, 0, [2, 0]))
    assert training.order == SampleOrder(24, ((12, 24), (36, 48)))
    train(training, (1, 24, 0, [0]))
    assert training.order == SampleOrder(24, ((12, 24), (36, 48)))


def test_a_change_within_what_was_left() -> None:
    """A part of it has been consumed: the rest of it still comes first."""
    training = Training()
    train(training, (2, 12, 0, [4, 0]), (1, 24, 1, [0]))
    assert training.order == SampleOrder(72, ((60, 72), (84, 96)))


def test_a_change_within_what_was_left_by_the_clock() -> None:
    """The same where blocks are dealt: a hole of the second round, then the rest of the first."""
    training = Training()
    train(training, (2, [[5, 0]]), (2, [[2, 0]]))
    assert training.order == SampleOrder(84, ((36, 48), (84, 96)))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 12])
def test_micro_batches(chunk: int) -> None:
    """A replica's share of a batch is one run per micro-batch, not one: they are told apart."""
    order = after_counted_steps(IN_ORDER, [1, 0], BATCH, chunk, 0)
    left = range(chunk, BATCH, 2 * chunk)
    assert order == SampleOrder(12, tuple((low, low + chunk) for low in left))


def test_equal_steps_leave_nothing() -> None:
    """A change at a sync: would catch an order where none is needed."""
    assert after_counted_steps(IN_ORDER, [3, 3, 3], BATCH, 8, 48) == SampleOrder(120)
    assert after_assignment(IN_ORDER, BlockAssignment(2, 20), [3, 3], 12) == SampleOrder(72)


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    """Any order that can arise: the ranges are those that are not consumed below its end."""
    pieces = draw(st.lists(st.integers(1, 6), max_size=8))
    ends = [sum(pieces[: index + 1]) for index in range(len(pieces))]
    ranges = tuple(zip(ends[0::2], ends[1::2], strict=False))
    left = sum(high - low for low, high in ranges)
    return SampleOrder((ranges[-1][1] if ranges else draw(st.integers(0, 9))) - left, ranges)


@repeatable
@given(orders(), st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_what_they_are_made_of(order: SampleOrder, low: int, high: int) -> None:
    """`samples` is `sample` one by one: would catch ranges that begin or end outside the order."""
    ranges = order.samples(min(low, high), max(low, high))
    single = [order.sample(number) for number in range(min(low, high), max(low, high))]
    assert [sample for pair in ranges for sample in range(*pair)] == single
    assert sorted(order.sample(number) for number in range(order.start, order.end)) == [
        sample for pair in order.displaced for sample in range(*pair)
    ]
    assert order.sample(order.end) == order.end


def test_in_order_changes_nothing() -> None:
    """Most trainings: every sample keeps its number."""
    assert [IN_ORDER.sample(number) for number in range(5)] == list(range(5))
    assert IN_ORDER.samples(3, 9) == [(3, 9)] and IN_ORDER.end == 0


@pytest.mark.parametrize(
    ("start", "displaced"),
    [(-1, ()), (0, ((3, 3),)), (0, ((4, 3),)), (5, ((-1, 2),))],
)
def test_damaged_fields(start: int, displaced: tuple[tuple[int, int], ...]) -> None:
    """A checkpoint that contradicts itself is refused before it repeats samples."""
    with pytest.raises(ValueError, match="order of samples"):
        SampleOrder(start, displaced)


@pytest.mark.parametrize(
    ("start", "displaced"),
    [
        (4, ((0, 2), (1, 3))),  # overlap: 1 comes twice
        (4, ((4, 6), (0, 2))),  # descending
        (2, ((50, 52),)),  # beyond the end: 50 comes as number 2 and as number 50
    ],
)
def test_contradicting_ranges(start: int, displaced: tuple[tuple[int, int], ...]) -> None:
    """Ranges that overlap, descend or lie beyond the end would repeat samples."""
    with pytest.raises(ValueError, match="order of samples"):
        SampleOrder(start, displaced)


@repeatable
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shares(total: int, num: int) -> None:
    """Would catch shares that lose a sample, or differ by more than one."""
    shares = [share_of(total, replica, num) for replica in range(num)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1
