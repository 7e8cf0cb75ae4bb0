"""Validate a training command without launching it; exit with 2 if it would not start."""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_edit.command_line import config_from_argv, training_script
from megatron_edit.config import EditConfig, phase_warning
from megatron_edit.constants import CPU, OVERLAP
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.method.schedule import last_local, schedule_of
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.cli import words
from megatron_edit.tools.cli.words import (
    SCRIPT,
    SharedValues,
    TrainingCommand,
    add_shared_words,
    search_megatron_as_launch,
)
from megatron_edit.tools.plan.values import TrainingFlags, check_ranks
from megatron_edit.versions import release_of

if TYPE_CHECKING:
    from megatron_edit.host.checking import CheckedLine


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.description = (
        f"{parser.description or __doc__} A script that mentions megatron is run until its "
        "ranks would connect; one that never does, such as tools/preprocess_data.py, runs to its "
        "end. Without SCRIPT, pretrain_gpt.py of the clone is run, if Megatron is one; otherwise "
        "the flags alone are checked. Files of flags come before all flags."
    )
    parser.usage = "megatron-edit check [SCRIPT] [FILE.args ...] [ARGS] --world-size W"
    add_shared_words(parser, ("--world-size", "--hosts"), ranks="1, a replica of one rank")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Check `rest`, the arguments of the training script.

    Raises:
        UsageError: the command would not start.
    """
    values = SharedValues.of(options)  # those that only plan uses must be valid, too
    command = TrainingCommand.of(rest, others=SCRIPT)
    given = command.script
    script = _script_of_clone() if given is None else training_script(given)
    command = command.with_replicas(options.replicas)
    if given is None and not command.argv:
        raise UsageError(
            "no training", "needs a script, a file of flags or flags", "see check --help"
        )
    config = config_from_argv(command.argv)
    hosts = values.hosts_of(config)
    if hosts is not None:
        options.world_size = len(hosts)
    world_size = _world_size(options.world_size, config)
    checked = check_script(script, command.argv, config, world_size)
    lines = list(_lines(checked, config, world_size))
    if given is None:
        what = "Megatron's and EDiT's flags are checked alone, no corpus (Megatron is no clone)"
        if script is not None:
            what = f"checked with Megatron's, {script}"
        lines.insert(1, f"no script is given: {what}")
    if script is not None and not checked.is_rehearsed:
        lines.append(
            "not checked: the script's own arguments (it is not Megatron's, or its ranks connect "
            "before it parses them)"
        )
    if checked.placement is not None:
        num_replicas = checked.placement.num_replicas
        words.check_placement(config, num_replicas)
        if hosts is not None:
            counts = words.ranks_by_host(config, hosts, num_replicas)
            _check_shared_hosts(TrainingFlags(command.argv), counts)
            lines += words.placement_lines(counts)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _check_shared_hosts(flags: TrainingFlags, counts: list[dict[str, int]]) -> None:
    """Check flags, of which some are off in a check on a machine without GPUs."""
    from megatron_edit.host.arguments import check_shared_hosts  # torch

    args = Namespace(
        tp_comm_overlap=flags.has("--tp-comm-overlap"),
        tensor_model_parallel_size=flags.count("--tensor-model-parallel-size", 1),
    )
    check_shared_hosts(args, counts, os.environ)


def _script_of_clone() -> Path | None:
    """Return `pretrain_gpt.py` of Megatron's clone; None where Megatron is a wheel, or missing."""
    search_megatron_as_launch(None)
    spec = importlib.util.find_spec("megatron")  # imports nothing
    places = () if spec is None else spec.submodule_search_locations or ()
    scripts = (Path(place).parent / "pretrain_gpt.py" for place in places)
    return next((script for script in scripts if script.is_file()), None)


def _world_size(given: int | None, config: EditConfig) -> int:
    """Return the ranks of the launch; 1 by default, for a replica of a single rank."""
    if given is not None:
        check_ranks("--world-size", given)
        return given
    if config.use_edit and config.replica_id is None and (config.num_replicas or 1) > 1:
        raise UsageError(
            "--world-size (not given)",
            f"must be given to a check of {config.num_replicas} replicas in one launch",
            f"add --world-size W, the ranks of the launch: a multiple of {config.num_replicas}",
        )
    return 1


def check_script(
    script: Path | None, words: Sequence[str], config: EditConfig, world_size: int
) -> CheckedLine:
    """Check the arguments of a training script as a launch would. Imports Megatron.

    Args:
        script: of the training; None checks the flags alone.
        config: EDiT's settings in them.

    Returns:
        The result of the check.

    Raises:
        UsageError: the command would not start.
    """
    if config.hub is not None:
        _check_hub_settings(config)
    elif config.use_edit and config.num_replicas is None:
        raise UsageError(
            f"{flag('num_replicas')} (not given)",
            "must be given to a check, which does not see the nodes of the launch",
            f"add {flag('num_replicas')} N: where the launch has several nodes, their number",
        )
    search_megatron_as_launch(None if script is None else script.parent)
    from megatron_edit.host.checking import check_command_line

    return check_command_line(script, list(words), config, world_size)


