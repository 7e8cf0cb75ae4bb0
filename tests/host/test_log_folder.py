"""Two runs that write into one folder of event files.

Would catch: a second run that moves the files of the first and mixes its lines with them, a rank
that trains while others are refused, a run refused because of the lock of a dead run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_edit.comm.worlds import SETUP_TIMEOUT
from megatron_edit.observe import folder_lock
from megatron_edit.observe.folder_lock import FolderLock
from tests.harness.launch import REPOSITORY
from tests.host.runs import run_edit

# Stands for another run: it holds the lock, and its helper process, like those that write
# checkpoints, outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_edit.observe.folder_lock import FolderLock
assert FolderLock(Path(sys.argv[1])).acquire() is None
if os.fork():
    print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of the folder, and its helper process."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def test_second_run_in_log_folder_is_refused(tmp_path: Path) -> None:
    """All ranks are refused, with one line, before any change in the folder."""
    (tmp_path / "replica-0.jsonl").write_text("of the first run")
    with another_run(tmp_path) as first:
        ranks = run_edit(tmp_path, 4, 2, check=False).result.ranks
    assert [rank.returncode for rank in ranks] == [2] * 4
    lines = [line for rank in ranks for line in rank.stderr.splitlines() if "megatron_edit" in line]
    assert lines == [
        f"megatron_edit: --edit-log-dir {tmp_path}: another run writes its event files there "
        f"(process {first.pid} on {socket.gethostname()}); give each run a folder of its own, or "
        "start this one when the other has ended"
    ]
    assert (tmp_path / "replica-0.jsonl").read_text() == "of the first run"
    assert not (tmp_path / "run.json").exists()


def test_lock_of_killed_run_is_released(tmp_path: Path) -> None:
    """The lock ends with the run, although a helper process of it is still alive."""
    with another_run(tmp_path) as first:
        first.kill()
        run = run_edit(tmp_path, 2, 2, train_iters=3)
    assert len(run.lines("loss.jsonl")) == 3


def test_lock_waits_for_ending_run(tmp_path: Path) -> None:
    """A lock that is released within a few seconds is taken."""
    with another_run(tmp_path) as first:
        os.system(f"(sleep 2; kill -9 {first.pid}) &")
        began = time.monotonic()
        lock = FolderLock(tmp_path)
        assert lock.acquire() is None
        lock.release()
    assert 1 < time.monotonic() - began < 10


def test_lock_waits_for_lease_of_other_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file server keeps a lock for a while after the machine failed. Would catch a run, requeued
    by SLURM, that exits because of it; all other ranks wait longer than the lease."""
    assert 120 < folder_lock.LEASE_SECONDS < SETUP_TIMEOUT.total_seconds()
    monkeypatch.setattr(folder_lock, "ENDING_SECONDS", 0.5)
    with another_run(tmp_path) as first:
        (tmp_path / "run.lock").write_text("node7 42\n")
        os.system(f"(sleep 2; kill -9 {first.pid}) &")
        lock = FolderLock(tmp_path)
        assert lock.acquire() is None
        lock.release()
    (message,) = capfd.readouterr().out.splitlines()
    assert "locked by process 42 on node7" in message and "waiting for the lock, 180 s" in message
    monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 1.5)
    with another_run(tmp_path):
        (tmp_path / "run.lock").write_text("node7 42\n")
        began = time.monotonic()
        refusal = FolderLock(tmp_path).acquire()
    assert time.monotonic() - began > 1.4
    assert refusal is not None and "(process 42 on node7)" in str(refusal)


def test_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run uses the folder without a lock, and a warning says so."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert FolderLock(tmp_path).acquire() is None
    message = capfd.readouterr().err
    assert f"{tmp_path}/run.lock cannot be locked (No locks available)" in message
