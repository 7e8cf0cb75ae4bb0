"""Make an HTML page with plots from the event files of a run, also while it is running."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.cli.needs import check_installed
from megatron_edit.errors import UsageError
from megatron_edit.monitor.run import Run, open_run
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
    if rest:
        raise UsageError(" ".join(rest), "is no argument of report", "see report --help")
    check_installed("matplotlib", "jinja2", "tqdm")
    from megatron_edit.monitor.page import page_of

    output: Path = options.output or options.folder / "report.html"
    training = open_run(options.folder)
    _check_output(output)
    read_all(training)
    write_whole(output, page_of(training))
    for name, count in training.num_damaged.items():
        sys.stderr.write(f"megatron-edit report: {name}: {count} damaged lines left out\n")
    sys.stdout.write(f"page: {output}\n")
    return 0


def read_all(training: Run) -> None:
    """Read everything there is, with a progress bar where it is much."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = training.unread_bytes()
    pause = 0.2 if sys.stderr.isatty() else 20.0  # a bar in a file is one line per refresh
    with tqdm(
        total=total, desc="reading", unit="B", unit_scale=True, disable=total < BAR_BYTES,
        mininterval=pause, maxinterval=60,
    ) as bar:  # fmt: skip
        training.poll(bar.update)


def _check_output(output: Path) -> None:
    folder = output.parent
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"--output {output}", "must be a file in a folder that can be written to",
            "give another path",
        )  # fmt: skip
