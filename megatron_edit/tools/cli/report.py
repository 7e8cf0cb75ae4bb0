"""Make an HTML page with plots from the event files of one training, or of several."""

from __future__ import annotations

import os
import stat
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.atomic_files import write_atomic
from megatron_edit.elastic.journal import FILE_NAME
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.observe.line_files import stat_or_none
from megatron_edit.tools.cli.words import check_installed, refuse_rest
from megatron_edit.tools.monitor.files import check_folder
from megatron_edit.tools.monitor.membership import HubJournal
from megatron_edit.tools.monitor.run import MonitoredRun

RUNS_PAGE = "runs.html"


def configure(parser: ArgumentParser) -> None:
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


def add_state_dir(parser: ArgumentParser) -> None:
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


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Read the folder and write the page.

    Raises:
        UsageError: there is no run in the folder, or the page cannot be written.
    """
    refuse_rest("report", rest)
    check_installed("matplotlib", "jinja2")
    folders: list[Path] = options.folders
    is_single = len(folders) == 1
    if not is_single and options.state_dir is not None:
        raise UsageError("--state-dir", "belongs to a single run", "leave it out, or name one run")
    output: Path = options.output or (folders[0] / "report.html" if is_single else Path(RUNS_PAGE))
    trainings = [_read(folder, journal_of(options)) for folder in folders]
    from megatron_edit.tools.monitor.page import Runs

    runs = Runs.of(trainings)
    _write(output, runs.page().html())
    summary = "" if is_single else runs.markdown() + "\n\n"
    sys.stdout.write(summary + to_one_line(f"page: {output}") + "\n")
    return 0


def _read(folder: Path, journal: HubJournal | None) -> MonitoredRun:
    """Return the run in a folder.

    Raises:
        UsageError: the folder holds no run, or a file cannot be read.
    """
    check_folder(folder)
    training = MonitoredRun(folder, journal)
    training.poll()
    if not training.has_begun:
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return training


def _write(output: Path, page: str) -> None:
    """Write the page to a file, or to the target of a symbolic link, which is kept.

    Raises:
        UsageError: it cannot be written, or would replace a device or a pipe.
    """
    try:
        target = Path(os.path.realpath(output))
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise ValueError("must be a file")
        write_atomic(target, page)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        rule = f"cannot be written ({reason})"
        raise UsageError(f"--output {output}", rule, "give another path") from None