def _check_hub_settings(config: EditConfig) -> None:
    """Check what a replica of an elastic run checks before it connects to the hub.

    Raises:
        UsageError: the token cannot be used, or this torch cannot run elastic replicas.
    """
    from megatron_edit.comm.hub_store import check_torch  # torch
    from megatron_edit.elastic.channel import TOKEN_VARIABLE
    from megatron_edit.host.elastic import hub_of
    from megatron_edit.tools.cli.hub import is_loopback

    address = hub_of(config)
    if not address.token and not is_loopback(address.host):
        raise UsageError(
            f"{flag('hub')} {config.hub}",
            "without a token only a hub on this machine is used",
            f"give {flag('hub_token_file')} or {TOKEN_VARIABLE}",
        )
    check_torch()


def _lines(checked: CheckedLine, config: EditConfig, world_size: int) -> Iterator[str]:
    """Yield the lines of the report: the run, the checked inputs, and remarks.

    Args:
        config: EDiT's settings.
    """
    from megatron_edit.host.seams.probes import megatron_folder, megatron_version  # torch

    place, args = checked.placement, checked.args
    if place is None:
        yield f"ok: stock Megatron on {world_size} ranks"
    elif config.hub is not None:
        yield (
            f"ok: replica {config.replica_name} of an elastic run, which begins with "
            f"{place.num_replicas} replicas x {place.ranks_per_replica} ranks, strategy "
            f"{config.strategy}"
        )
    else:
        yield (
            f"ok: {place.num_replicas} replicas x {place.ranks_per_replica} ranks, "
            f"strategy {config.strategy}"
        )
    yield _batch(args, 1 if place is None else place.num_replicas, checked.data_parallel)
    if checked.sync_mode is not None:
        yield f"sync mode {checked.sync_mode} ({flag('sync_mode')} {config.sync_mode})"
    if config.hub is not None:
        yield (
            f"not checked: whether a hub answers at {config.hub}, and what it knows of the run: "
            "whether the name is free, the other replicas have the same settings, and its journal "
            "has the checkpoint"
        )
    if checked.corpus is not None:
        yield f"corpus: {checked.corpus}"
    if checked.checkpoint is not None:
        yield f"load: {checked.checkpoint}"
    version = megatron_version()
    yield f"megatron-core {version} in {megatron_folder()}, supported as {release_of(version).tag}"
    if checked.device == CPU:
        yield "checked as a run on CPU: this machine has no GPU, or --edit-device cpu is given"
    if place is not None:
        yield from _remarks(checked.config, args, checked.sync_mode == OVERLAP)
    if checked.unknown:
        yield f"not checked (unknown to Megatron): {' '.join(checked.unknown)}"


def _batch(args: Namespace, replicas: int, data_parallel: int) -> str:
    share = args.global_batch_size // replicas
    micro = share // (args.micro_batch_size * data_parallel)
    return (
        f"batch of a replica: {share} of {args.global_batch_size} samples a step, in {micro} "
        f"micro-batches of {args.micro_batch_size} on each of its {data_parallel} data-parallel "
        "ranks"
    )


def _remarks(config: EditConfig, args: Namespace, overlaps: bool) -> Iterator[str]:
    from megatron_edit.host.batch_stages import num_iterations  # torch

    iterations = num_iterations(args)
    if iterations and (text := phase_warning(config, iterations)):
        yield text
    if args.eval_iters and _is_mid_round(config, args.eval_interval, iterations):
        yield (
            f"--eval-interval {args.eval_interval}: falls in mid-round, where the validation loss "
            "is a mean over replicas that differ; evaluate after "
            f"W + k tau = {config.warmup_steps} + k x {config.sync_interval} steps"
        )
    if args.save and _is_mid_round(config, args.save_interval, iterations):
        yield (
            f"--save-interval {args.save_interval}: falls in mid-round; other numbers of replicas "
            "that load it complete that round first"
        )
    if overlaps and not args.ddp_bucket_size:
        yield (
            "--ddp-bucket-size is not given: where a bucket holds several layers, less of a sync "
            "hides behind compute; set it to the parameters of a layer"
        )


def _is_mid_round(config: EditConfig, interval: int | None, iterations: int) -> bool:
    """Whether a multiple of an interval after the warm-up is not at a sync."""
    strategy = STRATEGIES[config.strategy]
    # Elastic runs evaluate and save at commits.
    if strategy.is_timed or strategy.endless_warmup or config.hub is not None or config.auto:
        return False
    schedule = schedule_of(config, last_local(iterations, config.final_sync_fraction))
    if not interval or not schedule.has_fixed_rounds or config.fragments > 1:
        return False
    warmup, tau = config.warmup_steps, config.sync_interval
    # Of two multiples one is in mid-round; in a shorter training no interval may be better.
    is_long = warmup + 2 * max(tau, interval) <= iterations
    return is_long and (interval % tau, warmup % tau) != (0, 0)
