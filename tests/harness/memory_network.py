"""Groups whose ranks are in one process: an in-memory transport below the real `Group`.

A test makes the calls of each rank itself, in an order of its choice; as nothing else runs, a wait
for a rank that has not sent yet raises an `AssertionError`. Or ranks are threads, which wait for
each other for some time (`run_in_threads`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group, Places
from megatron_edit.comm.wire import Exchange

CPU = torch.device("cpu")


@dataclass
class Network:
    """Messages by channel, number of the collective, sender and receiver.

    Attributes:
        messages: messages sent so far.
        is_broken: whether every wait fails, as after the loss of a peer.
        patience: seconds that a rank waits for the others.
    """

    messages: dict[Any, Tensor] = field(default_factory=dict)
    is_broken: bool = False
    patience: float = 0.0


@dataclass
class PendingCollective:
    """A collective of one rank, complete when all messages for it have been sent."""

    network: Network
    targets: list[tuple[Any, Tensor]]
    sums: bool = False
    _is_complete: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_completed(self) -> bool:
        """Return whether all messages have arrived; if so, copy them to the targets."""
        with self._lock:
            self._is_complete = self._is_complete or self._receive()
        return self._is_complete

    def _receive(self) -> bool:
        if self.network.is_broken:
            return True
        if any(key not in self.network.messages for key, _ in self.targets):
            return False
        for key, target in self.targets:
            target.copy_(self.network.messages[key])
        if self.sums:  # in rank order; the first target is the tensor itself
            self.targets[0][1].copy_(sum(self.network.messages[key] for key, _ in self.targets))
        return True

    def wait(self) -> None:
        """Wait for at most `Network.patience`."""
        if self.network.is_broken:
            raise RuntimeError("connection reset by peer")
        deadline = time.monotonic() + self.network.patience
        while not self.is_completed():
            assert time.monotonic() < deadline, "this rank would wait forever"
            time.sleep(0.0005)


@dataclass
class MemoryProcessGroup:
    """The process group of one rank."""

    network: Network
    channel: str
    rank: int
    size: int
    _counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def name(self) -> str:
        """Return gloo's name: collectives may run concurrently."""
        return "gloo"

    def alltoall_base(
        self, incoming: Tensor, outgoing: Tensor, received: list[int], sent: list[int], _: Any
    ) -> PendingCollective:
        """Send rows to some ranks and receive rows from others."""
        number = self._number("alltoall")
        targets = [r for r, is_target in enumerate(sent) if is_target]
        sources = [r for r, is_source in enumerate(received) if is_source]
        for row, target in zip(outgoing, targets, strict=True):
            self.network.messages[self.channel, number, self.rank, target] = row.clone()
        keys = [(self.channel, number, source, self.rank) for source in sources]
        return PendingCollective(self.network, list(zip(keys, incoming, strict=True)))

    def allreduce(self, tensors: list[Tensor], _: Any) -> PendingCollective:
        """Sum over all ranks, in rank order."""
        number = self._number("allreduce")
        self.network.messages[self.channel, "sum", number, self.rank] = tensors[0].clone()
        keys = [(self.channel, "sum", number, rank) for rank in range(self.size)]
        scratch = [tensors[0] if r == 0 else torch.empty_like(tensors[0]) for r in range(self.size)]
        return PendingCollective(self.network, list(zip(keys, scratch, strict=True)), sums=True)

    def allgather(
        self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any
    ) -> PendingCollective:
        """Gather the tensors of all ranks."""
        number = self._number("allgather")
        self.network.messages[self.channel, "gather", number, self.rank] = tensors[0].clone()
        keys = [(self.channel, "gather", number, rank) for rank in range(self.size)]
        return PendingCollective(self.network, list(zip(keys, parts[0], strict=True)))

    def broadcast(self, tensors: list[Tensor], _: Any) -> PendingCollective:
        """Broadcast from rank 0, where it completes when all ranks have called it."""
        number = self._number("broadcast")
        self.network.messages[self.channel, number, self.rank] = tensors[0].clone()
        if self.rank > 0:
            return PendingCollective(self.network, [((self.channel, number, 0), tensors[0])])
        keys = [(self.channel, number, rank) for rank in range(1, self.size)]
        return PendingCollective(
            self.network, [(key, torch.empty_like(tensors[0])) for key in keys]
        )

    def _number(self, kind: str) -> int:
        self._counts[kind] += 1
        return self._counts[kind]


