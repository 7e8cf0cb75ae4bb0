"""Make an HTML page with plots from the event files of one training, or of several."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.atomic_files import write_atomic
from megatron_edit.elastic.journal import FILE_NAME
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.observe.line_files import stat_or_none
from megatron_edit.tools.cli.words import check_installed, refuse_rest
from megatron_edit.tools.monitor.membership import HubJournal
from megatron_edit.tools.monitor.run import MonitoredRun, open_run

RUNS_PAGE = "runs.html"
BAR_BYTES = 20e6  # smaller files are read without a progress bar


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="RUN",
        help="the folder of --edit-log-dir; several runs are put side by side",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path,
        help=f"the page (default: report.html in the folder; of several runs {RUNS_PAGE} in the "
             "current folder)",
    )  # fmt: skip
    add_state_dir(parser)


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the journal of an elastic run."""
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR",
        help="of the hub of an elastic run: its journal has the leader, and why replicas left",
    )  # fmt: skip


def journal_of(options: Namespace) -> HubJournal | None:
    """Return the journal that the arguments name; None where they name none.

    Raises:
        UsageError: there is none.
    """
    folder: Path | None = options.state_dir
    if folder is None:
        return None
    found = stat_or_none(folder / FILE_NAME)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UsageError(
            f"--state-dir {folder}", f"holds no {FILE_NAME}", "give --state-dir of the hub"
        )
    return HubJournal(folder)


def check_elastic(training: MonitoredRun) -> None:
    """Check that a run whose journal is given is elastic, once it has begun.

    Raises:
        UsageError: it has no hub.
    """
    if training.journal is not None and training.has_begun and not training.is_elastic:
        raise UsageError("--state-dir", "is of no use: this run has no hub", "leave it out")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Read the folder and write the page.

    Raises:
        UsageError: there is no run in the folder, or the page cannot be written.
    """
    refuse_rest("report", rest)
    check_installed("matplotlib", "jinja2", "tqdm")
    folders: list[Path] = options.folders
    is_single = len(folders) == 1
    if not is_single and options.state_dir is not None:
        raise UsageError("--state-dir", "belongs to a single run", "leave it out, or name one run")
    output: Path = options.output or (folders[0] / "report.html" if is_single else Path(RUNS_PAGE))
    trainings = [open_run(folder, journal_of(options)) for folder in folders]
    target = _target_of(output)
    for training in trainings:
        read_all(training)
        check_elastic(training)
    from megatron_edit.tools.monitor.page import Runs

    runs = Runs.of(trainings)
    try:
        write_atomic(target, runs.page().html())
    except OSError as error:
        raise _unusable(output, f"cannot be written ({error.strerror})") from None
    for training in trainings:
        for name, count in training.num_damaged.items():
            where = name if is_single else training.folder / name
            sys.stderr.write(
                to_one_line(f"megatron-edit report: {where}: {count} damaged lines left out") + "\n"
            )
    summary = "" if is_single else runs.markdown() + "\n\n"
    sys.stdout.write(summary + to_one_line(f"page: {output}") + "\n")
    return 0


def read_all(training: MonitoredRun) -> None:
    """Read all event files, with a progress bar if they are large."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = training.unread_bytes()
    pause = 0.2 if sys.stderr.isatty() else 20.0  # in a file, each refresh is a line
    with tqdm(
        total=total, desc="reading", unit="B", unit_scale=True, disable=total < BAR_BYTES,
        mininterval=pause, maxinterval=60,
    ) as bar:  # fmt: skip
        training.poll(bar.update)


def _target_of(output: Path) -> Path:
    """Return the file to write: the output, or the target of a symbolic link, which is kept.

    Raises:
        UsageError: no file can be written there, or it is not a regular file (a device, a pipe),
            which would be replaced.
    """
    try:
        target = Path(os.path.realpath(output))
        is_there = output.exists() or target.is_symlink()  # a cycle of links
        can_be_there = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        reason = error.strerror if isinstance(error, OSError) else error
        raise _unusable(output, f"is not the name of a file ({reason})") from None
    if (is_there and not output.is_file()) or not can_be_there:
        raise _unusable(output, "must be a file in a folder that can be written to")
    return target


def _unusable(output: Path, rule: str) -> UsageError:
    return UsageError(f"--output {output}", rule, "give another path")
