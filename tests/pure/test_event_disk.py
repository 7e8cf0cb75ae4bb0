"""Event files on a disk that is full, fills up in the middle of a line, or disappears.

Would catch: a disk error that ends a training, a partial line joined with the next, lines that are
lost although there is room again, lost lines that are not reported.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.comm.placement import Placement
from megatron_edit.observe import line_files
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.line_files import LineWriter
from megatron_edit.observe.records import Iteration
from tests.harness.disk import fill_disk


def log_in(folder: Path, replica: int = 0) -> EventLog:
    """Return the event log of a run that begins."""
    log = EventLog(folder, Placement(2, replica, 1, 0, is_single_launch=True))
    log.begin({"config": {}})
    return log


def step(log: EventLog, iteration: int) -> None:
    """Log one iteration."""
    log.on_iteration(Iteration(iteration, iteration, 3.0, 1.0, 1e-3, 8, 8 * iteration, 1024, 0.1))


def iterations_in(path: Path) -> list[int]:
    """Return the iterations of all lines, which must be complete."""
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_lines_are_kept_while_disk_is_full(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is one warning, and in the end all lines are complete."""
    log = log_in(small_disk / "log")
    step(log, 1)
    filler = fill_disk(small_disk)
    last = 200  # more than fits into the last page of the file
    for iteration in range(2, last):
        step(log, iteration)
    path = small_disk / "log" / "replica-0.jsonl"
    assert path.read_bytes().endswith(b"}\n")
    assert len(iterations_in(path)) < last - 1
    filler.unlink()
    step(log, last)
    log.close()
    assert iterations_in(path) == list(range(1, last + 1))
    assert capfd.readouterr().err.count("\n") == 1


def test_run_can_start_on_full_disk(small_disk: Path) -> None:
    """Files of an earlier run are renamed, and not written to."""
    first = log_in(small_disk)
    step(first, 1)
    first.close()
    filler = fill_disk(small_disk)
    log = log_in(small_disk)
    step(log, 7)
    filler.unlink()
    step(log, 8)
    log.close()
    assert iterations_in(small_disk / "replica-0.1.jsonl") == [1]
    assert iterations_in(small_disk / "replica-0.jsonl") == [7, 8]
    assert json.loads((small_disk / "run.json").read_text()) == {"config": {}}


@pytest.mark.parametrize("replica", [0, 1])
def test_removed_folder_is_created_again(tmp_path: Path, replica: int) -> None:
    """Also `run.json`, which readers require."""
    folder = tmp_path / "log"
    log = log_in(make_folder(folder), replica)
    step(log, 1)
    shutil.rmtree(folder)
    step(log, 2)
    assert iterations_in(folder / f"replica-{replica}.jsonl") == [2]
    assert (folder / "run.json").exists() == (replica == 0)
    log.close()


def make_folder(path: Path) -> Path:
    """Create a folder, as is done with `--edit-log-dir` before training."""
    path.mkdir(parents=True)
    return path


def test_lost_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines that exceed the buffer, and lines still buffered at the end."""
    folder = make_folder(tmp_path / "log")
    log = log_in(folder)
    monkeypatch.setattr(line_files, "MAX_WAITING_BYTES", 300)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    for iteration in range(1, 6):
        step(log, iteration)
    assert log.num_lost == 5
    log.close()
    log.close()
    first, last = capfd.readouterr().err.splitlines()
    assert f"event files in {folder} cannot be written" in first
    assert last.endswith(f"5 lines of event files in {folder} were lost")


class _BrokenDisk:
    """`os.write` that stops in the middle of a line, and `os.ftruncate` that fails."""

    def __init__(self) -> None:
        self.room = 10**9
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        """Write as many bytes as there is room for."""
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written

    def ftruncate(self, *_: Any) -> None:
        """Fail to truncate the file."""
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("can_truncate", [True, False])
def test_partial_line_is_never_joined_with_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_truncate: bool
) -> None:
    """It is truncated; if that fails, the next line begins on a new line."""
    broken = _BrokenDisk()
    monkeypatch.setattr(os, "write", broken.write)
    if not can_truncate:
        monkeypatch.setattr(os, "ftruncate", broken.ftruncate)
    path = tmp_path / "x.jsonl"
    writer = LineWriter(path)
    writer.append({"n": 1})
    writer.flush()
    broken.room = 4
    writer.append({"n": 2})
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    broken.room = 10**9
    writer.append({"n": 3})
    writer.close()
    partial = [] if can_truncate else ['{"n"']
    assert path.read_text().splitlines() == ['{"n": 1}', *partial, '{"n": 2}', '{"n": 3}']
