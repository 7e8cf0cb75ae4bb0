"""Runs one training of the quickstart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.tools.compare.readings import RunLog
from megatron_edit.tools.compare.runs import (
    RunFailedError,
    environment_of_ranks,
    follow,
    torchrun_line,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def launch_line(flags: Sequence[str], *, num_ranks: int) -> list[str]:
    """Return the command that starts `num_ranks` local ranks with this environment's torchrun."""
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    return [*torchrun_line(num_ranks), "-m", "megatron_edit", script, *flags]


def train(name: str, flags: Sequence[str], *, num_ranks: int, log_path: Path) -> RunLog:
    """Run a training to its end.

    Raises:
        RunFailedError: it failed; the end of its output has been printed.
    """
    try:
        return follow(
            name,
            launch_line(flags, num_ranks=num_ranks),
            log_path=log_path,
            environment=environment_of_ranks(num_ranks),
            cwd=REPOSITORY,
        )
    except RunFailedError as error:
        sys.stderr.writelines(error.tail)
        raise
