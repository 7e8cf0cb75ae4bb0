"""Exchanges over gloo from a device, in one process: the real staging and the real thread's turns.

`staged_group` is a sync group as ranks on GPUs have it between replicas: copies on a stream of its
own, and gloo on host memory, whose stand-in touches that memory when it is asked whether it is done
and not before. `ThreadInTurns` takes the progress thread's turns in the main thread, where a
detector sees them: after each turn of the main thread, which is as soon as they can come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group, Work
from megatron_edit.comm.staging import StagedProcessGroup
from tests.harness.in_order import CPU, TIMEOUT, TracedStreams
from tests.harness.races import COMPUTE


@dataclass
class SocketWork:
    """A collective of host memory: until it is done it may read and write."""

    move: Callable[[], Any]
    is_done: bool = False

    def is_completed(self) -> bool:
        """It is, when it is asked."""
        self.wait()
        return True

    def wait(self) -> None:
        """It is done now, at the latest."""
        if not self.is_done:
            self.move()
            self.is_done = True


@dataclass
class SocketGroup:
    """A process group on host memory; the other ranks hold the same as this one, which is rank 0.

    Attributes:
        size: number of ranks.
    """

    size: int

    def name(self) -> str:
        """As gloo's has it."""
        return "gloo"

    def allreduce(self, tensors: list[Tensor], _: Any) -> SocketWork:
        """Sum of equal addends."""
        return SocketWork(lambda: [tensor.mul_(self.size) for tensor in tensors])

    def broadcast(self, tensors: list[Tensor], _: Any) -> SocketWork:
        """It sends."""
        return SocketWork(lambda: [tensor.sum() for tensor in tensors])

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> SocketWork:
        """Everybody's is this one's."""
        return SocketWork(lambda: [part.copy_(tensors[0]) for part in parts[0]])

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], _: Any
    ) -> SocketWork:
        """Rows to the others are read, rows from them written."""
        return SocketWork(lambda: (rows.sum(), output.mul_(1)))


class _Staged(StagedProcessGroup):
    """Tells which memory is the host's."""

    def __init__(self, size: int, streams: TracedStreams, on_room: Callable[..., None]) -> None:
        super().__init__(SocketGroup(size), streams, pin=False)
        self._on_room = on_room

    def _room(self, tensor: Tensor) -> Tensor:
        room = super()._room(tensor)
        self._on_room([room])
        return room


def staged_group(
    size: int, streams: TracedStreams, on_room: Callable[[Iterable[Tensor]], None]
) -> Group:
    """The sync group of the first of some replicas, with transports for two phases.

    Args:
        size: number of replicas.
        streams: of this rank.
        on_room: told host memory that is made for copies.
    """

    def transport() -> StagedProcessGroup:
        return _Staged(size, streams, on_room)

    return Group(
        transport(), 0, size, CPU, TIMEOUT, "sync",
        phases=tuple(Duplex(transport(), transport()) for _ in range(2)),
        make_streams=lambda device: streams,
    )  # fmt: skip


@dataclass
class ThreadInTurns:
    """Stands for `ProgressThread`: the main thread takes its turns after its own.

    Attributes:
        streams: of the rank; a new thread's current one is that of compute.
        num_turns: so far.
    """

    streams: TracedStreams
    num_turns: int = 0

    def made(self, drive: Callable[[], Work | None], explain: Any) -> ThreadInTurns:
        """As `ProgressThread` is made."""
        self._drive = drive
        return self

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The thread's follows, as long as what it waits for is over."""
        yield
        with self.streams.use(COMPUTE):
            while (work := self._drive()) is not None and work.is_completed:
                self.num_turns += 1
        self.num_turns += 1

    def raise_failure(self) -> None:
        """It cannot have failed."""

    def close(self) -> None:
        """There is none to end."""
