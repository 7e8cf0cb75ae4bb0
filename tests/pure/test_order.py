"""The order of samples when the number of replicas changes: every sample is consumed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.method.ledger import (
    IN_ORDER,
    BlockAssignment,
    SampleOrder,
    after_assignment,
    after_counted_steps,
    share_of,
)

BATCH, TARGET = 24, 24 * 12  # samples of a step of all replicas, and of the training
REPLICAS = st.sampled_from([1, 2, 3, 4, 6, 8])  # they divide the batch
repeatable = settings(deadline=None, derandomize=True, max_examples=150)


class Training:
    """Keeps the samples that replicas have consumed as a set, and the order of the rest."""

    def __init__(self) -> None:
        self.order, self.consumed = IN_ORDER, set[int]()

    def consume(self, numbers: Iterable[int]) -> None:
        """Consume samples by number; each must be consumed for the first time."""
        samples = [self.order.sample(number) for number in numbers]
        assert len(set(samples)) == len(samples) and self.consumed.isdisjoint(samples)
        self.consumed.update(samples)

    def change(self, order: SampleOrder) -> None:
        """Go on in another order, which must hold exactly the samples not consumed yet, once."""
        self.order = order
        assert order.start == len(self.consumed)
        rest = [order.sample(number) for number in range(order.start, TARGET)]
        assert len(set(rest)) == len(rest) and self.consumed.isdisjoint(rest)
        assert self.consumed.union(rest) == set(range(TARGET))

    def count_steps(self, num: int, chunk: int, equal: int, steps: Sequence[int]) -> None:
        """Consume by stock sampling: micro-batches in order, each split over the replicas."""
        start = self.order.start
        for begin, counts in ((start, [equal] * num), (start + equal * BATCH, steps)):
            for replica, count in enumerate(counts):
                for batch in range(begin, begin + count * BATCH, BATCH):
                    for first in range(batch, batch + BATCH, num * chunk):
                        low = first + replica * chunk
                        self.consume(range(low, low + chunk))
        begin = start + equal * BATCH
        self.change(after_counted_steps(self.order, steps, BATCH, chunk, begin))

    def consume_timed(self, num: int, rounds: Sequence[Sequence[int]]) -> None:
        """Consume in timed rounds; the last one is not completed."""
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
    """A run with one number of replicas: counted steps, or timed rounds."""
    num = draw(REPLICAS)
    few = st.lists(st.integers(0, 4), min_size=num, max_size=num)
    if draw(st.booleans()):
        return num, draw(st.lists(few, min_size=1, max_size=3))
    sizes = [size for size in range(1, BATCH) if BATCH // num % size == 0]
    return num, draw(st.sampled_from(sizes)), draw(st.integers(0, 2)), draw(few)


def train(training: Training, *chain: tuple[Any, ...]) -> None:
    """Run one number of replicas after the other while complete batches are left."""
    for num, *how in chain:
        if len(how) == 1:
            training.consume_timed(num, how[0])
        else:
            chunk, equal, steps = how
            left = (TARGET - training.order.start) // BATCH
            equal = min(equal, left)
            steps = [min(count, left - equal) for count in steps]
            training.count_steps(num, chunk, equal, steps)


@repeatable
@given(generations())
def test_every_sample_is_consumed_once_after_one_change_of_replicas(
    generation: tuple[Any, ...],
) -> None:
    """Stopped at any place. Would catch: a sample that is skipped, or consumed again."""
    train(Training(), generation)


@repeatable
@given(st.lists(generations(), min_size=2, max_size=5))
def test_every_sample_is_consumed_once_after_several_changes(chain: list[tuple[Any, ...]]) -> None:
    """Each change may come before the samples displaced by the last one are consumed.

    Would catch: an order that drops the displaced samples of the one before it.
    """
    train(Training(), *chain)


def test_order_is_kept_where_a_run_makes_no_step() -> None:
    """Two replicas displace samples 12 ... 23 and 36 ... 47; the next run makes no step."""
    training = Training()
    train(training, (2, 12, 0, [2, 0]))
    assert training.order == SampleOrder(24, ((12, 24), (36, 48)))
    train(training, (1, 24, 0, [0]))
    assert training.order == SampleOrder(24, ((12, 24), (36, 48)))


def test_rest_of_displaced_samples_comes_first() -> None:
    """Some of the displaced samples have been consumed: the others still come first."""
    training = Training()
    train(training, (2, 12, 0, [4, 0]), (1, 24, 1, [0]))
    assert training.order == SampleOrder(72, ((60, 72), (84, 96)))


def test_rest_of_displaced_blocks_comes_first_with_clocks() -> None:
    """With assigned blocks: a hole of the second run, then the rest of the first."""
    training = Training()
    train(training, (2, [[5, 0]]), (2, [[2, 0]]))
    assert training.order == SampleOrder(84, ((36, 48), (84, 96)))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 12])
def test_displaced_ranges_are_split_by_micro_batch(chunk: int) -> None:
    """A replica's share of a batch is one range per micro-batch, not one in all."""
    order = after_counted_steps(IN_ORDER, [1, 0], BATCH, chunk, 0)
    left = range(chunk, BATCH, 2 * chunk)
    assert order == SampleOrder(12, tuple((low, low + chunk) for low in left))