class InOrderProcessGroup(MemoryProcessGroup):
    """Like NCCL's: collectives run in the order in which they are started."""

    def name(self) -> str:
        """Return NCCL's name: collectives run in order."""
        return "nccl"

    def alltoall_base(
        self, incoming: Tensor, outgoing: Tensor, received: list[int], sent: list[int], _: Any
    ) -> PendingCollective:
        """Exchange a row with each rank, or with those that are counted."""
        all_ranks = [1] * self.size
        return super().alltoall_base(
            incoming, outgoing, received or all_ranks, sent or all_ranks, _
        )

    def _allgather_base(self, output: Tensor, tensor: Tensor, _: Any) -> PendingCollective:
        """Gather the tensors of all ranks into one."""
        return self.allgather([list(output.view(self.size, -1).unbind())], [tensor], _)

    def allreduce_coalesced(self, tensors: list[Tensor], _: Any) -> Any:
        """Sum several tensors in one collective."""
        return CoalescedWork([self.allreduce([tensor], _) for tensor in tensors])


@dataclass
class CoalescedWork:
    """Collectives that were started together."""

    works: list[PendingCollective]

    def is_completed(self) -> bool:
        """Return whether all are complete."""
        return all([work.is_completed() for work in self.works])

    def wait(self) -> None:
        """Wait for at most `Network.patience`."""
        for work in self.works:
            work.wait()


def in_order_groups(size: int, network: Network) -> list[Group]:
    """Return the sync group of each replica, with collectives that run in order."""
    ends = [InOrderProcessGroup(network, "whole", rank, size) for rank in range(size)]
    second = timedelta(seconds=1)
    return [Group(end, end.rank, size, CPU, second, "sync group") for end in ends]


def two_phase_groups(size: int, network: Network) -> list[Group]:
    """Return the sync group of each replica, with transports for two phases."""

    def end(channel: str, rank: int) -> MemoryProcessGroup:
        return MemoryProcessGroup(network, channel, rank, size)

    return [
        Group(
            end("whole", rank), rank, size, CPU, timedelta(seconds=1), "sync group",
            phases=tuple(
                Duplex(end(f"up {phase}", rank), end(f"down {phase}", rank)) for phase in range(2)
            ),
        )
        for rank in range(size)
    ]  # fmt: skip


def placed_groups(of: Sequence[int], network: Network, *, in_order: bool = False) -> list[Group]:
    """Return the sync group of each replica, of which some share a place.

    Args:
        of: place of each replica.
        network: connects all of them.
        in_order: whether collectives run in the order in which they are started.
    """
    size, kind = len(of), InOrderProcessGroup if in_order else MemoryProcessGroup
    groups = (in_order_groups if in_order else two_phase_groups)(size, network)
    for group, place in zip(groups, of, strict=True):
        members = [rank for rank in range(size) if of[rank] == place]
        rank, near = members.index(group.rank), []
        for way in ("up", "down"):
            end = kind(network, f"{way} in place {place}", rank, len(members))
            near.append(Group(end, rank, len(members), CPU, group.timeout, f"place {way}"))
        group.places = Places(tuple(of), *near)
    return groups


def run_in_threads[Result](calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Make each call in a thread of its own; return their results or raise the first error."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(calls))]


def advance_in_random_order(exchanges: list[Exchange], order: random.Random) -> None:
    """Advance the exchanges in random order until all are over; fail if they do not end."""
    left = list(exchanges)
    for _ in range(100 * len(exchanges)):
        if not left:
            return
        place = order.randrange(len(left))
        if left[place].advance():
            del left[place]
    raise AssertionError("the exchanges do not end")
