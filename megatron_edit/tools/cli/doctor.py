"""Check this machine and, under torchrun, measure the links between the replicas."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.command_line import config_from_argv
from megatron_edit.constants import GRACE_SECONDS
from megatron_edit.errors import EditError, UsageError
from megatron_edit.flags import USE_EDIT, flag
from megatron_edit.tools.cli.words import (
    SharedValues,
    TrainingCommand,
    add_shared_words,
    refuse_removed,
)
from megatron_edit.tools.plan.values import check_ranks

FOUND_BAD = 1
OWN = ("--shared-dir", "--json")
# They would be taken for flags of the training.
REMOVED = ("--parameters", "--step-seconds", "--hub", "--token-file", "--megatron", "--no-host")
# Of a training's flags these matter; the others are accepted, so that its command line can be used.
_USED = tuple(map(flag, ("num_replicas", "placement", "replica_id", "rendezvous", "device")))


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.usage = "megatron-edit doctor [SCRIPT] [FILE.args ...] [ARGS] [...]"
    parser.description = (
        f"{parser.description or __doc__} Of a training's flags {', '.join(_USED)} are used."
    )
    add_shared_words(parser, ())
    parser.add_argument("--shared-dir", metavar="DIR", help="a folder to be visible to all ranks")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Check, measure and print; return 1 if a training could not run.

    Raises:
        UsageError: invalid arguments, or an unusable launch.
    """
    try:
        return _run(options, rest)
    except EditError as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        time.sleep(GRACE_SECONDS)  # torchrun ends all ranks when one exits: rank 0 must print first
        if isinstance(error, UsageError) and not error.is_local:
            return error.exit_code
        raise


def _run(options: Namespace, rest: Sequence[str]) -> int:
    command = TrainingCommand.of(rest).with_replicas(options.replicas)
    refuse_removed("doctor", command.argv, REMOVED, own=OWN)
    config = config_from_argv([USE_EDIT, *command.argv])
    SharedValues.of(options)  # those of the other commands must be valid, too
    if options.world_size is not None:
        check_ranks("--world-size", options.world_size)
    from megatron_edit.tools.doctor import machine  # torch
    from megatron_edit.tools.doctor.launch import examine, placement_of

    placement = placement_of(config, os.environ)
    is_first = placement is None or placement.global_rank == 0
    folder = None if options.shared_dir is None else Path(options.shared_dir)
    if folder is not None and is_first and not folder.is_dir():
        rule = "is not a folder on this machine"
        raise UsageError(f"--shared-dir {folder}", rule, "give one that is")
    # Before the measurements, as it is slow: rank 0 must report failures before others exit.
    here = list(machine.local_findings(os.environ)) if is_first else []
    report = examine(config, placement, folder)
    if not is_first:
        return 0  # global rank 0 prints the report
    # After a launch of several machines has chosen gloo's interface.
    findings = [*here, *machine.interface_findings(os.environ), *report.findings]
    if options.json:
        lines = [dataclasses.asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps({**report.numbers, "findings": lines}, indent=1) + "\n")
    else:
        sys.stdout.write(machine.table(findings))
    return FOUND_BAD if any(each.level is machine.Level.BAD for each in findings) else 0
