"""Predict memory, bytes and speed of a training with replicas, before it is started."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_edit.command_line import config_from_argv
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import (
    FLAGS,
    SHARED,
    SharedValues,
    TrainingCommand,
    add_shared_words,
    check_placement,
    placement_lines,
    places,
    ranks_by_host,
    refuse_removed,
)
from megatron_edit.tools.plan.job import NAMES, Job, read_job
from megatron_edit.tools.plan.values import check_number

DEFAULT_NAMES, DEFAULT_MFU = "edit,diloco,ddp,stock", 0.4
REMOVED = ("--machine", "--forward-share")  # they would be taken for flags of the training


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.usage = (
        "megatron-edit plan [SCRIPT] [FILE.args ...] [ARGS] --replicas N --link 10Gbit "
        "(--step-time 2.5 | --gpu-tflops 312) [...]"
    )
    parser.description = (
        f"{parser.description or __doc__} SCRIPT is accepted as by check, and not read; files of "
        "flags come before all flags."
    )
    add_shared_words(parser, SHARED, ranks="8 per replica")
    add = parser.add_argument
    add("--ranks-per-host", type=int, help="ranks of a replica that share a host's link "
        "(default: 8, or all of a smaller replica)")  # fmt: skip
    add("--mfu", type=float, default=DEFAULT_MFU, help="share of the TFLOP/s that a training "
        "reaches (default: %(default)g)")  # fmt: skip
    add("--strategies", default=DEFAULT_NAMES, help=f"of {', '.join(NAMES)} (default: "
        "%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Print the plan.

    Raises:
        UsageError: an argument is invalid or missing.
    """
    # Imports torch, which other subcommands should not wait for.
    from megatron_edit.tools.plan.costs import CPU, GPU, Link, TimingSetting, cut_lines
    from megatron_edit.tools.plan.plan import lines, make_plan

    values = SharedValues.of(options)
    if values.link is None:
        raise UsageError("--link (not given)", "is needed for a plan", "add --link 10Gbit")
    check_number("--mfu", options.mfu, most=1.0)
    command = TrainingCommand.of(rest, others=FLAGS)
    refuse_removed("plan", command.argv, REMOVED)
    num_replicas, world_size, counts = _ranks(options, values, command)
    most = max((num for hosts in counts for num in hosts.values()), default=None)
    job = read_job(
        command.argv,
        num_replicas=num_replicas,
        world_size=world_size,
        ranks_per_host=most if options.ranks_per_host is None else options.ranks_per_host,
    )
    setting = TimingSetting(
        Link(values.link, values.latency),
        CPU if job.words.text("--edit-device", "auto") == "cpu" else GPU,
        _step_seconds(values, options.mfu, job),
        forward_share=1 / 4 if job.recomputes else 1 / 3,
    )
    names = [name.strip() for name in options.strategies.split(",")]
    plan = make_plan(job, setting, names, device_memory=values.memory)
    config = job.config("edit")
    text = [*placement_lines(counts), *cut_lines(job, config, places(config, counts)), *lines(plan)]
    shown = json.dumps(plan.as_json(), indent=1) if options.json else "\n".join(text)
    sys.stdout.write(shown + "\n")
    return 0


def _ranks(
    options: Namespace, values: SharedValues, command: TrainingCommand
) -> tuple[int | None, int | None, list[dict[str, int]]]:
    """Return the replicas, and the ranks of all of them; None where they are not given.

    Also returns the ranks of each replica by host, with `--hosts`.
    """
    command.check_replicas(options.replicas)
    config = config_from_argv(command.argv)
    num_replicas = options.replicas or config.num_replicas or config.nominal_replicas
    hosts = values.hosts_of(config)
    world_size = options.world_size if hosts is None else len(hosts)
    is_launch_of_one = config.replica_id is not None or config.hub is not None
    if is_launch_of_one and world_size is not None and num_replicas is not None:
        world_size *= num_replicas
    counts = list[dict[str, int]]()
    if num_replicas is not None and not is_launch_of_one:
        check_placement(config, num_replicas)
        if hosts is not None and len(hosts) % num_replicas == 0:
            counts = ranks_by_host(config, hosts, num_replicas)
    return num_replicas, world_size, counts


def _step_seconds(values: SharedValues, mfu: float, job: Job) -> float:
    if values.step is not None and values.tflops is None:
        return values.step
    if values.tflops is not None and values.step is None:
        return job.flops_per_step / (values.tflops * 1e12 * mfu * job.mesh.world_size)
    raise UsageError(
        "--step-time, --gpu-tflops",
        "must be one of them",
        "give the seconds of a step, or the TFLOP/s of a device",
    )
