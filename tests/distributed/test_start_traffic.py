"""What each rank reads and sends at the start does not grow with the number of ranks.

Threads are the ranks, each with a store that counts its calls.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.host import groups
from tests.harness.counting_store import CountingStore

ADDRESS_BYTES = 154  # of a rank of a gloo group


@dataclass
class Launch:
    """Ranks of N replicas in threads.

    Attributes:
        num_replicas, size: N and K.
        shared, own: stores of each rank, by global rank.
        worlds: of each rank.
    """

    num_replicas: int
    size: int
    shared: list[CountingStore] = field(default_factory=list)
    own: list[CountingStore] = field(default_factory=list)
    worlds: list[ReplicaWorld] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = dist.HashStore()
        for rank in range(self.num_replicas * self.size):
            replica, inner = divmod(rank, self.size)
            place = Placement(self.num_replicas, replica, self.size, inner, True)
            self.shared.append(CountingStore(dist.PrefixStore("shared", store)))
            self.own.append(CountingStore(dist.PrefixStore(f"replica{replica}", store)))
            self.worlds.append(
                ReplicaWorld(place, self.own[-1], self.shared[-1], timedelta(seconds=60))
            )

    def run[T](self, work: Callable[[int], T]) -> list[T]:
        """Return what each rank returns; raise the first error."""
        results: list[T | BaseException | None] = [None] * len(self.worlds)

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error

        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(results))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    @property
    def traffic(self) -> list[int]:
        """Bytes of each rank over both stores."""
        return [a.traffic + b.traffic for a, b in zip(self.shared, self.own, strict=True)]


@pytest.mark.parametrize("interface", ["", "lo"])
def test_control_group_costs_each_rank_the_same_at_any_size(
    interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8, 16 and 32 ranks. Would catch: a full mesh, in which each rank reads K addresses of
    154 + 8 K bytes and has K - 1 connections; a group that is formed over the store of all
    replicas, which is on the other side of a slow link."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    for size in (8, 16, 32):
        launch = Launch(1, size)
        before = len(os.listdir("/proc/self/fd"))
        control = launch.run(lambda rank, launch=launch: groups._control_group(launch.worlds[rank]))
        assert launch.traffic == [ADDRESS_BYTES] * size

        def use(rank: int, control: list[Group] = control) -> int:
            token = torch.tensor([rank])
            control[rank].all_reduce(token)
            control[rank].broadcast(total := token.clone())
            return int(total)

        assert launch.run(use) == [size * (size - 1) // 2] * size
        num_descriptors = (len(os.listdir("/proc/self/fd")) - before) / size
        assert max(launch.traffic) <= ADDRESS_BYTES * (2 + math.log2(size))
        assert num_descriptors < 10, num_descriptors
        assert [store.num_calls for store in launch.shared] == [0] * size
