"""The stages of a global batch that changes during training; a constant one has one stage."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from itertools import pairwise

from megatron_edit.errors import UsageError

_SCHEDULE, _RAMPUP = "step_batch_size_schedule", "rampup_batch_size"


@dataclass(frozen=True)
class Stage:
    """A part of training with one global batch.

    Attributes:
        start: samples consumed before it.
        batch: global batch size.
        value: the flag that sets it, with its value.
    """

    start: int
    batch: int
    value: str


def has_changing_batch(args: Namespace) -> bool:
    """Whether the global batch changes during training."""
    return any(getattr(args, name, None) for name in (_SCHEDULE, _RAMPUP))


def batch_stages(args: Namespace) -> list[Stage]:
    """Return the stages of training, by Megatron's own reading of the flags.

    Raises:
        UsageError: this Megatron ignores a flag.
    """
    import megatron.core.num_microbatches_calculator as calculators

    if schedule := getattr(args, _SCHEDULE, None):
        value, size = f'--step-batch-size-schedule "{schedule}"', args.micro_batch_size
        try:
            found = calculators.StepBatchsizeNumMicroBatchesCalculator(
                size, 1, False, rank=1, schedule=schedule, seq_length=args.seq_length
            )
        except (AssertionError, ValueError) as error:
            remedy = 'give "0:BATCH TOKENS:BATCH ..."'
            raise UsageError(value, f"cannot be understood: {error}", remedy) from error
        return [Stage(start, batch, value) for start, batch in found.schedule]
    if rampup := getattr(args, _RAMPUP, None):
        first, step, samples = map(int, rampup)
        value, last = f"--rampup-batch-size {first} {step} {samples}", args.global_batch_size
        if not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
            raise UsageError(
                value,
                "has no effect since Megatron 0.18",
                'use --step-batch-size-schedule "0:BATCH TOKENS:BATCH ..."',
            )
        batches = range(first, (last or first) + 1, max(1, step))
        width = samples / max(1, len(batches) - 1)
        return [Stage(int(number * width), batch, value) for number, batch in enumerate(batches)]
    batch = args.global_batch_size
    return [] if batch is None else [Stage(0, batch, f"--global-batch-size {batch}")]


def num_iterations(args: Namespace) -> int:
    """Return the iterations of the complete training."""
    if args.train_iters or not has_changing_batch(args):
        return int(args.train_iters or (args.train_samples or 0) // args.global_batch_size)
    stages = batch_stages(args)
    consumed = iterations = 0
    for stage, end in zip(
        stages, [s.start for s in stages[1:]] + [args.train_samples], strict=True
    ):
        steps = max(0, -(-(min(end, args.train_samples) - consumed) // stage.batch))
        consumed, iterations = consumed + steps * stage.batch, iterations + steps
    return iterations


def check_stages(args: Namespace, ranks: int, consumed: int = 0) -> None:
    """Refuse a batch that the ranks cannot share equally, in the present stage or a later one.

    Args:
        args: Megatron's.
        ranks: data-parallel ranks of all replicas.
        consumed: samples that were consumed before.

    Raises:
        UsageError: a stage has such a batch, or a smaller one than the stage before it.
    """
    stages, size = batch_stages(args), args.micro_batch_size * ranks
    ahead = [s for s, after in pairwise(stages) if after.start > consumed] + stages[-1:]
    for stage in ahead:
        if stage.batch % size:
            which = f"the batch {stage.batch}, from sample {stage.start} on, " * (len(stages) > 1)
            raise UsageError(
                stage.value,
                f"{which}must be a multiple of micro-batch size x data-parallel ranks of all "
                f"replicas = {args.micro_batch_size} x {ranks}",
                f"use {-(-stage.batch // size) * size}",
            )
    for stage, after in pairwise(ahead):
        if after.batch < stage.batch:
            rule = f"Megatron cannot reduce a batch, here from {stage.batch} to {after.batch}"
            raise UsageError(stage.value, rule, "give batches that grow")
