"""What each rank reads and sends at the start does not grow with the number of ranks."""

from __future__ import annotations

import math
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host import groups
from megatron_edit.host.agreement import agree_on_settings

PATIENCE = timedelta(seconds=60)


class CountingStore(dist.Store):  # type: ignore[misc]
    """Passes calls on to a store that all ranks share, and counts them for one rank.

    Args:
        inner: shared by the ranks.

    Attributes:
        sent, received: bytes of values.
        num_calls: of all kinds.
        num_clones: further connections.
    """

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.sent = self.received = self.num_calls = self.num_clones = 0

    @property
    def traffic(self) -> int:
        """Bytes of values in both directions."""
        return self.sent + self.received

    def _send(self, *values: str | bytes) -> None:
        self.num_calls += 1
        self.sent += sum(map(len, values))

    def _receive(self, *values: bytes) -> None:
        self.num_calls += 1
        self.received += sum(map(len, values))

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._send(value)
        self.inner.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several values."""
        self._send(*values)
        self.inner.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        value = bytes(self.inner.get(key))
        self._receive(value)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        values = [bytes(value) for value in self.inner.multi_get(keys)]
        self._receive(*values)
        return values

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._receive(b"8 bytes.")
        return int(self.inner.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._receive(b"1")
        return bool(self.inner.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta = PATIENCE) -> None:
        """Wait until all keys are set."""
        self._receive()
        self.inner.wait(keys, timeout)

    def clone(self) -> CountingStore:
        """Count as this one does."""
        self.num_clones += 1
        return self

    def has_extended_api(self) -> bool:
        """No: torch then uses only `set`, `get`, `check` and `wait`."""
        return False


# ---- starts of a launch


ADDRESS_BYTES = 154  # of a rank of a gloo group
RANKS_PER_HOST, DIGITS = 4, 8
CPU = torch.device("cpu")


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
            self.own.append(CountingStore(store))
            own = dist.PrefixStore(f"replica{replica}", self.own[-1])
            self.worlds.append(ReplicaWorld(place, own, self.shared[-1], timedelta(seconds=60)))

    def run[T](self, work: Callable[[ReplicaWorld], T]) -> list[T]:
        """Return what each rank returns; raise the first error. A thread has the rank's name."""
        results: list[T | BaseException | None] = [None] * len(self.worlds)

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.worlds[rank])
            except BaseException as error:
                results[rank] = error

        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True, name=str(rank))
            for rank in range(len(results))
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
        control = launch.run(groups._control_group)
        assert launch.traffic == [ADDRESS_BYTES] * size

        def use(world: ReplicaWorld, control: list[Group] = control) -> int:
            rank = world.placement.rank
            token = torch.tensor([rank])
            control[rank].all_reduce(token)
            control[rank].broadcast(total := token.clone())
            return int(total)

        assert launch.run(use) == [size * (size - 1) // 2] * size
        num_descriptors = (len(os.listdir("/proc/self/fd")) - before) / size
        assert max(launch.traffic) <= ADDRESS_BYTES * (2 + math.log2(size))
        assert num_descriptors < 10, num_descriptors
        assert [store.num_calls for store in launch.shared] == [0] * size


@dataclass(frozen=True)
class Cost:
    """The largest traffic in bytes and number of calls of some ranks."""

    traffic: int
    num_calls: int

    @classmethod
    def of(cls, launch: Launch, ranks: list[int]) -> Cost:
        """Of the ranks with these global ranks."""
        both = [(launch.shared[rank], launch.own[rank]) for rank in ranks]
        return cls(
            max(a.traffic + b.traffic for a, b in both),
            max(a.num_calls + b.num_calls for a, b in both),
        )


STEPS: dict[str, Callable[[ReplicaWorld], object]] = {
    "hosts": lambda world: world.arrange("ranks"),
    "settings": lambda world: agree_on_settings(
        world, EditConfig(use_edit=True), Namespace(**{f"setting_{n}": n for n in range(100)}), CPU
    ),
    "all replicas": lambda world: world.wait_for_all_replicas("groups"),
    "devices": lambda world: groups._choose_transport(world, CPU, EditConfig()),
}


@pytest.mark.parametrize("step", STEPS)
def test_start_costs_a_rank_the_same_with_any_number_of_ranks(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2 replicas of 4 ranks to 12 of 8. The first rank gathers; rank 0 of each replica may
    read something of each replica and of each rank of its own. Would catch: every rank reads the
    hosts, the findings or the devices of all, or waits for each replica by itself."""
    monkeypatch.setattr(
        "socket.gethostname",
        lambda: f"node{int(threading.current_thread().name) // RANKS_PER_HOST:03}",
    )
    monkeypatch.setattr("megatron_edit.comm.interfaces.why_unreachable", lambda: None)
    costs, firsts = list[Cost](), list[Cost]()
    for num_replicas, size in ((2, 4), (4, 8), (12, 8)):
        launch = Launch(num_replicas, size)
        launch.run(STEPS[step])
        ranks = range(num_replicas * size)
        costs.append(Cost.of(launch, [rank for rank in ranks if rank % size]))
        firsts.append(Cost.of(launch, list(range(size, len(ranks), size))))
    small, *large = costs
    # The last of all that count says so with one call more.
    assert all(each.num_calls <= small.num_calls + 1 for each in large), costs
    assert all(each.traffic <= small.traffic + DIGITS for each in large), costs
    for (num_replicas, size), first in zip(((4, 8), (12, 8)), firsts[1:], strict=True):
        more = num_replicas + size
        assert first.num_calls <= firsts[0].num_calls + 3 * more, firsts
        assert first.traffic <= firsts[0].traffic + 30 * more, firsts


def test_refusal_of_one_rank_reaches_all() -> None:
    """Would catch: ranks that wait for ten minutes because the first has refused and ended."""
    launch, refusals = Launch(2, 3), list[str]()

    def choose(world: ReplicaWorld) -> None:
        try:
            groups._choose_transport(world, CPU, EditConfig(sync_backend="nccl"))
        except UsageError as error:
            refusals.append(str(error))

    launch.run(choose)
    assert len(refusals) == 6 and len(set(refusals)) == 1
    assert refusals[0].startswith("--edit-sync-backend nccl: needs CUDA, and rank 0 of replica 0")
