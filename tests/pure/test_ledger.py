"""The ledger of a-edit: every block once, whatever the speeds, the meetings and the stops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.method.ledger import BlockAssignment, proportional_shares, samples_of
from tests.reference.ledger import SlowLedger, slow_shares

REPLICAS = st.integers(1, 8)
SPEEDS = st.lists(st.integers(4, 32), min_size=1, max_size=8)  # quarters of a step per tick
repeatable = settings(deadline=None, derandomize=True, max_examples=150)


def dealt(assignment: BlockAssignment) -> list[list[int]]:
    """All blocks of each replica in a round, as the engine would ask for them."""
    every: list[list[int]] = []
    for replica in range(assignment.num_replicas):
        every.append([])
        while not assignment.is_exhausted(replica, len(every[-1])):
            block = assignment.block(replica, len(every[-1]))
            assert block is not None
            every[-1].append(block)
    return every


@repeatable
@given(REPLICAS, st.integers(0, 200), st.integers(0, 40), st.data())
def test_agrees_with_a_brute_force_model(num: int, target: int, start: int, data: Any) -> None:
    """Any counts, zero too, any round cut anywhere: the same blocks, each once, holes kept."""
    fields = num, target, min(start, target)
    assignment, model = BlockAssignment(*fields), SlowLedger(*fields)
    wishes = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=num, max_size=num)))
    for wish in [*wishes, [target] * num]:  # at the end a round in which all take all
        blocks = dealt(assignment)
        assert blocks == model.dealt and assignment.is_final == model.is_final
        frontier = max(model.consumed, default=-1) + 1
        assert assignment.holes == tuple(sorted(set(range(frontier)) - model.consumed))
        assert (assignment.frontier, assignment.remaining) == (frontier, target - len(model.consumed))
        steps = [min(w, len(b)) for w, b in zip(wish, blocks, strict=True)]
        assignment = assignment.next_round(steps)
        model.next_round(steps)
    assert model.consumed == set(range(target))
    assert assignment == BlockAssignment(num, target, target) and assignment.is_over and not assignment.is_final
    assert assignment.next_round([0] * num) == assignment


@repeatable
@given(SPEEDS, st.integers(0, 400), st.integers(1, 6), st.randoms(use_true_random=False))
def test_training_ends(speeds: list[int], target: int, length: int, random: Any) -> None:
    """Speeds 1x to 8x apart: no more rounds than the slowest progress needs; one is final."""
    num, consumed, rounds, assignment = len(speeds), [0] * target, 0, BlockAssignment(len(speeds), target)
    while not assignment.is_over:
        blocks = dealt(assignment)
        clock = [length * speed // 4 + random.randint(0, 1) for speed in speeds]
        wish = [target] * num if assignment.is_final else clock  # in a final round no clock runs
        steps = [min(w, len(b)) for w, b in zip(wish, blocks, strict=True)]
        for block in (b for run, n in zip(blocks, steps, strict=True) for b in run[:n]):
            consumed[block] += 1
        assignment, rounds = assignment.next_round(steps), rounds + 1
    slowest = sum(length * speed // 4 for speed in speeds)  # steps of one whole round
    assert consumed == [1] * target and rounds <= target // slowest + 2  # one cut, one final


@repeatable
@given(REPLICAS, st.integers(1, 9), st.integers(1, 5))
def test_equal_speeds_deal_like_stock(num: int, tau: int, rounds: int) -> None:
    """Step i of replica r consumes block i N + r, as stock's N x D ranks do; no holes."""
    assignment = BlockAssignment(num, num * tau * (rounds + 2) + 1)
    for done in range(0, rounds * tau, tau):
        assert not assignment.is_final and assignment.holes == ()
        for step in range(tau):
            row = [assignment.block(replica, step) for replica in range(num)]
            assert row == [(done + step) * num + replica for replica in range(num)]
        assignment = assignment.next_round([tau] * num)


