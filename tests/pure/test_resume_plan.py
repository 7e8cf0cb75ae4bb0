"""How a run goes on from a checkpoint: who takes which samples, from where, and who may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.checkpoint import resume
from megatron_edit.checkpoint.manifest import Ledger, Manifest
from megatron_edit.checkpoint.resume import ResumePlan, ResumingRun, assignment_of, ledger_of
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.order import IN_ORDER, SampleOrder
from megatron_edit.saved_state import ReplicaEntry

BATCH, TARGET = 24, 24 * 12  # samples of a step of all replicas, and of the whole training
repeatable = settings(deadline=None, derandomize=True, max_examples=150)

plan_resume = partial(resume.plan_resume, warmup_steps=0)


def run_of(
    num: int, *, timed: bool = False, batch: int = BATCH, chunk: int = 1, target: int = TARGET
) -> ResumingRun:
    """A run with another number of replicas, perhaps."""
    return ResumingRun(num, timed, batch, chunk, target)


def saved(
    steps: Sequence[int], before: int = 0, assignment: BlockAssignment | None = None, **changes: Any
) -> Manifest:
    """What replicas write after these inner steps, `before` of them all having been synced."""
    num, block = len(steps), BATCH // len(steps)
    entries = tuple(
        ReplicaEntry(s, n, s * block, s * BATCH, (0.5,), s, 1.5, 1.25, True)
        for n, s in ((count, before + count) for count in steps)
    )
    strategy, ledger = ("edit", None) if assignment is None else ("a-edit", ledger_of(assignment))
    manifest = Manifest(
        before, "all", strategy, num, 1, {}, {}, ("u",), False, 3, entries, {}, BATCH, 1, ledger
    )
    return replace(manifest, **changes)


SETTLED = BlockAssignment(2, 24, 9, (3, 5, 7))  # after steps 5 and 1
FINAL = BlockAssignment(2, 24).next_round([8, 2])
SAME = [
    saved([0, 0], before=4), saved([2, 2], before=4), saved([3, 1], before=4),
    saved([0, 0], before=3, assignment=SETTLED), saved([2, 0], before=3, assignment=SETTLED),
    saved([0, 0], before=5, assignment=FINAL), saved([3, 1], before=5, assignment=FINAL),
    saved([0, 0], before=5, is_warmup=True),
]  # fmt: skip


@pytest.mark.parametrize("manifest", SAME)
def test_the_same_replicas_go_on(manifest: Manifest) -> None:
    """With clocks, losses and all: would catch a resume that is not that of nobody stopping."""
    plan = plan_resume(manifest, run_of(2, timed=manifest.ledger is not None))
    assignment = None if manifest.ledger is None else assignment_of(manifest)
    assert plan == ResumePlan(True, manifest.replicas, IN_ORDER, manifest.samples, assignment, None)


@pytest.mark.parametrize("num", [1, 3, 4])
@pytest.mark.parametrize("count", [0, 2])
def test_others_after_equal_steps(num: int, count: int) -> None:
    """At a sync or not: steps and schedule as they were, samples shared out anew, none moved."""
    plan = plan_resume(saved([count] * 2, before=4), run_of(num))
    step = 4 + count
    assert (plan.goes_on, plan.order, plan.iteration) == (False, SampleOrder(step * BATCH), None)
    assert plan.consumed == step * BATCH and plan.assignment is None
    entry = ReplicaEntry(step, 0, step * BATCH // num, step * BATCH)
    assert plan.entries == (entry,) * num


def test_others_in_the_middle_of_a_round() -> None:
    """Steps 3 and 1: what replica 1 has left comes first, the counters go by the samples."""
    plan = plan_resume(saved([3, 1], before=4, chunk=6), run_of(3))
    left = ((126, 132), (138, 144), (150, 156), (162, 168))  # two micro-batches of two steps
    assert plan.order == SampleOrder(144, left) and plan.consumed == 144
    assert plan.iteration == 6 and plan.assignment is None and not plan.goes_on
    assert plan.entries == (ReplicaEntry(6, 0, 48, 6 * BATCH),) * 3


def test_odd_numbers() -> None:
    """60 samples, 2.5 batches, for 8 replicas: shares sum up, and counters round up.

    Would catch integer division that loses samples, and a run beyond its target.
    """
    plan = plan_resume(saved([3, 2]), run_of(8))
    assert sum(entry.samples for entry in plan.entries) == plan.consumed == 60
    assert {entry.samples for entry in plan.entries} == {7, 8} and plan.iteration == 3


@pytest.mark.parametrize(("num", "blocks"), [(2, 16), (4, 32), (1, 8)])
def test_clocks_after_counted_steps(num: int, blocks: int) -> None:
    """At a sync: block 0 of the new ledger is the first sample that is left."""
    plan = plan_resume(saved([0, 0], before=4), run_of(num, timed=True))
    assert plan.assignment == BlockAssignment(num, blocks) and plan.order == SampleOrder(96)
    assert (plan.goes_on, plan.consumed, plan.iteration) == (False, 96, 4)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(4, 0, 96)}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_counted_steps_after_clocks(num: int) -> None:
    """The holes of the ledger, and those of the round that was cut, come first."""
    plan = plan_resume(saved([2, 0], before=3, assignment=SETTLED), run_of(num))
    # Replica 0 has taken holes 3 and 7 of 3 5 7: block 5 is left, and the frontier stands.
    assert plan.order == SampleOrder(8 * 12, ((60, 72),)) and plan.consumed == 96
    assert (plan.goes_on, plan.iteration, plan.assignment) == (False, 4, None)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(4, 0, 96)}


@pytest.mark.parametrize("num", [1, 3, 4, 8])
@pytest.mark.parametrize("timed", [False, True])
def test_warm_up_with_others(num: int, timed: bool) -> None:
    """All hold the same still: nothing to complete, nothing left behind."""
    plan = plan_resume(saved([0, 0], before=5, is_warmup=True), run_of(num, timed=timed))
    assert (plan.goes_on, plan.order, plan.iteration) == (True, IN_ORDER, None)
    assert plan.consumed == 120 == sum(entry.samples for entry in plan.entries)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(5, 0, 120)}


@pytest.mark.parametrize("steps", [[0, 0], [2, 1]])
def test_a_longer_training(steps: list[int]) -> None:
    """The same round goes on with more blocks; a final one, whose quotas are void, does not."""
    longer = run_of(2, timed=True, target=2 * TARGET)
    plan = plan_resume(saved(steps, before=3, assignment=SETTLED), longer)
    assert plan.goes_on and plan.assignment == BlockAssignment(2, 48, SETTLED.frontier, SETTLED.holes)
    manifest = saved(steps, before=5, assignment=FINAL)
    plan = plan_resume(manifest, longer)
    assert not plan.goes_on and plan.assignment == BlockAssignment(2, 48 - manifest.samples // 12)
    assert plan.consumed == manifest.samples == plan.order.start


def test_another_batch() -> None:
    """Blocks of another size: would catch a ledger that goes on counting in the old ones."""
    plan = plan_resume(saved([2, 0], before=3, assignment=SETTLED), run_of(2, timed=True, batch=48))
    assert not plan.goes_on and plan.assignment == BlockAssignment(2, (TARGET - 96) // 24)
    assert plan.order == SampleOrder(96, ((60, 72),)) and plan.iteration == 2


def test_another_batch_in_the_middle_of_a_round() -> None:
    """Steps 3 and 1, then twice the batch: replica 1 would read what replica 0 has read."""
    assert not plan_resume(saved([3, 1]), run_of(2, batch=48)).goes_on


def test_fewer_replicas_with_larger_blocks() -> None:
    """Blocks of the saved run and of this one differ in size: neither bounds the other."""
    plan = plan_resume(saved([0, 0], before=8, assignment=BlockAssignment(2, 24, 16)), run_of(1, timed=True))
    assert plan.assignment == BlockAssignment(1, 4) and plan.order == SampleOrder(192)


@pytest.mark.parametrize(
    "manifest",
    [
        saved([0, 0], before=3, assignment=SETTLED), saved([3, 1], before=5, assignment=FINAL),
        saved([6, 5], before=0, assignment=BlockAssignment(2, 24)),
    ],
    ids=["frontier", "final", "inside the round"],
)  # fmt: skip
@pytest.mark.parametrize("num", [2, 1])
def test_a_target_that_has_passed(manifest: Manifest, num: int) -> None:
    """Refused before training, not in the first sync after it."""
    target = manifest.samples - BATCH
    with pytest.raises(ValueError):
        plan_resume(manifest, run_of(num, timed=True, target=target))


def test_a_ledger_that_contradicts_itself() -> None:
    """The caller turns it into one line; would catch samples that get lost silently."""
    broken = replace(saved([0, 0], assignment=SETTLED), ledger=Ledger(24, 9, (7, 5), None))
    for run in (run_of(2, timed=True), run_of(2), run_of(1)):
        with pytest.raises(ValueError, match="holes"):
            plan_resume(broken, run)


class Job:
    """Runs that follow each other, each from the checkpoint of the one before, as sets."""

    def __init__(self) -> None:
        self.consumed, self.manifest = set[int](), saved([0], is_warmup=True)

    def resume(self, run: ResumingRun) -> ResumePlan:
        """The next run: nothing has been lost or counted twice."""
        plan = plan_resume(self.manifest, run)
        assert plan.consumed == len(self.consumed) == sum(e.samples for e in plan.entries)
        if not plan.goes_on:
            rest = {plan.order.sample(number) for number in range(plan.consumed, TARGET)}
            assert rest == set(range(TARGET)) - self.consumed
        if run.is_timed and plan.assignment is None:  # after the warm-up
            return replace(plan, assignment=BlockAssignment(run.num_replicas, TARGET // run.block))
        return plan

    def train(self, run: ResumingRun, rounds: Sequence[Sequence[int]]) -> None:
        """Resume, make rounds with a sync after each but the last, save in the middle of it."""
        plan = self.resume(run)
        entries, assignment, order = list(plan.entries), plan.assignment, plan.order
        start = plan.consumed - sum(entry.inner_steps for entry in entries) * run.block
        for number, wishes in enumerate(rounds):
            if number > 0:
                counts = [entry.inner_steps for entry in entries]
                assignment, start = assignment and assignment.next_round(counts), start + max(counts) * BATCH
                entries = [replace(entry, inner_steps=0) for entry in entries]
            if assignment is None and number < len(rounds) - 1:  # all come to the sync
                wishes = [max(*wishes, *(e.inner_steps for e in entries))] * len(entries)
            for replica, wish in enumerate(wishes):
                while (step := entries[replica].inner_steps) < wish:
                    if assignment is None:
                        numbers = shared(start + step * BATCH, replica, run.num_replicas, run.chunk)
                    elif (block := assignment.block(replica, step)) is not None:
                        low = order.start + block * run.block
                        numbers = list(range(low, low + run.block))
                    else:
                        break
                    if assignment is None and start + (step + 1) * BATCH > TARGET:
                        break  # the loop ends with the last whole step
                    samples = {order.sample(number) for number in numbers}
                    assert len(samples) == run.block and self.consumed.isdisjoint(samples)
                    self.consumed |= samples
                    entry = entries[replica]
                    counters = entry.step + 1, step + 1, entry.samples + run.block
                    entries[replica] = ReplicaEntry(*counters, entry.schedule_position)
        self.manifest = replace(
            saved([0] * len(entries), assignment=assignment, chunk=run.chunk),
            replicas=tuple(entries),
            order_start=order.start,
            displaced=order.displaced,
        )


def shared(low: int, replica: int, num: int, chunk: int) -> list[int]:
    """Numbers of a replica in a batch of stock sampling: one run per micro-batch."""
    firsts = range(low + replica * chunk, low + BATCH, chunk * num)
    return [first + i for first in firsts for i in range(chunk)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, ...]:
    """A run of some replicas; with clocks or without."""
    num = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [size for size in range(1, BATCH + 1) if BATCH // num % size == 0]
    few = st.lists(st.integers(0, 3), min_size=num, max_size=num)
    rounds = draw(st.lists(few, min_size=1, max_size=3))
    return run_of(num, timed=draw(st.booleans()), chunk=draw(st.sampled_from(sizes))), rounds


@repeatable
@given(st.lists(jobs(), min_size=2, max_size=5))
def test_every_sample_once(chain: list[Any]) -> None:
    """Any chain of runs, resumed anywhere: no sample twice, none left behind.

    Would catch whatever the plans of two runs do not agree on.
    """
    job = Job()
    for run, rounds in chain:
        job.train(run, rounds)
    job.resume(run_of(8))


REALS, COUNTS = [[0.1, 1e300], [5e-324, 0.0], [1 / 3, 3.0]], [[3, 2**53 + 1], [0, 0], [1, 2]]
TABLES: dict[str, Any] = {"mean": REALS, "variance": REALS[::-1]} | {
    name: COUNTS[index:] + COUNTS[:index]
    for index, name in enumerate(("updates", "accepted", "rejected"))
}


def test_detectors_come_back() -> None:
    """Bit for bit: would catch float32, and counts that go through a float."""
    state = DetectorState.of_lists(TABLES)
    assert state.to_lists() == TABLES
    assert {t.dtype for t in (state.mean, state.variance)} == {torch.float64}
    assert {t.dtype for t in (state.updates, state.accepted, state.rejected)} == {torch.int64}


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_detectors_of_other_replicas(num: int) -> None:
    """Who is still there keeps what it has learned, others start; the saved ones stay."""
    state = DetectorState.of_lists(TABLES)
    lists = state.for_replicas(num).to_lists()
    for name, table in TABLES.items():
        assert lists[name] == [*table[:num], *[[0, 0]] * (num - 3)]
    state.for_replicas(num).mean.fill_(9.0)
    assert state.to_lists() == TABLES


@pytest.mark.parametrize("mean", [[[1.0], [1.0, 2.0]], [["x"]], [[None, 1.0]], None])
def test_damaged_detectors(mean: Any) -> None:
    """Ragged, or no numbers: what the documentation says, and nothing else."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        DetectorState.of_lists({k: v for k, v in (TABLES | {"mean": mean}).items() if v})


