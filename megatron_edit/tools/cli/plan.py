"""Predict memory, bytes and speed of a training with replicas, before it is started."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.common import option
from megatron_edit.tools.compare.flags import read_flags_or_refuse
from megatron_edit.tools.plan.job import DEFAULT_NAMES, NAMES, Job, read_job
from megatron_edit.tools.plan.machine import CPU, GPU, MACHINES, Link
from megatron_edit.tools.plan.values import (
    LEAST,
    MOST,
    TrainingFlags,
    check_ranks,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

DEFAULT_MFU = 0.4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.usage = (
        "megatron-edit plan CONFIG [CONFIG ...] [ARGS] --replicas N --link 10Gbit "
        "(--step-time 2.5 | --gpu-tflops 312) [...]"
    )
    parser.allow_abbrev = False
    add = parser.add_argument
    add("config", nargs="+", help="files of flags (.args), before any flag; ARGS come after them")
    add("--replicas", type=int, help="N (default: --edit-num-replicas)")
    add("--world-size", type=int, help="ranks of all replicas (default: 8 per replica)")
    add("--ranks-per-host", type=int, help="ranks of a replica that share a host's link "
        "(default: 8, or all of a smaller replica)")  # fmt: skip
    add("--link", required=True, help="bandwidth of a host: 10Gbit, 100Mbit, 1.25GB")
    add("--latency", default="0", help="of the link: 1ms (default: %(default)s)")
    add("--step-time", help="time of a step without exchanges between replicas: 2.5, 350ms")
    add("--gpu-tflops", type=float, help="TFLOP/s of a device, to compute the time of a step")
    add("--mfu", type=float, default=DEFAULT_MFU, help="share of the TFLOP/s that a training "
        "reaches (default: %(default)g)")  # fmt: skip
    add("--forward-share", type=float, help="share of the forward pass in a step (default: 1/3, "
        "with full recomputation 1/4)")  # fmt: skip
    add("--device-memory", help="80GB, to check whether the training fits")
    add("--machine", choices=sorted(MACHINES), help="cost model of a rank (default: cpu with "
        "--edit-device cpu, else gpu)")  # fmt: skip
    add("--strategies", default=",".join(DEFAULT_NAMES), help=f"of {', '.join(NAMES)} (default: "
        "%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Print the plan.

    Raises:
        UsageError: an argument is invalid or missing.
    """
    # Imports torch, which other subcommands should not wait for.
    from megatron_edit.tools.plan.exchanges import TimingSetting
    from megatron_edit.tools.plan.plan import lines, make_plan

    argv = [word for name in options.config for word in _flags_of(name)] + list(rest)
    _check_numbers(options)
    job = read_job(
        argv,
        num_replicas=options.replicas,
        world_size=options.world_size,
        ranks_per_host=options.ranks_per_host,
    )
    machine = CPU if TrainingFlags(argv).text("--edit-device", "auto") == "cpu" else GPU
    if options.machine is not None:
        machine = MACHINES[options.machine]
    link = Link(
        parse_rate("--link", options.link), parse_seconds("--latency", options.latency, least=-1)
    )
    share = options.forward_share or (1 / 4 if job.recomputes else 1 / 3)
    setting = TimingSetting(link, machine, _step_seconds(options, job), share)
    text = options.device_memory
    memory = None if text is None else parse_bytes("--device-memory", text)
    names = [name.strip() for name in options.strategies.split(",")]
    plan = make_plan(job, setting, names, device_memory=memory)
    shown = json.dumps(plan.as_json(), indent=1) if options.json else "\n".join(lines(plan))
    sys.stdout.write(shown + "\n")
    return 0


def _flags_of(name: str) -> list[str]:
    remedy = "give .args files first, flags after them"
    return read_flags_or_refuse(Path(name), f"CONFIG {name}", remedy)


def _check_numbers(options: Namespace) -> None:
    for name in ("replicas", "world_size", "ranks_per_host"):
        value = getattr(options, name)
        if value is not None:
            check_ranks(option(name), value)
    for name, most in (("gpu_tflops", MOST), ("mfu", 1.0), ("forward_share", 1.0)):
        value = getattr(options, name)
        if value is not None and not LEAST <= value <= most:
            rule = f"must be from {LEAST:g} to {most:g}"
            raise UsageError(f"{option(name)} {value:g}", rule, "correct it, or leave it out")


def _step_seconds(options: Namespace, job: Job) -> float:
    if (options.step_time is None) == (options.gpu_tflops is None):
        raise UsageError(
            "--step-time, --gpu-tflops",
            "must be one of them",
            "give the seconds of a step, or the TFLOP/s of a device",
        )
    if options.step_time is not None:
        return parse_seconds("--step-time", options.step_time)
    rate = options.gpu_tflops * 1e12 * options.mfu * job.mesh.world_size
    seconds = job.flops_per_step / float(rate)
    if not LEAST <= seconds <= MOST:
        rule = f"gives a step of {seconds:.3g} s, which must be from {LEAST:g} to {MOST:g}"
        raise UsageError(f"--gpu-tflops {options.gpu_tflops:g}", rule, "correct it, or --mfu")
    return seconds
