"""Settings that a checkpoint does not go together with; found before training."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan
from megatron_edit.constants import FIXED, QSR
from megatron_edit.engine import EngineSettings
from megatron_edit.errors import UsageError
from megatron_edit.method.schedule import Schedule


def check_schedule(path: Path, manifest: Manifest, plan: ResumePlan, schedule: Schedule) -> None:
    """Replicas that have begun local training cannot go back to the warm-up.

    Raises:
        UsageError: this run's warm-up is not over where the checkpoint was written.
    """
    if manifest.is_warmup:
        return
    least = min(entry.step for entry in plan.entries)
    if schedule.warmup_steps is None:
        rule = "strategy ddp averages gradients of replicas that are equal; these train locally"
        raise UsageError(f"--load {path}", rule, "use the strategy that saved, or --finetune")
    if least < schedule.warmup_steps:
        raise UsageError(
            f"--edit-warmup-steps {schedule.warmup_steps}",
            f"the replicas of {path} have begun local training, at step {least}",
            f"use {least} or less",
        )


def check_pending(
    path: Path, manifest: Manifest, plan: ResumePlan, settings: EngineSettings
) -> None:
    """An average that had not moved the anchor is for the replicas and the strategy that sent it.

    Raises:
        UsageError: others go on.
    """
    pending = [sync for entry in manifest.replicas for sync in entry.pending]
    if any((sync.due is None) != settings.landing.at_next_meeting for sync in pending):
        raise UsageError(
            f"--load {path}",
            f"strategy {manifest.strategy} had sent a round that has not landed yet",
            "go on with the same strategy, or load what it saved at the end of its training",
        )
    names, num_fragments = manifest.units, settings.schedule.fragments
    fragments = [set(names[index::num_fragments]) for index in range(num_fragments)]
    if any(sync.due is None and set(sync.units) not in fragments for sync in pending):
        raise UsageError(
            f"--edit-fragments {num_fragments}",
            f"{path} has rounds on their way (co2), of other fragments",
            "use the number of fragments that saved it",
        )
    if not plan.goes_on and not all(sync.is_stepped for sync in pending):
        raise UsageError(
            f"--load {path}",
            "a round that was sent had not arrived yet (co2), and others are to go on",
            f"go on with {manifest.num_replicas} replicas, or load what they saved at the end of "
            "their training",
        )


def check_rounds(
    path: Path, manifest: Manifest, plan: ResumePlan, settings: EngineSettings
) -> None:
    """Replicas at different steps of a round must agree on its length.

    Raises:
        UsageError: it was of fixed length, and is not now, or the reverse.
    """
    entries = manifest.replicas
    if settings.timed is not None or not plan.goes_on or len({e.step for e in entries}) == 1:
        return
    # Rounds of varying length keep a mean of the losses, which has no last step.
    was_varying = any(e.losses and not e.last_loss_step for e in entries)
    if was_varying == settings.schedule.has_fixed_rounds:
        was = manifest.settings.get("interval", QSR if was_varying else FIXED)
        raise UsageError(
            f"--load {path}",
            "its replicas stopped at different steps of a round of another --edit-interval",
            f"go on with --edit-interval {was} up to a checkpoint at a sync",
        )


def check_samples(path: Path, plan: ResumePlan, args: Namespace) -> None:
    """Samples that were left behind come in an order that some settings do not know.

    Raises:
        UsageError: there are some, and such a setting.
    """
    if not plan.order.displaced:
        return
    for name in ("rampup_batch_size", "step_batch_size_schedule", "iterations_to_skip"):
        if getattr(args, name, None):
            raise _left_behind(path, "--" + name.replace("_", "-"))
    if args.dataloader_type != "single":
        raise _left_behind(path, f"--dataloader-type {args.dataloader_type}")


def check_equal_steps(path: Path, step: int, args: Namespace) -> None:
    """Blocks are counted from the first sample: the steps so far must have consumed whole ones.

    Raises:
        UsageError: they consumed batches of another size.
    """
    if args.consumed_train_samples != step * args.global_batch_size:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size}",
            f"{path} has consumed {args.consumed_train_samples} samples in {step} steps; with "
            "a-edit all steps must be of one size",
            "use the batch size of the checkpoint, or strategy edit",
        )


def _left_behind(path: Path, value: str) -> UsageError:
    return UsageError(
        value,
        f"the replicas of {path} stopped at different steps, and the samples between them cannot "
        "be dealt anew with it",
        "resume with the number of replicas that saved, up to a sync",
    )
