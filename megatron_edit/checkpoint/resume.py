"""How a run resumes from a checkpoint: planned from the manifest alone, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.method.ledger import (
    BlockAssignment,
    SampleOrder,
    after_assignment,
    after_counted_steps,
    share_of,
)
from megatron_edit.saved_state import ReplicaEntry


@dataclass(frozen=True)
class ResumingRun:
    """The properties of a run that a resume depends on.

    Attributes:
        num_replicas: N.
        is_timed: whether rounds are timed (A-EDiT).
        batch: samples of one step of all replicas.
        chunk: samples of one micro-batch of a replica.
        target: samples of the training, before a final synchronous phase.
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
    """Where each replica of a run resumes from a checkpoint.

    Attributes:
        continues: whether training continues exactly where it was saved, possibly within a round;
            otherwise the saved round is completed first, and a new one begins.
        entries: state of each replica of this run.
        order: of samples.
        consumed: samples, by all replicas.
        assignment: of the round that continues or begins; None where rounds are not timed.
        iteration: for Megatron's loop; None where the one that it saved is right.
    """

    continues: bool
    entries: tuple[ReplicaEntry, ...]
    order: SampleOrder
    consumed: int
    assignment: BlockAssignment | None
    iteration: int | None

    @property
    def suppressed_until_step(self) -> int:
        """The highest step of replicas that were stopped at different steps; else 0."""
        steps = {entry.step for entry in self.entries}
        steps_differ = self.assignment is None and (len(steps) > 1 or self.resumes_at_meeting)
        return max(steps) if steps_differ else 0

    @property
    def resumes_at_meeting(self) -> bool:
        """Whether a replica joins the next meeting before its next step."""
        return any(entry.is_waiting for entry in self.entries)


def plan_resume(manifest: Manifest, run: ResumingRun, warmup_steps: int) -> ResumePlan:
    """Plan how a run resumes from a checkpoint.

    Args:
        run: that resumes.
        warmup_steps: W; lower bound of the step where it is recomputed from the samples for another
            batch.

    Raises:
        ValueError: the manifest is inconsistent, or replicas with timed rounds have consumed more
            samples than this run is to train.
    """
    order = SampleOrder(manifest.order_start, manifest.displaced)
    if run.is_timed and not manifest.is_warmup and manifest.samples > run.target:
        raise ValueError(
            f"its replicas have consumed {manifest.samples} samples, and the rounds of this run "
            f"end at {run.target}"
        )
    if _can_continue(manifest, run):
        assignment = _continued_assignment(manifest, run, order)
        if assignment is not None or not run.is_timed:
            return ResumePlan(True, manifest.replicas, order, manifest.samples, assignment, None)
    if manifest.is_warmup:
        steps = manifest.replicas[0].step
        entries = _entries(run, steps, manifest.samples, manifest.replicas[0].schedule_position)
        return ResumePlan(True, entries, order, manifest.samples, None, None)
    return _plan_next_round(manifest, run, order, warmup_steps)


def _can_continue(manifest: Manifest, run: ResumingRun) -> bool:
    """Return whether each replica can continue where it was: the samples are shared as before."""
    was_timed = manifest.ledger is not None
    if manifest.num_replicas != run.num_replicas or (
        was_timed != run.is_timed and not manifest.is_warmup
    ):
        return False
    has_equal_steps = len({entry.step for entry in manifest.replicas}) == 1
    shares = (manifest.batch, manifest.chunk) == (run.batch, run.chunk)
    return manifest.batch == run.batch if was_timed else shares or has_equal_steps


def _continued_assignment(
    manifest: Manifest, run: ResumingRun, order: SampleOrder
) -> BlockAssignment | None:
    """Return the saved assignment if it can continue; a final one cannot with another target."""
    if (assignment := manifest.assignment(manifest.num_replicas)) is None:
        return None
    target = (run.target - order.start) // run.block
    if target != assignment.target:
        if assignment.is_final:
            return None
        assignment = replace(assignment, target=target)
        # Raises if more was consumed than the new target.
        assignment.next_round([entry.inner_steps for entry in manifest.replicas])
    return assignment


def _plan_next_round(
    manifest: Manifest, run: ResumingRun, order: SampleOrder, warmup_steps: int
) -> ResumePlan:
    """Complete the saved round first; then N replicas, perhaps others, begin the next."""
    counts = [entry.inner_steps for entry in manifest.replicas]
    block = manifest.batch // manifest.num_replicas
    assignment = manifest.assignment(manifest.num_replicas)
    if assignment is not None:
        order = after_assignment(order, assignment, counts, block)
    else:
        start = manifest.samples - block * sum(counts)
        order = after_counted_steps(order, counts, manifest.batch, manifest.chunk, start)
    consumed = order.start
    batches = -(-consumed // run.batch)  # rounded up: a begun batch counts
    steps = {entry.step for entry in manifest.replicas}
    is_aligned = assignment is None and len(steps) == 1
    least = warmup_steps if run.batch != manifest.batch else 0
    step = steps.pop() if is_aligned else max(least, batches)
    position = consumed
    if assignment is None:  # steps that fp16 skipped have consumed samples and moved no schedule
        old = manifest.num_replicas
        position -= min(e.samples * old - e.schedule_position for e in manifest.replicas)
    new = None
    if run.is_timed:
        new = BlockAssignment(run.num_replicas, (run.target - consumed) // run.block)
    return ResumePlan(
        continues=False,
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
