"""The launcher: ``torchrun ... -m megatron_edit SCRIPT [Megatron's arguments] --use-edit``.

Attaches the plugin and runs SCRIPT as `python SCRIPT` would. Without `--use-edit` the script runs
as stock Megatron.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.command_line import (
    USAGE,
    config_from_argv,
    has_help_flag,
    help_text,
    training_script,
)
from megatron_edit.config import EditConfig
from megatron_edit.constants import AUTO, GRACE_SECONDS
from megatron_edit.errors import EditError, UsageError
from megatron_edit.launched import launched


def main(argv: Sequence[str]) -> int:
    """Run a training script under the plugin.

    Args:
        argv: SCRIPT and its arguments.

    Returns:
        The exit code, unless the script itself exits.
    """
    is_first = is_first_rank()
    if has_help_flag(argv):
        if is_first:
            sys.stdout.write(help_text())
        return 0
    try:
        script, config = _read(argv)
        _run(script, list(argv[1:]), config)
    except EditError as error:
        return refuse(error, is_first=is_first)
    return 0


def is_first_rank() -> bool:
    """Whether this is rank 0 of the launch, or a single process."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _read(argv: Sequence[str]) -> tuple[Path, EditConfig]:
    if not argv or argv[0].startswith("-"):
        raise UsageError("SCRIPT (not given)", "a training script must come first", USAGE)
    return training_script(argv[0]), config_from_argv(argv[1:])


def _run(script: Path, arguments: list[str], config: EditConfig) -> None:
    # Before Megatron is imported: a clone next to the script must win over an installed wheel.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    from megatron_edit.host.attach import Attachment
    from megatron_edit.host.devices import choose_device
    from megatron_edit.observe.console import name_replica_in_tracebacks, say

    device = choose_device(config)
    if os.environ.get("RANK", "0") == "0" and config.device == AUTO:
        say(f"device {device.type} (auto)")
    attachment = Attachment(config, device)
    try:
        with attachment:
            try:
                with launched():
                    runpy.run_path(str(script), run_name="__main__")
            except SystemExit as stop:  # Megatron's loop also ends early by it, with code 0
                if stop.code:
                    raise
            else:
                attachment.check_model_was_built()
    except Exception:
        if attachment.placement is not None:
            name_replica_in_tracebacks(attachment.placement.replica, attachment.placement.rank)
        raise
    if device.type == "cpu":
        _destroy_process_groups()


def _destroy_process_groups() -> None:
    """Join gloo's threads: without this the exiting process may abort (exit code -6)."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def refuse(error: EditError, *, is_first: bool) -> int:
    """Print the error and return its exit code; only the first rank prints a global `UsageError`.

    The other ranks wait before they exit: torchrun kills all ranks when one exits, and the first
    rank must have printed the message by then.
    """
    sys.stdout.flush()
    if isinstance(error, UsageError) and not is_first:
        time.sleep(GRACE_SECONDS)
        if not error.is_local:
            return error.exit_code
    sys.stderr.write(f"megatron_edit: {error}\n")
    sys.stderr.flush()
    return error.exit_code