def test_the_ledger_comes_back() -> None:
    """A final round too, whose quotas a checkpoint must hold."""
    for assignment in (SETTLED, FINAL, BlockAssignment(2, 0)):
        assert assignment_of(saved([0, 0], assignment=assignment)) == assignment
    assert FINAL.is_final and assignment_of(saved([0, 0])) is None


def test_nothing_is_done_twice_after_unequal_stops() -> None:
    """Up to the furthest replica's step, where replicas count; catches saves and evaluations that
    some come to alone."""
    assert plan_resume(saved([3, 1], before=4), run_of(2)).suppressed_until_step == 7
    assert plan_resume(saved([2, 2], before=4), run_of(2)).suppressed_until_step == 0
    clocks = saved([2, 0], before=3, assignment=SETTLED)
    assert plan_resume(clocks, run_of(2, timed=True)).suppressed_until_step == 0


def test_the_learning_rate_of_others() -> None:
    """Steps that fp16 skipped moved no schedule: others begin where the one that skipped fewest
    stood."""
    manifest = saved([2, 2], before=4)
    first, second = manifest.replicas
    behind = replace(second, schedule_position=second.schedule_position - BATCH)
    plan = plan_resume(replace(manifest, replicas=(first, behind)), run_of(3))
    assert {entry.schedule_position for entry in plan.entries} == {first.schedule_position}
