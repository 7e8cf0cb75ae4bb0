"""Settings that are incompatible with a checkpoint; checked before training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.constants import FIXED, QSR
from megatron_edit.engine import EngineSettings
from megatron_edit.errors import EditError, UsageError
from megatron_edit.flags import flag_of
from megatron_edit.method.schedule import Schedule

# Flags of what Megatron's schedule stores, in samples where it counts.
_SCHEDULE_FLAGS = {
    "max_lr": "--lr", "min_lr": "--min-lr", "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters or --train-iters", "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay or --weight-decay", "wd_incr_steps": "--train-iters",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_style": "--weight-decay-incr-style", "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
}  # fmt: skip


def parameters_only(args: Namespace) -> str | None:
    """Return the flag that loads only the parameters; None where all is loaded."""
    return "--finetune" if args.finetune else "--no-load-optim" if args.no_load_optim else None


def check_rates(path: Path, args: Namespace, schedule: Mapping[str, object]) -> None:
    """Refuse another learning-rate schedule or weight decay, unless a flag says which one to use.

    Args:
        args: Megatron's.
        schedule: state of this run's schedule.

    Raises:
        UsageError: the checkpoint has another one, or cannot be read.
    """
    is_chosen = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if is_chosen or parameters_only(args):
        return
    common = _common_state(path)
    if "opt_param_scheduler" not in common:
        return
    saved = {**vars(common.get("args", Namespace())), **common["opt_param_scheduler"]}
    mine = {**vars(args), **schedule}
    for name, words in _SCHEDULE_FLAGS.items():
        if name in saved and name in mine and saved[name] != mine[name]:
            raise UsageError(
                f"{words} ({name} {mine[name]})",
                f"{path} was saved with {saved[name]}",
                "give the flags of that run, or --override-opt_param-scheduler for the new "
                "values, or --use-checkpoint-opt_param-scheduler for the saved ones",
            )


def _common_state(path: Path) -> Mapping[str, Any]:
    """Return what all ranks load; empty for a checkpoint that is not distributed."""
    from megatron.core import dist_checkpointing

    try:
        if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
            return {}
        return dist_checkpointing.load_common_state_dict(str(path))
    except LOAD_ERRORS as error:
        raise load_failure(path, error) from error


def check_schedule(path: Path, manifest: Manifest, plan: ResumePlan, schedule: Schedule) -> None:
    """Refuse a warm-up that ends after the checkpoint of replicas in local training.

    Raises:
        UsageError: this run's warm-up is not over where the checkpoint was written.
    """
    if manifest.is_warmup:
        return
    least = min(entry.step for entry in plan.entries)
    if manifest.ledger is not None:  # a replica may have joined late, or made steps for lost ones
        least = -(-plan.consumed // manifest.batch)
    if schedule.warmup_steps is None:
        rule = "strategy ddp averages gradients of replicas that are equal; these train locally"
        raise UsageError(f"--load {path}", rule, "use the strategy that saved, or --finetune")
    if least < schedule.warmup_steps:
        raise UsageError(
            f"--edit-warmup-steps {schedule.warmup_steps}",
            f"the replicas of {path} have begun rounds, at step {least}",
            f"use {least} or less",
        )


def check_pending(
    path: Path, manifest: Manifest, plan: ResumePlan, settings: EngineSettings
) -> None:
    """Refuse other replicas or another strategy while syncs of the checkpoint have not landed.

    Raises:
        UsageError: this run cannot land them.
    """
    pending = [sync for entry in manifest.replicas for sync in entry.pending]
    if any((sync.due is None) != settings.landing.at_next_meeting for sync in pending):
        raise UsageError(
            f"--load {path}",
            f"strategy {manifest.strategy} had sent a round that has not landed yet",
            "resume with the same strategy, or load its checkpoint of the end of training",
        )
    names, num_fragments = manifest.units, settings.used.fragments
    fragments = [set(names[index::num_fragments]) for index in range(num_fragments)]
    if any(sync.due is None and set(sync.units) not in fragments for sync in pending):
        raise UsageError(
            f"--edit-fragments {num_fragments}",
            f"{path} has rounds that have not landed (co2), with other fragments",
            "use the number of fragments of the run that saved it",
        )
    if not plan.continues and not all(sync.is_stepped for sync in pending):
        raise UsageError(
            f"--load {path}",
            "a round had not landed yet (co2), and this run has other replicas or batches",
            f"resume with {manifest.num_replicas} replicas and the same batches, or load the "
            "checkpoint of the end of their training",
        )


def check_rounds(
    path: Path, manifest: Manifest, plan: ResumePlan, settings: EngineSettings
) -> None:
    """Refuse to switch between fixed and varying rounds while replicas are at different steps.

    Raises:
        UsageError: the round had a fixed length and has none now, or the reverse.
    """
    entries = manifest.replicas
    if settings.assigns_blocks or not plan.continues or len({e.step for e in entries}) == 1:
        return
    # Rounds of varying length keep a mean of the losses, which has no last step.
    was_varying = any(e.losses and not e.last_loss_step for e in entries)
    if was_varying == settings.schedule.has_fixed_rounds:
        was = manifest.settings.get("interval", QSR if was_varying else FIXED)
        raise UsageError(
            f"--load {path}",
            "its replicas stopped at different steps of a round of another --edit-interval",
            f"resume with --edit-interval {was} until a checkpoint at a sync",
        )


def check_samples(path: Path, plan: ResumePlan, args: Namespace) -> None:
    """Refuse settings that cannot follow the order of samples left over from unequal stops.

    Raises:
        UsageError: there are such samples, and such a setting.
    """
    if not plan.order.displaced:
        return
    for name in ("rampup_batch_size", "step_batch_size_schedule", "iterations_to_skip"):
        if getattr(args, name, None):
            raise _left_behind(path, flag_of(name))
    if args.dataloader_type != "single":
        raise _left_behind(path, f"--dataloader-type {args.dataloader_type}")


def check_equal_steps(path: Path, step: int, args: Namespace) -> None:
    """Check that all steps so far had the present batch size: blocks are counted from sample 0.

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
        "be assigned again with it",
        "resume with the saved number of replicas until a checkpoint at a sync",
    )


# ---- Megatron's load, with its errors turned into one-line messages


# What Megatron's loads raise; torch's is not an `Exception`.
LOAD_ERRORS = (Exception, SystemExit, CheckpointException)


def call_megatron_load[R](load: Callable[[], R], path: Path | None, world: ReplicaWorld) -> R:
    """Call Megatron's load, which asserts, raises or exits with 0 on invalid checkpoints.

    Args:
        load: Megatron's.
        path: of the checkpoint; None if there is none.
        world: if global rank 0 fails, too, only it prints the message.

    Raises:
        UsageError: Megatron cannot load it.
    """
    try:
        with torch.no_grad():
            return load()
    except EditError:
        raise
    except LOAD_ERRORS as error:
        is_local = not world.is_announced_by_first_rank("load/failed")
        raise load_failure(path, error, is_local=is_local) from error


def load_failure(path: Path | None, error: BaseException, *, is_local: bool = False) -> UsageError:
    """Return one line for what Megatron raised.

    Args:
        path: of the checkpoint; None if there is none.
        error: one of `LOAD_ERRORS`.
        is_local: whether only this process reports it.
    """
    first = (str(error).strip().splitlines() or [""])[0]
    return UsageError(
        f"--load {'' if path is None else path}".rstrip(),
        f"Megatron cannot load it: {type(error).__name__} {first}".rstrip(),
        REMEDY,
        is_local=is_local,
    )
