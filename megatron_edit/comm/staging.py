"""Staging: gloo collectives on tensors of a device, through pinned host memory.

    down:    copied on a side stream, ordered after the kernels that compute the tensor
    across:  gloo, from host memory to host memory, when the copy is done
    up:      copied on the side stream; the stream that waits for the result waits for the copy

The host waits for a copy only when it waits for the result. Polling `is_completed` also starts the
collectives whose copies are done, in the order in which they were issued, however long their copies
take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.streams import Event, Stream, Streams

type Pair = tuple[Tensor, Tensor]  # on the device, and its place in host memory


@dataclass
class StagedWork:
    """Handle of a staged collective, with the interface of torch's `Work`.

    Attributes:
        downloaded: event after the copies to the host.
        start: begins the collective on host memory; None when it has begun.
        results: tensors to copy back to the device.
        work: gloo's handle; None before the collective begins.
        uploaded: event after the copies to the device; None before them.
    """

    owner: StagedProcessGroup
    downloaded: Event
    start: Callable[[], Any] | None
    results: Sequence[Pair]
    work: Any = None
    uploaded: Event = None
    _is_up: bool = False

    def is_completed(self) -> bool:
        """Return whether gloo is done or has failed, without blocking."""
        self.owner.begin_ready()
        return self._is_up or (self.work is not None and bool(self.work.is_completed()))

    def begin(self) -> None:
        """Start it on gloo: its copies are done, and it is the next in order."""
        with self.owner.lock:
            if self.start is not None:
                self.work = self.start()
                self.start = None  # it holds host memory, which gloo keeps as long as it needs it

    def wait(self) -> None:
        """Block the host until gloo is done, and the current stream until the copies are done.

        Raises:
            RuntimeError: it failed or timed out.
        """
        if not self._is_up:
            self.owner.begin_until(self)
            self.work.wait()
            self.uploaded = self.owner.upload(self.results)
            self._is_up, self.results, self.work = True, (), None
        streams = self.owner.streams
        streams.wait(streams.current(), self.uploaded)


class StagedProcessGroup:
    """A process group for tensors of a device on top of gloo, with the methods that `Group` calls.

    Args:
        pin: whether host memory is page-locked; otherwise copies block the host.
    """

    def __init__(self, gloo: Any, streams: Streams, *, pin: bool) -> None:
        self.streams = streams
        self._gloo, self._pin = gloo, pin
        self._side: Stream = streams.new()
        self._waiting: deque[StagedWork] = deque()
        self.lock = threading.RLock()

    def name(self) -> str:
        """Name of the backend, "gloo": collectives run concurrently."""
        return "gloo"

    def allreduce(self, tensors: list[Tensor], options: Any) -> StagedWork:
        """Begin to reduce tensors of the device over the group, in place."""
        return self._begin_in_place(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> StagedWork:
        """Begin to broadcast tensors of one rank, in place; blocks the host for the copy down.

        The sender may never poll the handle again, and a collective that is not polled would not
        start.
        """
        work = self._begin_in_place(self._gloo.broadcast, tensors, options)
        self.begin_until(work)
        return work

    def allgather(
        self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any
    ) -> StagedWork:
        """Begin to gather the tensors of all ranks into `parts`, a list of N for each tensor."""
        mine = [(tensor, self._host_buffer(tensor)) for tensor in tensors]
        theirs = [[(part, self._host_buffer(part)) for part in row] for row in parts]
        host, rows = [place for _, place in mine], [[p for _, p in row] for row in theirs]
        results = [pair for row in theirs for pair in row]
        return self._begin(mine, results, lambda: self._gloo.allgather(rows, host, options))

    def alltoall_base(
        self,
        incoming: Tensor,
        outgoing: Tensor,
        received: list[int],
        sent: list[int],
        options: Any,
    ) -> StagedWork:
        """Begin to send rows of `outgoing`, `sent[j]` to rank j, and to fill `incoming` with
        `received[i]` rows of rank i."""
        mine, theirs = (
            (outgoing, self._host_buffer(outgoing)),
            (incoming, self._host_buffer(incoming)),
        )
        return self._begin(
            [mine],
            [theirs],
            lambda: self._gloo.alltoall_base(theirs[1], mine[1], received, sent, options),
        )

    def begin_ready(self) -> None:
        """Start, in order, the collectives whose copies are done. Does not block."""
        with self.lock:
            while self._waiting and self.streams.is_done(self._waiting[0].downloaded):
                self._begin_next()

    def begin_until(self, work: StagedWork) -> None:
        """Start all collectives up to `work`. Blocks the host until their copies are done."""
        with self.lock:
            while work.start is not None:
                self.streams.synchronize(self._waiting[0].downloaded)
                self._begin_next()

    def upload(self, pairs: Sequence[Pair]) -> Event:
        """Begin to copy back to the device; return the event after the copies."""
        return self._copy((tensor, place, tensor) for tensor, place in pairs)

    def _begin_in_place(
        self, collective: Callable[..., Any], tensors: Sequence[Tensor], options: Any
    ) -> StagedWork:
        pairs = [(tensor, self._host_buffer(tensor)) for tensor in tensors]
        host = [place for _, place in pairs]
        return self._begin(pairs, pairs, lambda: collective(host, options))

    def _begin(
        self, sources: Sequence[Pair], results: Sequence[Pair], start: Callable[[], Any]
    ) -> StagedWork:
        downloaded = self._copy((place, tensor, tensor) for tensor, place in sources)
        work = StagedWork(self, downloaded, start, results)
        with self.lock:
            self._waiting.append(work)
            self.begin_ready()
        return work

    def _copy(self, copies: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Event:
        """Begin copies on the side stream: (target, source, the one of them on the device)."""
        streams = self.streams
        streams.wait(self._side, streams.record(streams.current()))
        with streams.use(self._side):
            for target, source, on_device in copies:
                target.copy_(source, non_blocking=True)
                streams.keep(on_device, self._side)
        return streams.record(self._side)

    def _begin_next(self) -> None:
        self._waiting[0].begin()  # if this raises, it stays the first
        self._waiting.popleft()

    def _host_buffer(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
