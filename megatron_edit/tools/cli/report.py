"""Make an HTML page with plots from the event files of a run, also while it is running."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.errors import UsageError, on_one_line
from megatron_edit.tools.cli.common import check_installed, refuse_rest
from megatron_edit.tools.monitor.run import MonitoredRun, open_run
from megatron_edit.whole_files import write_whole

BAR_BYTES = 20e6  # less is read before a bar is seen


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("folder", type=Path, help="what --edit-log-dir named")
    parser.add_argument("--output", type=Path, help="the page (default: report.html in the folder)")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Read the folder and write the page.

    Raises:
        UsageError: there is no run in the folder, or the page cannot be written.
    """
    refuse_rest("report", rest)
    check_installed("matplotlib", "jinja2", "tqdm")
    from megatron_edit.tools.monitor.page import page_of

    output: Path = options.output or options.folder / "report.html"
    training = open_run(options.folder)
    target = _target_of(output)
    read_all(training)
    page = page_of(training)
    try:
        write_whole(target, page)
    except OSError as error:
        raise _unusable(output, f"cannot be written ({error.strerror})") from None
    for name, count in training.num_damaged.items():
        sys.stderr.write(f"megatron-edit report: {name}: {count} damaged lines left out\n")
    sys.stdout.write(on_one_line(f"page: {output}") + "\n")
    return 0


def read_all(training: MonitoredRun) -> None:
    """Read everything there is, with a progress bar where it is much."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = training.unread_bytes()
    pause = 0.2 if sys.stderr.isatty() else 20.0  # a bar in a file is one line per refresh
    with tqdm(
        total=total, desc="reading", unit="B", unit_scale=True, disable=total < BAR_BYTES,
        mininterval=pause, maxinterval=60,
    ) as bar:  # fmt: skip
        training.poll(bar.update)


def _target_of(output: Path) -> Path:
    """The file to write: the output, or what it is a link to, which stays a link.

    Raises:
        UsageError: a page cannot be there, or must not: the file is replaced, not written into, and
            what is no usual file (a device, a pipe) would be lost.
    """
    try:
        target = Path(os.path.realpath(output))
        is_there = output.exists() or target.is_symlink()  # links that lead to each other
        can_be_there = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unusable(output, f"is not the name of a file ({reason})") from None
    if (is_there and not output.is_file()) or not can_be_there:
        raise _unusable(output, "must be a file in a folder that can be written to")
    return target


def _unusable(output: Path, rule: str) -> UsageError:
    return UsageError(f"--output {output}", rule, "give another path")
