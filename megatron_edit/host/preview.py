"""Checks for `megatron-edit check`, without a launch, whether a checkpoint could be loaded.

Makes the same checks as a launch, except for the checksums of files and the shapes of tensors.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace

from megatron_edit.checkpoint.files import REMEDY, check_sizes
from megatron_edit.checkpoint.folder import FoundCheckpoint
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.config import EditConfig
from megatron_edit.constants import OVERLAP
from megatron_edit.engine import EngineSettings
from megatron_edit.errors import UsageError
from megatron_edit.host.batch_stages import check_stages, num_iterations
from megatron_edit.host.checkpoint.choosing import (
    Choice,
    check_manifest,
    check_same_model,
    find,
    model_of,
)
from megatron_edit.host.checkpoint.loading import (
    as_chosen,
    as_saved,
    checked_plan,
    dropped_state,
    resuming_run,
)
from megatron_edit.host.checkpoint.refusals import (
    check_pending,
    check_rates,
    check_rounds,
    check_samples,
    check_schedule,
    parameters_only,
)
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.method.schedule import last_local

STRICT = "assume_ok_unexpected"  # Megatron's default of --dist-ckpt-strictness


def check_load(args: Namespace, config: EditConfig, sync_mode: str | None) -> str | None:
    """Refuse a `--load` that a launch would refuse.

    Args:
        args: Megatron's validated arguments.
        sync_mode: resolved `--edit-sync-mode`; None for a run of stock Megatron.

    Returns:
        Description of what would be loaded; None without `--load`.

    Raises:
        UsageError: the checkpoint cannot be loaded.
    """
    if not args.load:
        return None
    try:
        found = find(args, repairs=False, is_stock=sync_mode is None)
        if sync_mode is not None and (found is None or args.finetune):
            check_stages(args, args.data_parallel_size)
        if found is None:
            return f"{args.load} has no checkpoint: training starts from step 0"
        manifest = None
        if found.has_manifest and sync_mode is not None:
            manifest = _checked_manifest(found, args, config, sync_mode)
        else:
            _check_stock(found.path, args)
        check_rates(found.path, args, _schedule_state(args))
    except OSError as error:
        raise UsageError(
            f"--load {args.load}", f"cannot be used ({error.strerror}: {error.filename})", REMEDY
        ) from error
    if flag := parameters_only(args):
        return dropped_state(Choice(found.path, found.iteration, manifest), flag)
    return f"{found.path} (model and file sizes compared; checksums are left to the launch)"


def _schedule_state(args: Namespace) -> Mapping[str, object]:
    """Return the state of the learning-rate schedule that Megatron would make."""
    from megatron.training import global_vars, training

    patcher = Patcher("the host")
    try:
        patcher.replace(global_vars, "_GLOBAL_ARGS", copy(args))
        patcher.replace(training, "update_train_iters", lambda args: None)  # for the loop only
        schedule = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
        return schedule.state_dict()
    finally:
        patcher.undo()


def _checked_manifest(
    found: FoundCheckpoint, args: Namespace, config: EditConfig, sync_mode: str
) -> Manifest:
    manifest = read_manifest(found.path)
    check_manifest(found.path, manifest, args)
    check_sizes(found.path, manifest.files)
    if not parameters_only(args):
        _check_resume(found.path, manifest, args, config, sync_mode)
    return manifest


def _check_resume(
    path: Path, manifest: Manifest, args: Namespace, config: EditConfig, sync_mode: str
) -> None:
    """Check that this run's settings are compatible with the saved rounds."""
    iterations = num_iterations(args)
    config = as_chosen(as_saved(config, manifest), manifest)
    last = last_local(iterations, config.averaged_fraction)
    run = resuming_run(config, config.nominal_replicas or config.num_replicas or 1, args, last)
    plan = checked_plan(path, manifest, run, config.warmup_steps)
    settings = EngineSettings(config, sync_mode == OVERLAP, last * run.num_replicas, last)
    check_schedule(path, manifest, plan, settings.schedule)
    check_samples(path, plan, args)
    check_pending(path, manifest, plan, settings)
    check_rounds(path, manifest, plan, settings)
    check_stages(args, args.data_parallel_size, plan.consumed)


def _check_stock(path: Path, args: Namespace) -> None:
    """Check a checkpoint of stock Megatron by the arguments saved in its common state."""
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        return  # the legacy format: a pickled file per rank
    if args.dist_ckpt_strictness != STRICT:
        return  # the user allows keys to be missing
    try:
        saved = dist_checkpointing.load_common_state_dict(str(path)).get("args")
    except Exception as error:
        rule = f"Megatron cannot load it: {type(error).__name__} {error}"
        raise UsageError(f"--load {path}", rule, REMEDY) from error
    if isinstance(saved, Namespace):
        model = model_of(saved)
        model.pop("optimizer", None)
        check_same_model(path, model, args)
