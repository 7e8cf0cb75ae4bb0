"""Event files on a disk that is full, fills up in the middle of a line, or vanishes.

Would catch: an error of the disk that ends a training, half a line joined with the next, lines that
are lost although there is room again, a loss that nobody is told of.
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
    """Of a run that begins."""
    log = EventLog(folder, Placement(2, replica, 1, 0, is_single_launch=True))
    log.begin({"config": {}})
    return log


def step(log: EventLog, iteration: int) -> None:
    """One iteration."""
    log.on_iteration(Iteration(iteration, iteration, 3.0, 1.0, 1e-3, 8, 8 * iteration, 1024, 0.1))


def iterations_in(path: Path) -> list[int]:
    """Of all lines, each of which is whole."""
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_lines_wait_while_a_disk_is_full(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is one warning, and all lines are there in the end, each as a whole."""
    log = log_in(small_disk / "log")
    step(log, 1)
    filler = fill_disk(small_disk)
    last = 200  # more than the rest of the page that the file has
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


def test_a_run_that_begins_on_a_full_disk(small_disk: Path) -> None:
    """An earlier run's files are moved all the same, and nothing is written among them."""
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
def test_a_folder_that_vanishes_is_made_again(tmp_path: Path, replica: int) -> None:
    """With `run.json`, without which nothing reads it."""
    folder = tmp_path / "log"
    log = log_in(folder_of(folder), replica)
    step(log, 1)
    shutil.rmtree(folder)
    step(log, 2)
    assert iterations_in(folder / f"replica-{replica}.jsonl") == [2]
    assert (folder / "run.json").exists() == (replica == 0)
    log.close()


def folder_of(path: Path) -> Path:
    """Made, as `--edit-log-dir` is before training."""
    path.mkdir(parents=True)
    return path


def test_lost_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that waited too long, and those that still wait at the end."""
    folder = folder_of(tmp_path / "log")
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
    """`os.write` that stops in the middle of a line, on a file that cannot be cut, either."""

    def __init__(self) -> None:
        self.room = 10**9
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        """Write as much as there is room for."""
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written

    def ftruncate(self, *_: Any) -> None:
        """Fail, too."""
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("can_cut", [True, False])
def test_half_a_line_is_never_joined_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_cut: bool
) -> None:
    """It is taken back, or where that fails, too, the next line begins on a line of its own."""
    broken = _BrokenDisk()
    monkeypatch.setattr(os, "write", broken.write)
    if not can_cut:
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
    half = [] if can_cut else ['{"n"']
    assert path.read_text().splitlines() == ['{"n": 1}', *half, '{"n": 2}', '{"n": 3}']
