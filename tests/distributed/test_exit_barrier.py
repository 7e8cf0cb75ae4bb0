"""The exit barrier: no rank closes connections while another may still read from them.

Would catch: a rank that exits at once, so that another replica loses its last records
(`Connection closed by peer`, exit code 4 after a successful training).
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
    """The world of a rank of one of two replicas."""
    placement = Placement(
        num_replicas=2, replica=replica, ranks_per_replica=ranks, rank=rank, is_single_launch=True
    )
    return ReplicaWorld(placement, store, store, SECONDS)


def test_exit_barrier_waits_for_every_rank() -> None:
    """Not only for the first rank of each replica: others may still be reading."""
    store, returned = dist.HashStore(), []

    def wait(replica: int, rank: int) -> None:
        world(store, replica, rank, ranks=2).exit_barrier(SECONDS)
        returned.append((replica, rank))

    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    threads = [threading.Thread(target=wait, args=place) for place in places]
    for thread in threads[:-1]:
        thread.start()
    time.sleep(0.3)
    assert returned == []
    threads[-1].start()
    for thread in threads:
        thread.join(10)
    assert sorted(returned) == sorted(places)


def test_exit_barrier_times_out() -> None:
    """The other replica never reaches it."""
    began = time.monotonic()
    world(dist.HashStore(), 0).exit_barrier(timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - began < 5
