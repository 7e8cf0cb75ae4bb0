"""How a run resumes from a checkpoint: samples, steps and schedule of each replica; refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_edit.checkpoint import resume
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan, ResumingRun
from megatron_edit.method.ledger import IN_ORDER, BlockAssignment, SampleOrder
from megatron_edit.saved_state import Ledger, ReplicaEntry

BATCH, TARGET = 24, 24 * 12  # samples of a step of all replicas, and of the training
repeatable = settings(deadline=None, derandomize=True, max_examples=150)

plan_resume = partial(resume.plan_resume, warmup_steps=0)


def run_of(
    num: int, *, timed: bool = False, batch: int = BATCH, chunk: int = 1, target: int = TARGET
) -> ResumingRun:
    """The run that resumes, with `num` replicas."""
    return ResumingRun(num, timed, batch, chunk, target)


def saved(
    steps: Sequence[int], before: int = 0, assignment: BlockAssignment | None = None, **changes: Any
) -> Manifest:
    """The manifest after `steps` of each replica in a round that began after `before` steps."""
    num, block = len(steps), BATCH // len(steps)
    entries = tuple(
        ReplicaEntry(s, n, s * block, s * BATCH, (0.5,), s, 1.5, 1.25, True)
        for n, s in ((count, before + count) for count in steps)
    )
    strategy = "edit" if assignment is None else "a-edit"
    manifest = Manifest(
        before, "all", strategy, num, 1, {}, {}, ("u",), False, entries, BATCH, 1, (), {},
        round=3, detectors={}, ledger=Ledger.of(assignment),
    )  # fmt: skip
    return replace(manifest, **changes)


WITH_HOLES = BlockAssignment(2, 24, 9, (3, 5, 7))  # after steps 5 and 1
FINAL = BlockAssignment(2, 24).next_round([8, 2])
SAME = [
    saved([0, 0], before=4), saved([2, 2], before=4), saved([3, 1], before=4),
    saved([0, 0], before=3, assignment=WITH_HOLES), saved([2, 0], before=3, assignment=WITH_HOLES),
    saved([0, 0], before=5, assignment=FINAL), saved([3, 1], before=5, assignment=FINAL),
    saved([0, 0], before=5, is_warmup=True),
]  # fmt: skip


@pytest.mark.parametrize("manifest", SAME)
def test_resume_with_same_replicas_continues_the_round(manifest: Manifest) -> None:
    """With or without clocks. Would catch: a resume that differs from an uninterrupted run."""
    plan = plan_resume(manifest, run_of(2, timed=manifest.ledger is not None))
    assignment = manifest.assignment(2)
    assert plan == ResumePlan(True, manifest.replicas, IN_ORDER, manifest.samples, assignment, None)


@pytest.mark.parametrize("num", [1, 3, 4])
@pytest.mark.parametrize("count", [0, 2])
def test_resume_with_other_replicas_after_equal_steps(num: int, count: int) -> None:
    """At a sync or not: steps and schedule are kept, samples shared again and not displaced."""
    plan = plan_resume(saved([count] * 2, before=4), run_of(num))
    step = 4 + count
    assert (plan.continues, plan.order, plan.iteration) == (False, SampleOrder(step * BATCH), None)
    assert plan.consumed == step * BATCH and plan.assignment is None
    entry = ReplicaEntry(step, 0, step * BATCH // num, step * BATCH)
    assert plan.entries == (entry,) * num


def test_resume_with_other_replicas_in_mid_round() -> None:
    """Steps 3 and 1: the samples that replica 1 left come first; counters follow the samples."""
    plan = plan_resume(saved([3, 1], before=4, chunk=6), run_of(3))
    left = ((126, 132), (138, 144), (150, 156), (162, 168))  # two micro-batches of two steps
    assert plan.order == SampleOrder(144, left) and plan.consumed == 144
    assert plan.iteration == 6 and plan.assignment is None and not plan.continues
    assert plan.entries == (ReplicaEntry(6, 0, 48, 6 * BATCH),) * 3


def test_resume_with_samples_that_do_not_divide_evenly() -> None:
    """60 samples, 2.5 batches, for 8 replicas: shares add up, and counters round up.

    Would catch: an integer division that loses samples, and a run beyond its target.
    """
    plan = plan_resume(saved([3, 2]), run_of(8))
    assert sum(entry.samples for entry in plan.entries) == plan.consumed == 60
    assert {entry.samples for entry in plan.entries} == {7, 8} and plan.iteration == 3


@pytest.mark.parametrize(("num", "blocks"), [(2, 16), (4, 32), (1, 8)])
def test_resume_with_clocks_after_counted_steps(num: int, blocks: int) -> None:
    """At a sync: block 0 of the new ledger begins at the first unconsumed sample."""
    plan = plan_resume(saved([0, 0], before=4), run_of(num, timed=True))
    assert plan.assignment == BlockAssignment(num, blocks) and plan.order == SampleOrder(96)
    assert (plan.continues, plan.consumed, plan.iteration) == (False, 96, 4)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(4, 0, 96)}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_resume_with_counted_steps_after_clocks(num: int) -> None:
    """Blocks not consumed, in the ledger or in the interrupted round, come first."""
    plan = plan_resume(saved([2, 0], before=3, assignment=WITH_HOLES), run_of(num))
    # Replica 0 has taken holes 3 and 7 of 3 5 7: block 5 is left, and the frontier stays.
    assert plan.order == SampleOrder(8 * 12, ((60, 72),)) and plan.consumed == 96
    assert (plan.continues, plan.iteration, plan.assignment) == (False, 4, None)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(4, 0, 96)}


@pytest.mark.parametrize("num", [1, 3, 4, 8])
@pytest.mark.parametrize("timed", [False, True])
def test_resume_with_other_replicas_in_warm_up(num: int, timed: bool) -> None:
    """All replicas hold the same state: no round to complete, no sample displaced."""
    plan = plan_resume(saved([0, 0], before=5, is_warmup=True), run_of(num, timed=timed))
    assert (plan.continues, plan.order, plan.iteration) == (True, IN_ORDER, None)
    assert plan.consumed == 120 == sum(entry.samples for entry in plan.entries)
    assert {(e.step, e.inner_steps, e.schedule_position) for e in plan.entries} == {(5, 0, 120)}


@pytest.mark.parametrize("steps", [[0, 0], [2, 1]])
def test_resume_with_a_longer_training(steps: list[int]) -> None:
    """The round goes on with more blocks; a final round, whose quotas are invalid, does not."""
    longer = run_of(2, timed=True, target=2 * TARGET)
    plan = plan_resume(saved(steps, before=3, assignment=WITH_HOLES), longer)
    assert plan.continues and plan.assignment == BlockAssignment(
        2, 48, WITH_HOLES.frontier, WITH_HOLES.holes
    )
    manifest = saved(steps, before=5, assignment=FINAL)
    plan = plan_resume(manifest, longer)
    assert not plan.continues and plan.assignment == BlockAssignment(2, 48 - manifest.samples // 12)
    assert plan.consumed == manifest.samples == plan.order.start


def test_resume_with_another_batch_size_and_clocks() -> None:
    """Blocks have another size. Would catch: a ledger that still counts blocks of the old size."""
    plan = plan_resume(
        saved([2, 0], before=3, assignment=WITH_HOLES), run_of(2, timed=True, batch=48)
    )
    assert not plan.continues and plan.assignment == BlockAssignment(2, (TARGET - 96) // 24)
    assert plan.order == SampleOrder(96, ((60, 72),)) and plan.iteration == 2


def test_resume_with_another_batch_size_in_mid_round() -> None:
    """Steps 3 and 1, then twice the batch: replica 1 would read samples of replica 0 again."""
    assert not plan_resume(saved([3, 1]), run_of(2, batch=48)).continues


def test_step_of_a_warm_up_of_rounds_is_not_after_the_warm_up_of_the_run() -> None:
    """With a hub the warm-up has rounds; a run without one is to refuse a longer warm-up."""
    manifest = saved([0, 0], before=4, assignment=BlockAssignment(2, 24, 8))
    plan = resume.plan_resume(manifest, run_of(2), 20)
    assert {entry.step for entry in plan.entries} == {4}
    larger = resume.plan_resume(manifest, run_of(2, batch=2 * BATCH), 20)
    assert {entry.step for entry in larger.entries} == {20}


def test_resume_with_fewer_replicas_and_larger_blocks() -> None:
    """Blocks of the two runs differ in size; the number of one does not bound the other."""
    plan = plan_resume(
        saved([0, 0], before=8, assignment=BlockAssignment(2, 24, 16)), run_of(1, timed=True)
    )
    assert plan.assignment == BlockAssignment(1, 4) and plan.order == SampleOrder(192)


@pytest.mark.parametrize(
    "manifest",
    [
        saved([0, 0], before=3, assignment=WITH_HOLES), saved([3, 1], before=5, assignment=FINAL),
        saved([6, 5], before=0, assignment=BlockAssignment(2, 24)),
    ],
    ids=["frontier", "final", "inside the round"],
)  # fmt: skip
@pytest.mark.parametrize("num", [2, 1])
def test_resume_refuses_target_below_consumed_samples(manifest: Manifest, num: int) -> None:
    """Refused before training, not in the first sync."""
    target = manifest.samples - BATCH
    with pytest.raises(ValueError):
        plan_resume(manifest, run_of(num, timed=True, target=target))


def test_resume_refuses_inconsistent_ledger() -> None:
    """The caller reports it in one line. Would catch: samples that are lost silently."""
    inconsistent = replace(saved([0, 0], assignment=WITH_HOLES), ledger=Ledger(24, 9, (7, 5), None))
    for run in (run_of(2, timed=True), run_of(2), run_of(1)):
        with pytest.raises(ValueError, match="holes"):
            plan_resume(inconsistent, run)


class Job:
    """Runs that follow each other, each from the checkpoint of the last; keeps consumed samples."""

    def __init__(self) -> None:
        self.consumed, self.manifest = set[int](), saved([0], is_warmup=True)

    def resume(self, run: ResumingRun) -> ResumePlan:
        """Plan the next run, and check that no sample is lost or counted twice."""
        plan = plan_resume(self.manifest, run)
        assert plan.consumed == len(self.consumed) == sum(e.samples for e in plan.entries)
        if not plan.continues:
            rest = {plan.order.sample(number) for number in range(plan.consumed, TARGET)}
            assert rest == set(range(TARGET)) - self.consumed
        if run.is_timed and plan.assignment is None:  # after the warm-up
            return dataclasses.replace(
                plan, assignment=BlockAssignment(run.num_replicas, TARGET // run.block)
            )
        return plan

    def train(self, run: ResumingRun, rounds: Sequence[Sequence[int]]) -> None:
        """Resume, make rounds with a sync after each but the last, and save within the last."""
        plan = self.resume(run)
        entries, assignment, order = list(plan.entries), plan.assignment, plan.order
        start = plan.consumed - sum(entry.inner_steps for entry in entries) * run.block
        for number, wishes in enumerate(rounds):
            if number > 0:
                counts = [entry.inner_steps for entry in entries]
                assignment, start = (
                    assignment and assignment.next_round(counts),
                    start + max(counts) * BATCH,
                )
                entries = [replace(entry, inner_steps=0) for entry in entries]
            if assignment is None and number < len(rounds) - 1:  # all make equal steps
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
                        break  # the loop ends with the last complete step
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
    """Sample numbers of a replica in a batch of stock sampling: one range per micro-batch."""
    firsts = range(low + replica * chunk, low + BATCH, chunk * num)
    return [first + i for first in firsts for i in range(chunk)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw a run, timed or not, and the steps of each replica in each round."""
    num = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [size for size in range(1, BATCH + 1) if BATCH // num % size == 0]
    few = st.lists(st.integers(0, 3), min_size=num, max_size=num)
    rounds = draw(st.lists(few, min_size=1, max_size=3))
    return run_of(num, timed=draw(st.booleans()), chunk=draw(st.sampled_from(sizes))), rounds


@repeatable
@given(st.lists(jobs(), min_size=2, max_size=5))
def test_every_sample_is_consumed_once_over_a_chain_of_resumes(chain: list[Any]) -> None:
    """For any chain of runs, each interrupted anywhere.

    Would catch: plans of two runs that contradict each other.
    """
    job = Job()
    for run, rounds in chain:
        job.train(run, rounds)
    job.resume(run_of(8))


def test_ledger_round_trip() -> None:
    """The ledger of a final round has quotas, which a checkpoint must keep."""
    for assignment in (WITH_HOLES, FINAL, BlockAssignment(2, 0)):
        assert saved([0, 0], assignment=assignment).assignment(2) == assignment
    assert FINAL.is_final and saved([0, 0]).assignment(2) is None


def test_saves_are_suppressed_until_the_furthest_replica_step() -> None:
    """With counted steps. Catches saves and evaluations that only some replicas reach."""
    assert plan_resume(saved([3, 1], before=4), run_of(2)).suppressed_until_step == 7
    assert plan_resume(saved([2, 2], before=4), run_of(2)).suppressed_until_step == 0
    clocks = saved([2, 0], before=3, assignment=WITH_HOLES)
    assert plan_resume(clocks, run_of(2, timed=True)).suppressed_until_step == 0


def test_other_replicas_resume_at_furthest_schedule_position() -> None:
    """Steps skipped by fp16 do not advance the schedule: other replicas begin at the position of
    the replica that skipped fewest."""
    manifest = saved([2, 2], before=4)
    first, second = manifest.replicas
    behind = replace(second, schedule_position=second.schedule_position - BATCH)
    plan = plan_resume(replace(manifest, replicas=(first, behind)), run_of(3))
    assert {entry.schedule_position for entry in plan.entries} == {first.schedule_position}
