"""Gloo for tensors of a device: down to pinned host memory, across the sockets, and up again.

    down:    copied on a stream beside compute, behind what computes the tensor
    across:  gloo, from host memory to host memory, when the copy is done
    up:      copied on the same stream; whoever waits lets its own stream wait for that

The host waits for a copy only where it waits for the result. `is_completed` is asked by whoever
drives exchanges, and lets begin what may: collectives cross in the order in which they were asked
for, however long their copies take.
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
    """A collective, as torch's `Work` has it.

    Attributes:
        owner: the process group.
        downloaded: event behind the copies down.
        start: begins it on host memory; None when it has begun.
        results: what goes up.
        work: gloo's handle; None before it crosses.
        uploaded: event behind the copies up; None before them.
    """

    owner: StagedProcessGroup
    downloaded: Event
    start: Callable[[], Any] | None
    results: Sequence[Pair]
    work: Any = None
    uploaded: Event = None
    _is_up: bool = False

    def is_completed(self) -> bool:
        """Whether it has crossed, well or badly. Waits for nothing."""
        self.owner.begin_ready()
        return self._is_up or (self.work is not None and bool(self.work.is_completed()))

    def begin(self) -> None:
        """Let it cross: it is down, and the next in order."""
        with self.owner.lock:
            if self.start is not None:
                self.work = self.start()
                self.start = None  # it holds host memory, which gloo keeps as long as it needs it

    def wait(self) -> None:
        """Let the host wait until it has crossed, and the current stream until all is up.

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
    """A process group for tensors of a device over one of gloo, with the calls that `Group` makes.

    Args:
        gloo: the process group.
        streams: of the device.
        pin: whether host memory is page-locked: copies wait for the host otherwise.
    """

    def __init__(self, gloo: Any, streams: Streams, *, pin: bool) -> None:
        self.streams = streams
        self._gloo, self._pin = gloo, pin
        self._side: Stream = streams.new()
        self._waiting: deque[StagedWork] = deque()
        self.lock = threading.RLock()

    def name(self) -> str:
        """Collectives run all at once."""
        return "gloo"

    def allreduce(self, tensors: list[Tensor], options: Any) -> StagedWork:
        """Begin to reduce tensors of the device over the group, in place."""
        return self._begin_in_place(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> StagedWork:
        """Begin to give tensors of one rank to all, in place; the host waits for the copy down.

        Who gives something away may never ask for it again, and what nobody asks for would not
        cross.
        """
        work = self._begin_in_place(self._gloo.broadcast, tensors, options)
        self.begin_until(work)
        return work

    def allgather(
        self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any
    ) -> StagedWork:
        """Begin to gather the tensors of all ranks into `parts`, a list of N for each tensor."""
        mine = [(tensor, self._room(tensor)) for tensor in tensors]
        theirs = [[(part, self._room(part)) for part in row] for row in parts]
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
        mine, theirs = (outgoing, self._room(outgoing)), (incoming, self._room(incoming))
        return self._begin(
            [mine],
            [theirs],
            lambda: self._gloo.alltoall_base(theirs[1], mine[1], received, sent, options),
        )

    def begin_ready(self) -> None:
        """Let cross, in order, what has come down. Waits for nothing."""
        with self.lock:
            while self._waiting and self.streams.is_done(self._waiting[0].downloaded):
                self._begin_next()

    def begin_until(self, work: StagedWork) -> None:
        """Let cross all up to `work`. The host waits for the copies down."""
        with self.lock:
            while work.start is not None:
                self.streams.synchronize(self._waiting[0].downloaded)
                self._begin_next()

    def upload(self, pairs: Sequence[Pair]) -> Event:
        """Begin to copy back to the device; the event behind it."""
        return self._copy((tensor, place, tensor) for tensor, place in pairs)

    def _begin_in_place(
        self, collective: Callable[..., Any], tensors: Sequence[Tensor], options: Any
    ) -> StagedWork:
        pairs = [(tensor, self._room(tensor)) for tensor in tensors]
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
        """Begin to copy, beside compute: target, source, and which of them is on the device."""
        streams = self.streams
        streams.wait(self._side, streams.record(streams.current()))
        with streams.use(self._side):
            for target, source, on_device in copies:
                target.copy_(source, non_blocking=True)
                streams.keep(on_device, self._side)
        return streams.record(self._side)

    def _begin_next(self) -> None:
        self._waiting[0].begin()  # where that raises it stays the first
        self._waiting.popleft()

    def _room(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
