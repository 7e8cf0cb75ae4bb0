"""Follow a run in the terminal, from its event files."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.report import add_state_dir, journal_of
from megatron_edit.tools.cli.words import check_installed, refuse_rest
from megatron_edit.tools.monitor.files import check_folder
from megatron_edit.tools.monitor.run import MonitoredRun

SECONDS = 2.0


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    add = parser.add_argument
    add("folder", type=Path, help="the folder of --edit-log-dir; it need not exist yet")
    add("--once", action="store_true", help="show one frame and exit (the default if the output "
        "is not a terminal)")  # fmt: skip
    add("--seconds", type=float, default=SECONDS, help="between two frames (default: %(default)g)")
    add_state_dir(parser)


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Show frames until the training has ended, or Ctrl-C is pressed; return 0 in both cases.

    Raises:
        UsageError: the folder is a file, contains no run, or cannot be read.
    """
    refuse_rest("watch", rest)
    if not options.seconds > 0:
        raise UsageError(f"--seconds {options.seconds:g}", "must be above 0", "leave it out")
    check_folder(options.folder, may_be_missing=True)
    check_installed("rich")
    try:
        _watch(options)
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(options: Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from megatron_edit.tools.monitor.watch import render_frame

    training = MonitoredRun(options.folder, journal_of(options))
    training.poll()
    console = Console()
    if options.once or not console.is_terminal or training.is_over:
        # A file has no width of its own.
        console = console if console.is_terminal else Console(width=120, file=sys.stdout)
        console.print(render_frame(training))
        return
    first = render_frame(training)
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        is_over = False
        while not is_over:  # once more after the end: the last losses follow the last iteration
            is_over = training.is_over
            time.sleep(options.seconds)
            training.poll()
            live.update(render_frame(training), refresh=True)
