"""The thread that polls for stops, which must end before the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import torch.distributed as dist

from megatron_edit.comm.heartbeat import NO_PROGRESS, HeartbeatMonitor
from megatron_edit.comm.stop import StopBoard

POLL_WITHOUT_PAUSE = """
import time
import torch.distributed as dist
from megatron_edit.comm.heartbeat import NO_PROGRESS, HeartbeatMonitor
from megatron_edit.comm.stop import StopBoard
heartbeats = [HeartbeatMonitor(0, 1, lambda: NO_PROGRESS, is_reporting=True) for _ in range(4)]
store = dist.TCPStore("127.0.0.1", 0, 1, True)
boards = [StopBoard(store, heartbeat, is_watching=True, poll_seconds=0) for heartbeat in heartbeats]
time.sleep(0.2)
for board in boards:
    board.close()
"""


def test_process_can_exit_while_the_stop_board_polls() -> None:
    """Would catch: a thread that the interpreter ends inside the store's C++ code. Without `close`
    each such process aborts, and about one run in some hundreds."""
    ended = subprocess.run(
        [sys.executable, "-c", POLL_WITHOUT_PAUSE], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_close_ends_the_stop_board_thread() -> None:
    """Whether it has seen a stop or not. `close` may be called twice."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    for is_stopped in (False, True):
        heartbeat = HeartbeatMonitor(0, 1, lambda: NO_PROGRESS, is_reporting=True)
        board = StopBoard(store, heartbeat, is_watching=True, poll_seconds=0.01)
        if is_stopped:
            board.announce()
        board.close()
        board.close()
        assert not any(thread.name == "edit-stop-board" for thread in threading.enumerate())
        assert board.is_seen == is_stopped


def test_announced_stop_is_seen_by_other_replicas() -> None:
    """Ranks that watch see it soon. Catches a replica that goes on alone, and one that stops
    without a request."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    heartbeats = [HeartbeatMonitor(r, 3, lambda: NO_PROGRESS, is_reporting=True) for r in range(3)]
    boards = [
        StopBoard(store, heartbeat, is_watching=replica < 2, poll_seconds=0.01)
        for replica, heartbeat in enumerate(heartbeats)
    ]
    time.sleep(0.1)
    assert not any(board.is_seen for board in boards)
    boards[0].announce()
    deadline = time.monotonic() + 5
    while not boards[1].is_seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [board.is_seen for board in boards] == [True, True, False]
    for board in boards:
        board.close()
