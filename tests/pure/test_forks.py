"""Processes of `multiprocessing` after their rank was killed, without Megatron.

Would catch: a checkpoint writer that keeps the memory of a killed rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY

# A rank that spawns a process, which forks another one.
RANK = """
import multiprocessing, os, sys, time
from megatron_edit.host.attach import ForkWatch, watch_spawned
from megatron_edit.host.seams.patching import Patcher

def helper(pids):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    pids.put((os.getpid(), child.pid))
    time.sleep(60)

if __name__ == "__main__":
    watch, patcher = ForkWatch(), Patcher("the host")
    watch_spawned(patcher)
    context = multiprocessing.get_context("spawn")
    pids = context.Manager().Queue()
    process = context.Process(target=helper, args=(pids,))
    process.start()
    assert "_edit_watch" not in vars(process)
    patcher.undo()
    manager = [p.pid for p in multiprocessing.active_children() if p.pid != process.pid]
    print(*pids.get(), *manager, flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_spawned_processes_end_with_a_killed_rank(tmp_path: Path) -> None:
    """A spawned process, its forked child, and a manager process; they run as long as the rank."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) >= 3 and all(map(is_running, pids))
        time.sleep(3)  # longer than the polling interval
        assert all(map(is_running, pids))
        rank.kill()
        rank.wait(timeout=10)
        deadline = time.monotonic() + 10
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
    finally:
        for pid in [rank.pid, *pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
