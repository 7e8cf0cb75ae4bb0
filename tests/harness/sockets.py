"""Exchanges of device tensors over gloo, in one process, with the real staging.

`staged_group` is the sync group of ranks on GPUs: copies on a stream of its own, and gloo on host
memory, whose stub accesses that memory only when it is polled. `InlineProgressThread` runs the
passes of the progress thread in the main thread, where a detector can observe them: right after
each pass of the main thread, the earliest possible time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group, Work
from megatron_edit.comm.staging import StagedProcessGroup
from tests.harness.races import COMPUTE
from tests.harness.traced_streams import CPU, TIMEOUT, TracedStreams


@dataclass
class SocketWork:
    """A collective on host memory, which it may access until it is done."""

    move: Callable[[], Any]
    is_done: bool = False

    def is_completed(self) -> bool:
        """Complete it and return True."""
        self.wait()
        return True

    def wait(self) -> None:
        """Complete it."""
        if not self.is_done:
            self.move()
            self.is_done = True


@dataclass
class SocketGroup:
    """A process group of rank 0 on host memory; the other ranks have the same tensors.

    Attributes:
        size: number of ranks.
    """

    size: int

    def name(self) -> str:
        """Return the name of gloo's backend."""
        return "gloo"

    def allreduce(self, tensors: list[Tensor], _: Any) -> SocketWork:
        """Sum equal addends."""
        return SocketWork(lambda: [tensor.mul_(self.size) for tensor in tensors])

    def broadcast(self, tensors: list[Tensor], _: Any) -> SocketWork:
        """Send, which only reads."""
        return SocketWork(lambda: [tensor.sum() for tensor in tensors])

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> SocketWork:
        """Gather copies of this rank's tensor."""
        return SocketWork(lambda: [part.copy_(tensors[0]) for part in parts[0]])

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], _: Any
    ) -> SocketWork:
        """Read the rows for other ranks, and write those from them."""
        return SocketWork(lambda: (rows.sum(), output.mul_(1)))


class _Staged(StagedProcessGroup):
    """A staged process group that reports the host memory it allocates."""

    def __init__(self, size: int, streams: TracedStreams, on_room: Callable[..., None]) -> None:
        super().__init__(SocketGroup(size), streams, pin=False)
        self._on_room = on_room

    def _host_buffer(self, tensor: Tensor) -> Tensor:
        room = super()._host_buffer(tensor)
        self._on_room([room])
        return room


def staged_group(
    size: int, streams: TracedStreams, on_room: Callable[[Iterable[Tensor]], None]
) -> Group:
    """Return the sync group of replica 0, with transports for two phases.

    Args:
        size: number of replicas.
        streams: streams of this rank.
        on_room: called with the host memory that is allocated for copies.
    """

    def transport() -> StagedProcessGroup:
        return _Staged(size, streams, on_room)

    return Group(
        transport(), 0, size, CPU, TIMEOUT, "sync",
        phases=tuple(Duplex(transport(), transport()) for _ in range(2)),
        make_streams=lambda device: streams,
    )  # fmt: skip


@dataclass
class InlineProgressThread:
    """Replaces `ProgressThread`: its passes run in the main thread, after those of the latter.

    Attributes:
        streams: streams of the rank; the current stream of a new thread is the compute stream.
        num_passes: number of passes so far.
    """

    streams: TracedStreams
    num_passes: int = 0

    def made(self, drive: Callable[[], Work | None], explain: Any) -> InlineProgressThread:
        """Replace the constructor of `ProgressThread`."""
        self._drive = drive
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run passes of the thread after those of the main thread, until one has to wait."""
        yield
        with self.streams.use(COMPUTE):
            while (work := self._drive()) is not None and work.is_completed:
                self.num_passes += 1
        self.num_passes += 1

    def raise_failure(self) -> None:
        """Do nothing: it cannot have failed."""

    def close(self) -> None:
        """Do nothing: there is no thread."""
