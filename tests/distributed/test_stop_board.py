"""The thread that polls for stops, which must end before the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm import stop
from megatron_edit.comm.collectives import Group
from megatron_edit.comm.heartbeat import NO_PROGRESS, HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.stop import StopBoard
from megatron_edit.comm.worlds import ReplicaWorld

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


class CountedClones:
    """A store that notes its clones."""

    def __init__(self, store: dist.Store, name: str, clones: list[str]) -> None:
        self._store, self._name, self._clones = store, name, clones

    def clone(self) -> dist.Store:
        """Connect again."""
        self._clones.append(self._name)
        return self._store.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


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


def test_the_board_connects_at_once() -> None:
    """Not when it first polls: the host of the store may just have ended then, and a connection is
    tried for minutes, for which `close` waits in vain."""
    clones = list[str]()
    store = CountedClones(dist.TCPStore("127.0.0.1", 0, 1, True), "shared", clones)
    heartbeat = HeartbeatMonitor(0, 1, lambda: NO_PROGRESS, is_reporting=True)
    board = StopBoard(store, heartbeat, is_watching=True, poll_seconds=60.0)
    assert clones == ["shared"]
    board.close()


def test_only_the_first_close_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a request that the store does not answer."""
    monkeypatch.setattr(stop, "JOIN_SECONDS", 0.5)
    store, answer, asked = dist.TCPStore("127.0.0.1", 0, 1, True), Event(), Event()
    heartbeat = HeartbeatMonitor(0, 1, lambda: NO_PROGRESS, is_reporting=True)

    def exchange(_: dist.Store) -> None:
        asked.set()
        answer.wait(30)

    monkeypatch.setattr(heartbeat, "exchange", exchange)
    board = StopBoard(store, heartbeat, is_watching=True, poll_seconds=0.01)
    assert asked.wait(10)
    began = time.monotonic()
    board.close()
    first = time.monotonic() - began
    board.close()
    both = time.monotonic() - began
    answer.set()
    assert first >= 0.5 > both - first


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


@dataclass
class Steps:
    """The steps of a replica that makes none."""

    launch_steps: int = 0
    timer: None = None
    makes_no_exchange: bool = False


def test_only_rank_0_of_a_replica_connects_to_the_shared_store() -> None:
    """Two replicas of four ranks, all of which wait. Would catch: a connection to the shared store
    for each waiting rank, in addition to the one that it has (32 thousand at N = 64, K = 512)."""
    clones = list[str]()
    shared, own = (dist.TCPStore("127.0.0.1", 0, 1, True) for _ in range(2))
    limit, boards, waits = timedelta(seconds=60), list[StopBoard](), ExitStack()
    for replica in range(2):
        for rank in range(4):
            world = ReplicaWorld(
                Placement(2, replica, 4, rank, True),
                CountedClones(dist.PrefixStore(str(replica), own), f"own {replica} {rank}", clones),
                CountedClones(shared, f"shared {replica} {rank}", clones),
                limit,
            )
            control = Group(None, rank, 4, torch.device("cpu"), limit, "control")
            meeting = Group(None, replica, 2, torch.device("cpu"), limit, "meeting")
            boards.append(StopBoard.open(world, control, meeting, meeting, Steps()))
            waits.enter_context(boards[-1].heartbeat.waiting())
    until, progress = time.monotonic() + 20, ReplicaProgress(0, 0, 0)
    while time.monotonic() < until and not all(
        each.progress == progress for board in boards for each in board.heartbeat.heartbeats
    ):
        time.sleep(0.05)
    known = [[each.progress for each in board.heartbeat.heartbeats] for board in boards]
    for board in boards:
        board.close()
    assert known == [[progress] * 2] * 8
    assert sorted(clones) == ["own 0 0", "own 1 0", "shared 0 0", "shared 1 0"]
