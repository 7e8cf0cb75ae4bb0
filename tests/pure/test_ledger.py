"""The ledger of A-EDiT: each block is consumed once, for any speeds, meetings and stops."""

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


def assigned_blocks(assignment: BlockAssignment) -> list[list[int]]:
    """Return all blocks of each replica in a round, as the engine would request them."""
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
def test_assignment_equals_brute_force_model(num: int, target: int, start: int, data: Any) -> None:
    """For any step counts, also zero, and rounds of any length: equal blocks and holes."""
    fields = num, target, min(start, target)
    assignment, model = BlockAssignment(*fields), SlowLedger(*fields)
    wishes = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=num, max_size=num)))
    for wish in [*wishes, [target] * num]:  # the last round consumes everything
        blocks = assigned_blocks(assignment)
        assert blocks == model.assigned and assignment.is_final == model.is_final
        frontier = max(model.consumed, default=-1) + 1
        assert assignment.holes == tuple(sorted(set(range(frontier)) - model.consumed))
        assert (assignment.frontier, assignment.remaining) == (
            frontier,
            target - len(model.consumed),
        )
        steps = [min(w, len(b)) for w, b in zip(wish, blocks, strict=True)]
        assignment = assignment.next_round(steps)
        model.next_round(steps)
    assert model.consumed == set(range(target))
    assert (
        assignment == BlockAssignment(num, target, target)
        and assignment.is_over
        and not assignment.is_final
    )
    assert assignment.next_round([0] * num) == assignment


@repeatable
@given(SPEEDS, st.integers(0, 400), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_block_is_consumed_once_in_few_rounds(
    speeds: list[int], target: int, length: int, random: Any
) -> None:
    """Speeds 1x to 8x apart: no more rounds than the slowest progress requires, plus two."""
    num, consumed, rounds, assignment = (
        len(speeds),
        [0] * target,
        0,
        BlockAssignment(len(speeds), target),
    )
    while not assignment.is_over:
        blocks = assigned_blocks(assignment)
        clock = [length * speed // 4 + random.randint(0, 1) for speed in speeds]
        wish = [target] * num if assignment.is_final else clock  # the final round has no clock
        steps = [min(w, len(b)) for w, b in zip(wish, blocks, strict=True)]
        for block in (b for run, n in zip(blocks, steps, strict=True) for b in run[:n]):
            consumed[block] += 1
        assignment, rounds = assignment.next_round(steps), rounds + 1
    slowest = sum(length * speed // 4 for speed in speeds)  # steps of one complete round
    assert consumed == [1] * target and rounds <= target // slowest + 2  # one shortened, one final


@repeatable
@given(REPLICAS, st.integers(1, 9), st.integers(1, 5))
def test_equal_speeds_assign_blocks_like_stock_megatron(num: int, tau: int, rounds: int) -> None:
    """Step i of replica r consumes block i N + r, like the N x D ranks of stock Megatron."""
    assignment = BlockAssignment(num, num * tau * (rounds + 2) + 1)
    for done in range(0, rounds * tau, tau):
        assert not assignment.is_final and assignment.holes == ()
        for step in range(tau):
            row = [assignment.block(replica, step) for replica in range(num)]
            assert row == [(done + step) * num + replica for replica in range(num)]
        assignment = assignment.next_round([tau] * num)


@pytest.mark.parametrize("excess", [0, 1])
def test_final_round_begins_at_exact_remainder(excess: int) -> None:
    """It begins at R <= 2 N max(steps); replicas get consecutive blocks, a stalled one none."""
    assignment = BlockAssignment(3, 8 + 2 * 3 * 5 + excess).next_round([5, 0, 3])
    assert assignment.remaining == 30 + excess and assignment.is_final == (excess == 0)
    entries = [1, 4, 7, 10, 11, *range(13, 38 + excess)]
    runs, strides = [entries[:19], [], entries[19:]], [entries[r::3] for r in range(3)]
    assert assignment.quotas == (None if excess else (19, 0, 11))
    assert assigned_blocks(assignment) == (strides if excess else runs)


def test_interrupted_final_round_is_reassigned() -> None:
    """After a stop the rest is assigned again; after zero steps in a normal round."""
    final = BlockAssignment(2, 12).next_round([3, 1])
    assert final.quotas == (6, 2) and assigned_blocks(final) == [[3, 5, 6, 7, 8, 9], [10, 11]]
    assert final.next_round([1, 1]) == BlockAssignment(2, 12, 11, (5, 6, 7, 8, 9))
    assert final.next_round([0, 0]) == BlockAssignment(2, 12, final.frontier, final.holes)


@repeatable
@given(st.integers(0, 500), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_proportional_shares_equal_largest_remainder(total: int, counts: list[int]) -> None:
    """Compared with an independent implementation; equal counts test the ties."""
    assert list(proportional_shares(total, counts)) == slow_shares(total, counts)
    equal = proportional_shares(total, [7] * len(counts))
    assert equal == proportional_shares(total, [0] * len(counts))
    assert sorted(equal, reverse=True) == list(equal) and equal[0] - equal[-1] <= 1


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([1, 1, 1], "2 numbers"), ([1], "2 numbers"), ([2, -1], "from 0"),
        ([4, 0], "replica 0: it was assigned 3"), ([3, 3], "replica 1: it was assigned 2"),
    ],
)  # fmt: skip
def test_impossible_step_counts_are_refused(steps: list[int], words: str) -> None:
    """Would catch a replica that consumed a block at or beyond the target."""
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
def test_contradictory_assignment_fields_are_refused(fields: Any) -> None:
    """A contradictory checkpoint is refused before samples are lost."""
    with pytest.raises(ValueError):
        BlockAssignment(*fields)


@repeatable
@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_samples_partition_the_block(block: int, size: int, ranks: int, micro: int) -> None:
    """The micro-batches of all ranks, in stock Megatron's order, are the samples of the block."""
    shape = {"micro_batch": size, "ranks": ranks, "micro_batches": micro}
    samples: list[int] = []
    for m, d in product(range(micro), range(ranks)):
        samples += samples_of(block, **shape, rank=d, index=m)
    whole = size * ranks * micro
    assert samples == list(range(block * whole, (block + 1) * whole))


@pytest.mark.parametrize(("block", "rank", "index"), [(-1, 0, 0), (0, 2, 0), (0, -1, 0), (0, 0, 3)])
def test_samples_of_invalid_rank_are_refused(block: int, rank: int, index: int) -> None:
    """A rank outside the replica would read samples of another rank."""
    with pytest.raises(ValueError):
        samples_of(block, micro_batch=2, ranks=2, micro_batches=3, rank=rank, index=index)