def test_holes_are_dealt_before_new_blocks() -> None:
    """A picture of one round: replica 0 is three times as fast as replica 1."""
    assignment = BlockAssignment(2, 100).next_round([6, 2])  # 0 2 4 6 8 10 and 1 3
    assert assignment == BlockAssignment(2, 100, frontier=11, holes=(5, 7, 9))
    assert [run[:3] for run in dealt(assignment)] == [[5, 9, 12], [7, 11, 13]]
    assert assignment.next_round([0, 1]) == BlockAssignment(2, 100, frontier=11, holes=(5, 9))


@pytest.mark.parametrize("excess", [0, 1])
def test_when_the_final_round_comes(excess: int) -> None:
    """R <= 2 N max(steps), not one block more; consecutive runs, a stalled replica has none."""
    assignment = BlockAssignment(3, 8 + 2 * 3 * 5 + excess).next_round([5, 0, 3])
    assert assignment.remaining == 30 + excess and assignment.is_final == (excess == 0)
    entries = [1, 4, 7, 10, 11, *range(13, 38 + excess)]
    runs, strides = [entries[:19], [], entries[19:]], [entries[r::3] for r in range(3)]
    assert assignment.quotas == (None if excess else (19, 0, 11))
    assert dealt(assignment) == (strides if excess else runs)


def test_a_final_round_may_be_cut() -> None:
    """By a stop: what is left is dealt again; after no step at all, in a normal round."""
    final = BlockAssignment(2, 12).next_round([3, 1])
    assert final.quotas == (6, 2) and dealt(final) == [[3, 5, 6, 7, 8, 9], [10, 11]]
    assert final.next_round([1, 1]) == BlockAssignment(2, 12, 11, (5, 6, 7, 8, 9))
    assert final.next_round([0, 0]) == BlockAssignment(2, 12, final.frontier, final.holes)


@repeatable
@given(st.integers(0, 500), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_shares(total: int, counts: list[int]) -> None:
    """Against an independent largest remainder; equal counts exercise the ties."""
    assert list(proportional_shares(total, counts)) == slow_shares(total, counts)
    equal = proportional_shares(total, [7] * len(counts))
    assert equal == proportional_shares(total, [0] * len(counts))
    assert sorted(equal, reverse=True) == list(equal) and equal[0] - equal[-1] <= 1


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([1, 1, 1], "2 numbers"), ([1], "2 numbers"), ([2, -1], "from 0"),
        ([4, 0], "replica 0: it was dealt 3"), ([3, 3], "replica 1: it was dealt 2"),
    ],
)  # fmt: skip
def test_impossible_counts(steps: list[int], words: str) -> None:
    """Would catch a replica that took a block at or beyond the target."""
    with pytest.raises(ValueError, match=words):
        BlockAssignment(2, 5).next_round(steps)


@pytest.mark.parametrize(
    "fields",
    [
        (0, 5), (2, -1), (2, 5, 6), (2, 5, -1), (2, 5, 3, (3,)), (2, 5, 3, (-1,)),
        (2, 5, 3, (1, 1)), (2, 5, 3, (2, 1)), (2, 5, 0, (), (5,)), (2, 5, 0, (), (6, -1)),
        (2, 5, 0, (), (2, 2)),
    ],
)  # fmt: skip
def test_damaged_fields(fields: Any) -> None:
    """A checkpoint that contradicts itself is refused before it loses samples."""
    with pytest.raises(ValueError):
        BlockAssignment(*fields)


@repeatable
@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_samples_partition_the_block(block: int, size: int, ranks: int, micro: int) -> None:
    """All micro-batches of all ranks, in stock's order, are the samples of the block."""
    shape = {"micro_batch": size, "ranks": ranks, "micro_batches": micro}
    samples: list[int] = []
    for m, d in product(range(micro), range(ranks)):
        samples += samples_of(block, **shape, rank=d, index=m)
    whole = size * ranks * micro
    assert samples == list(range(block * whole, (block + 1) * whole))


@pytest.mark.parametrize(("block", "rank", "index"), [(-1, 0, 0), (0, 2, 0), (0, -1, 0), (0, 0, 3)])
def test_samples_of_nobody(block: int, rank: int, index: int) -> None:
    """A rank that is none of the replica's would read its neighbour's samples."""
    with pytest.raises(ValueError):
        samples_of(block, micro_batch=2, ranks=2, micro_batches=3, rank=rank, index=index)
