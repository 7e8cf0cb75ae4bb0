"""Groups are closed at a regular end while a child process still holds their sockets."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.transport import ON_CPU, stand_alone_group
from tests.harness import run_ranks

NUM_GROUPS = 40
LATE_SECONDS = 0.5
TICK_SECONDS = 0.01  # gloo's threads look for their end as often


@pytest.mark.parametrize("is_lazy", [True, False])
def test_ranks_close_groups_that_a_child_process_holds(is_lazy: bool) -> None:
    """The first rank has a child process, like that of a data loader. Would catch a rank that
    aborts (exit code -6) after a training that succeeded: without `stop_loops` each run does."""
    run_ranks("tests.distributed.test_closing:close_groups", 2, (is_lazy,), check=True)


@pytest.mark.parametrize("late", [0, 1])
def test_groups_are_closed_after_the_collectives_in_flight(late: int) -> None:
    """One rank begins the last collective when the other already ends the group. The flags of the
    last step of a training are sent so. Would catch a rank that waits in `close` until the time-out
    for a message that no thread receives any more."""
    run_ranks("tests.distributed.test_closing:close_in_flight", 2, (late,), check=True)


def close_in_flight(late: int) -> None:
    """Close a group that connects lazily while its last collective is in flight."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    group = stand_alone_group(
        store, rank, 2, replace(ON_CPU, is_lazy=True), timedelta(seconds=30), "group"
    )
    group.warm_up(group.all_reduce, group.broadcast)
    began = time.monotonic()
    time.sleep(LATE_SECONDS if rank == late else 0.0)
    flags = torch.tensor([7 - rank])
    group.start_broadcast(flags)
    group.stop_loops()
    store.set(f"left {rank}", "")
    store.wait([f"left {1 - rank}"])
    group.close()
    assert int(flags) == 7 and time.monotonic() - began < 10 * LATE_SECONDS
    _end(store, rank)


def close_groups(is_lazy: bool) -> None:
    """Connect groups, fork a child process, and close them on both ranks at nearly one moment."""
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    transport = replace(ON_CPU, is_lazy=is_lazy)
    groups = [
        stand_alone_group(store, rank, 2, transport, timedelta(seconds=30), f"group {number}")
        for number in range(NUM_GROUPS)
    ]
    for group in groups:
        group.all_reduce(torch.ones(1))
    child = os.fork() if rank == 0 else None
    if child == 0:
        time.sleep(60)
        os._exit(0)
    for number, group in enumerate(groups):
        time.sleep(random.random() * TICK_SECONDS)
        group.stop_loops()
        store.set(f"{number} {rank}", "")
        store.wait([f"{number} {1 - rank}"])
        time.sleep(random.random() * TICK_SECONDS)
        group.close()
    if child is not None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    _end(store, rank)


def _end(store: dist.Store, rank: int) -> None:
    """Keep the store, which ends with its variable in rank 0, until the other rank is done."""
    if rank == 0:
        store.wait(["end"])
    else:
        store.set("end", "")
