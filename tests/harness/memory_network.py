"""Groups whose ranks are in one process: a transport in memory below the real `Group`.

A test makes each rank's calls itself, in an order of its choice: who would wait for a rank that has
not come is told so by an `AssertionError`, as nobody else runs. Or ranks are threads, which wait
for each other for a while (`in_threads`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group

CPU = torch.device("cpu")


@dataclass
class Network:
    """Messages by channel, number of the collective, sender and receiver.

    Attributes:
        messages: sent so far.
        is_broken: whether every wait fails, as where a peer is gone.
        patience: seconds that a rank waits for the others.
    """

    messages: dict[Any, Tensor] = field(default_factory=dict)
    is_broken: bool = False
    patience: float = 0.0


@dataclass
class Arrival:
    """A collective of one rank, complete when all that it waits for was sent."""

    network: Network
    targets: list[tuple[Any, Tensor]]
    sums: bool = False
    _is_there: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_completed(self) -> bool:
        """Whether all is there; it then lies where it should. Any thread may ask."""
        with self._lock:
            self._is_there = self._is_there or self._arrives()
        return self._is_there

    def _arrives(self) -> bool:
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
        """As long as the network does."""
        if self.network.is_broken:
            raise RuntimeError("connection reset by peer")
        deadline = time.monotonic() + self.network.patience
        while not self.is_completed():
            assert time.monotonic() < deadline, "this rank waits for ever"
            time.sleep(0.0005)


@dataclass
class End:
    """A process group as one rank holds it."""

    network: Network
    channel: str
    rank: int
    size: int
    _counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def name(self) -> str:
        """Collectives may run at once."""
        return "gloo"

    def alltoall_base(
        self, incoming: Tensor, outgoing: Tensor, received: list[int], sent: list[int], _: Any
    ) -> Arrival:
        """Rows to some ranks, from others."""
        number = self._number("alltoall")
        targets = [r for r, is_target in enumerate(sent) if is_target]
        sources = [r for r, is_source in enumerate(received) if is_source]
        for row, target in zip(outgoing, targets, strict=True):
            self.network.messages[self.channel, number, self.rank, target] = row.clone()
        keys = [(self.channel, number, source, self.rank) for source in sources]
        return Arrival(self.network, list(zip(keys, incoming, strict=True)))

    def allreduce(self, tensors: list[Tensor], _: Any) -> Arrival:
        """A sum over all ranks."""
        number = self._number("allreduce")
        self.network.messages[self.channel, "sum", number, self.rank] = tensors[0].clone()
        keys = [(self.channel, "sum", number, rank) for rank in range(self.size)]
        scratch = [tensors[0] if r == 0 else torch.empty_like(tensors[0]) for r in range(self.size)]
        return Arrival(self.network, list(zip(keys, scratch, strict=True)), sums=True)

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> Arrival:
        """From all ranks to all."""
        number = self._number("allgather")
        self.network.messages[self.channel, "gather", number, self.rank] = tensors[0].clone()
        keys = [(self.channel, "gather", number, rank) for rank in range(self.size)]
        return Arrival(self.network, list(zip(keys, parts[0], strict=True)))

    def broadcast(self, tensors: list[Tensor], _: Any) -> Arrival:
        """From rank 0; that one is done when all have come."""
        number = self._number("broadcast")
        self.network.messages[self.channel, number, self.rank] = tensors[0].clone()
        if self.rank > 0:
            return Arrival(self.network, [((self.channel, number, 0), tensors[0])])
        keys = [(self.channel, number, rank) for rank in range(1, self.size)]
        return Arrival(self.network, [(key, torch.empty_like(tensors[0])) for key in keys])

    def _number(self, kind: str) -> int:
        self._counts[kind] += 1
        return self._counts[kind]


class InOrderEnd(End):
    """Like NCCL's: collectives run in the order in which they are begun."""

    def name(self) -> str:
        """See above."""
        return "nccl"

    def alltoall_base(
        self, incoming: Tensor, outgoing: Tensor, received: list[int], sent: list[int], _: Any
    ) -> Arrival:
        """A row to each rank."""
        everybody = [1] * self.size
        return super().alltoall_base(incoming, outgoing, everybody, everybody, _)

    def allreduce_coalesced(self, tensors: list[Tensor], _: Any) -> Any:
        """Several sums in one."""
        return Several([self.allreduce([tensor], _) for tensor in tensors])


@dataclass
class Several:
    """Collectives that are one."""

    arrivals: list[Arrival]

    def is_completed(self) -> bool:
        """Whether all are there."""
        return all([arrival.is_completed() for arrival in self.arrivals])

    def wait(self) -> None:
        """As long as the network does."""
        for arrival in self.arrivals:
            arrival.wait()


def groups_in_order(size: int, network: Network) -> list[Group]:
    """The sync group as each replica holds it where collectives run in order."""
    ends = [InOrderEnd(network, "whole", rank, size) for rank in range(size)]
    second = timedelta(seconds=1)
    return [Group(end, end.rank, size, CPU, second, "sync group") for end in ends]


def groups_of(size: int, network: Network) -> list[Group]:
    """The sync group as each replica holds it, made for two phases."""

    def end(channel: str, rank: int) -> End:
        return End(network, channel, rank, size)

    return [
        Group(
            end("whole", rank), rank, size, CPU, timedelta(seconds=1), "sync group",
            phases=tuple(
                Duplex(end(f"up {phase}", rank), end(f"down {phase}", rank)) for phase in range(2)
            ),
        )
        for rank in range(size)
    ]  # fmt: skip


def in_threads[Result](calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return, each made in a thread of its own; raises their first error."""
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
