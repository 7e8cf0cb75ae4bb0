"""Validate a training command without launching it; exit code 2 where it would not start."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_edit.comm.placement import place
from megatron_edit.command_line import config_from_argv, training_script
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

if TYPE_CHECKING:
    from megatron_edit.host.checking import CheckedLine


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.description = (
        f"{parser.description or __doc__} A script whose text names megatron is run up to where "
        "its ranks would meet; one that never gets there, as tools/preprocess_data.py, runs to its "
        "end."
    )
    parser.usage = "megatron-edit check SCRIPT ARGS --world-size W"
    parser.add_argument("script", help="the training script, as given to the launcher")
    parser.add_argument(
        "--world-size", type=int, help="ranks of the launch (default: 1, a replica of one rank)"
    )


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Check `rest`, the arguments of the training script.

    Raises:
        UsageError: the command would not start.
    """
    script = training_script(options.script)
    config = config_from_argv(rest)
    world_size = _world_size(options.world_size, config)
    checked = check_script(script, rest, config, world_size)
    from megatron_edit.tools.cli.what_runs import lines_on

    for line in lines_on(checked, config, world_size):
        sys.stdout.write(f"{line}\n")
    return 0


def _world_size(given: int | None, config: EditConfig) -> int:
    """Ranks of the launch; 1 where nobody says, which is right for a replica of a single rank."""
    if given is not None:
        if given < 1:
            raise UsageError(
                f"--world-size {given}", "must be at least 1", "give the launch's ranks"
            )
        return given
    if config.use_edit and config.replica_id is None and (config.num_replicas or 1) > 1:
        raise UsageError(
            "--world-size (not given)",
            f"must be given to a check of {config.num_replicas} replicas in one launch",
            f"add --world-size W, the ranks of the launch: a multiple of {config.num_replicas}",
        )
    return 1


def check_script(
    script: Path, words: Sequence[str], config: EditConfig, world_size: int
) -> CheckedLine:
    """Check the arguments of a training script as a launch would. Imports Megatron.

    Args:
        script: of the training.
        words: its arguments.
        config: what they say of EDiT.
        world_size: ranks of the launch.

    Returns:
        What would run.

    Raises:
        UsageError: the command would not start.
    """
    if config.use_edit and config.num_replicas is None:
        raise UsageError(
            f"{flag('num_replicas')} (not given)",
            "must be given to a check, which does not see the nodes of the launch",
            f"add {flag('num_replicas')} N: where the launch has several nodes, their number",
        )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(world_size)}
    placement = None
    if config.use_edit:
        placement = place(config.num_replicas, config.replica_id, environment)
    # The script's folder first, as in a launch: a clone must win over a wheel.
    folder = str(script.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from megatron_edit.host.checking import check_command_line

    return check_command_line(script, list(words), config, placement, world_size)