def test_equal_steps_displace_no_samples() -> None:
    """A change at a sync. Would catch: displaced samples where there are none."""
    assert after_counted_steps(IN_ORDER, [3, 3, 3], BATCH, 8, 48) == SampleOrder(120)
    assert after_assignment(IN_ORDER, BlockAssignment(2, 20), [3, 3], 12) == SampleOrder(72)


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    """Any order that can arise: its ranges are the samples below its end not yet consumed."""
    pieces = draw(st.lists(st.integers(1, 6), max_size=8))
    ends = [sum(pieces[: index + 1]) for index in range(len(pieces))]
    ranges = tuple(zip(ends[0::2], ends[1::2], strict=False))
    left = sum(high - low for low, high in ranges)
    return SampleOrder((ranges[-1][1] if ranges else draw(st.integers(0, 9))) - left, ranges)


@repeatable
@given(orders(), st.integers(0, 60), st.integers(0, 60))
def test_sample_ranges_equal_samples_one_by_one(order: SampleOrder, low: int, high: int) -> None:
    """`samples` equals `sample` one by one. Would catch: ranges that exceed the order."""
    ranges = order.samples(min(low, high), max(low, high))
    single = [order.sample(number) for number in range(min(low, high), max(low, high))]
    assert [sample for pair in ranges for sample in range(*pair)] == single
    assert sorted(order.sample(number) for number in range(order.start, order.end)) == [
        sample for pair in order.displaced for sample in range(*pair)
    ]
    assert order.sample(order.end) == order.end


def test_default_order_keeps_every_sample_number() -> None:
    """Without a change of replicas every sample keeps its number."""
    assert [IN_ORDER.sample(number) for number in range(5)] == list(range(5))
    assert IN_ORDER.samples(3, 9) == [(3, 9)] and IN_ORDER.end == 0


@pytest.mark.parametrize(
    ("start", "displaced"),
    [(-1, ()), (0, ((3, 3),)), (0, ((4, 3),)), (5, ((-1, 2),))],
)
def test_order_refuses_invalid_fields(start: int, displaced: tuple[tuple[int, int], ...]) -> None:
    """An inconsistent checkpoint is refused before samples are repeated."""
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
def test_order_refuses_contradicting_ranges(
    start: int, displaced: tuple[tuple[int, int], ...]
) -> None:
    """Ranges that overlap, descend or lie beyond the end would repeat samples."""
    with pytest.raises(ValueError, match="order of samples"):
        SampleOrder(start, displaced)


@repeatable
@given(st.integers(0, 10_000), st.integers(1, 9))
def test_replica_shares_of_samples_add_up(total: int, num: int) -> None:
    """Would catch shares that lose a sample, or differ by more than one."""
    shares = [share_of(total, replica, num) for replica in range(num)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1
