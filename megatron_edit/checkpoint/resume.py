"""How a run goes on from a checkpoint: planned from the manifest alone, alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_edit.checkpoint.manifest import Ledger, Manifest
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.order import (
    SampleOrder,
    after_counted_steps,
    after_assignment,
    share_of,
)
from megatron_edit.saved_state import ReplicaEntry


@dataclass(frozen=True)
class ResumingRun:
    """What a run is, as far as it matters here.

    Attributes:
        num_replicas: N.
        is_timed: whether replicas run at their own speeds.
        batch: samples of one step of all replicas.
        chunk: samples of one micro-batch of a replica.
        target: samples of the whole training.
    """

    num_replicas: int
    is_timed: bool
    batch: int
    chunk: int
    target: int

    @property
    def block(self) -> int:
        """Samples that one replica consumes in a step."""
        return self.batch // self.num_replicas


@dataclass(frozen=True)
class ResumePlan:
    """What follows from a manifest for each replica of a run.

    Attributes:
        goes_on: whether the same replicas go on, in the middle of a round if they were; otherwise
            their round is completed first, and another begins.
        entries: where each replica of this run stands.
        order: of samples.
        consumed: samples, by all replicas.
        assignment: of the round that is under way or begins, where replicas run at their own speeds.
        iteration: for Megatron's loop; None where what it saved is right.
    """

    goes_on: bool
    entries: tuple[ReplicaEntry, ...]
    order: SampleOrder
    consumed: int
    assignment: BlockAssignment | None
    iteration: int | None

    @property
    def suppressed_until_step(self) -> int:
        """The last step of replicas that were stopped at different steps; else 0."""
        steps = {entry.step for entry in self.entries}
        is_apart = self.assignment is None and (len(steps) > 1 or self.resumes_at_meeting)
        return max(steps) if is_apart else 0

    @property
    def resumes_at_meeting(self) -> bool:
        """Whether a replica comes to the next meeting before it has made a step."""
        return any(entry.is_waiting for entry in self.entries)


def ledger_of(assignment: BlockAssignment) -> Ledger:
    """For a manifest."""
    return Ledger(assignment.target, assignment.frontier, assignment.holes, assignment.quotas)


def assignment_of(manifest: Manifest) -> BlockAssignment | None:
    """The assignment of the round that was under way; None where steps were counted.

    Raises:
        ValueError: its fields contradict each other.
    """
    if (ledger := manifest.ledger) is None:
        return None
    return BlockAssignment(
        manifest.num_replicas, ledger.target, ledger.frontier, ledger.holes, ledger.quotas
    )


def plan_resume(manifest: Manifest, run: ResumingRun, warmup_steps: int) -> ResumePlan:
    """Plan it.

    Args:
        manifest: of the checkpoint.
        run: that goes on.
        warmup_steps: W; steps that are counted anew, by another batch size, end no earlier.

    Raises:
        ValueError: the manifest contradicts itself, or its replicas with clocks have consumed
            more than this run is to train.
    """
    order = SampleOrder(manifest.order_start, manifest.displaced)
    if _is_same(manifest, run):
        assignment = _same_assignment(manifest, run, order)
        if assignment is not None or not run.is_timed:
            return ResumePlan(True, manifest.replicas, order, manifest.samples, assignment, None)
    if manifest.is_warmup:
        steps = manifest.replicas[0].step
        entries = _entries(run, steps, manifest.samples, manifest.replicas[0].schedule_position)
        return ResumePlan(True, entries, order, manifest.samples, None, None)
    return _begin_anew(manifest, run, order, warmup_steps)


def _is_same(manifest: Manifest, run: ResumingRun) -> bool:
    """Whether the replicas may go on from where each was: they share the samples as before."""
    was_timed = manifest.ledger is not None
    if manifest.num_replicas != run.num_replicas or (
        was_timed != run.is_timed and not manifest.is_warmup
    ):
        return False
    is_together = len({entry.step for entry in manifest.replicas}) == 1
    shares = (manifest.batch, manifest.chunk) == (run.batch, run.chunk)
    return manifest.batch == run.batch if was_timed else shares or is_together


def _same_assignment(manifest: Manifest, run: ResumingRun, order: SampleOrder) -> BlockAssignment | None:
    """The assignment that was under way, if it can go on: with another target, a final one cannot."""
    if (assignment := assignment_of(manifest)) is None:
        return None
    target = (run.target - order.start) // run.block
    if target != assignment.target:
        if assignment.is_final:
            return None
        assignment = replace(assignment, target=target)
        assignment.next_round([entry.inner_steps for entry in manifest.replicas])  # raises beyond it
    return assignment


def _begin_anew(
    manifest: Manifest, run: ResumingRun, order: SampleOrder, warmup_steps: int
) -> ResumePlan:
    """The saved replicas' round is over; N replicas, perhaps others, begin the next."""
    counts = [entry.inner_steps for entry in manifest.replicas]
    block = manifest.batch // manifest.num_replicas
    assignment = assignment_of(manifest)
    if assignment is not None:
        order = after_assignment(order, assignment, counts, block)
    else:
        start = manifest.samples - block * sum(counts)
        order = after_counted_steps(order, counts, manifest.batch, manifest.chunk, start)
    consumed = order.start
    batches = -(-consumed // run.batch)  # begun
    steps = {entry.step for entry in manifest.replicas}
    is_aligned = assignment is None and len(steps) == 1
    step = steps.pop() if is_aligned else max(warmup_steps, batches)
    position = consumed
    if assignment is None:  # steps that fp16 skipped have consumed samples and moved no schedule
        old = manifest.num_replicas
        position -= min(e.samples * old - e.schedule_position for e in manifest.replicas)
    new = BlockAssignment(run.num_replicas, (run.target - consumed) // run.block) if run.is_timed else None
    return ResumePlan(
        goes_on=False,
        entries=_entries(run, step, consumed, position),
        order=order,
        consumed=consumed,
        assignment=new,
        iteration=None if is_aligned and not run.is_timed else max(1, batches),
    )


def _entries(run: ResumingRun, step: int, samples: int, position: int) -> tuple[ReplicaEntry, ...]:
    return tuple(
        ReplicaEntry(
            step=step,
            inner_steps=0,
            samples=share_of(samples, replica, run.num_replicas),
            schedule_position=position,
        )
        for replica in range(run.num_replicas)
    )
