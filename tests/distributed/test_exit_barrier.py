"""The end of training: nobody closes connections while somebody may still be reading.

Would catch: a rank that leaves at once, and takes with it the last records that were meant for
another replica (`Connection closed by peer`, exit code 4 after a training that went well).
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld

SECONDS = timedelta(seconds=20)


def world(store: dist.Store, replica: int, rank: int = 0, ranks: int = 1) -> ReplicaWorld:
    """A rank of a replica, of two."""
    placement = Placement(
        num_replicas=2, replica=replica, ranks_per_replica=ranks, rank=rank, is_single_launch=True
    )
    return ReplicaWorld(placement, store, store, SECONDS)


def test_who_is_first_waits_for_the_last() -> None:
    """Both leave when both have come."""
    store, left = dist.HashStore(), threading.Event()

    def first() -> None:
        world(store, 0).exit_barrier(SECONDS)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert not left.wait(0.5)
    world(store, 1).exit_barrier(SECONDS)
    assert left.wait(5)
    thread.join()


def test_all_ranks_of_all_replicas_are_waited_for() -> None:
    """Not the first of each replica alone: the others may still be reading, too."""
    store, left = dist.HashStore(), []

    def leave(replica: int, rank: int) -> None:
        world(store, replica, rank, ranks=2).exit_barrier(SECONDS)
        left.append((replica, rank))

    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    threads = [threading.Thread(target=leave, args=place) for place in places]
    for thread in threads[:-1]:
        thread.start()
    time.sleep(0.3)
    assert left == []
    threads[-1].start()
    for thread in threads:
        thread.join(10)
    assert sorted(left) == sorted(places)


def test_nobody_waits_for_ever() -> None:
    """The other one never comes."""
    began = time.monotonic()
    world(dist.HashStore(), 0).exit_barrier(timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - began < 5
