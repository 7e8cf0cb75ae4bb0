"""Copies between host and device that overlap compute, and the stream that a sync computes on.

On the CPU there are no streams (`comm/streams.py`): the same calls copy synchronously, so that
tests on the CPU can count their memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.streams import Event, Stream, Streams


@dataclass(frozen=True)
class DeviceCopy:
    """A tensor that is copied to the device.

    Attributes:
        source: the streams that copy it; None where the tensor lives on the device.
        event: recorded after the copy.
    """

    tensor: Tensor
    source: OffloadStreams | None = None
    event: Event = None

    def ready(self) -> Tensor:
        """The tensor; the current stream waits for it, the host does not."""
        if self.source is not None:
            self.source.await_copy(self.event)
        return self.tensor

    def release(self) -> None:
        """Declare that no more work on it is queued on the current stream. Call once.

        The memory of a copy that is not released may be reallocated while it is in use.
        """
        if self.source is not None:
            self.source.take_back(self.tensor)


class OffloadStreams:
    """An upload stream and a download stream, so that both directions run concurrently.

    Note: memory. The host runs ahead of the device, and would queue uploads of the complete outer
    state, each with memory of its own. So at most `max_copies` are on the device: before another
    upload the upload stream waits for the last use of the oldest released copy. That memory then
    returns to the pool of the upload stream, which may reallocate it immediately;
    `record_stream` is not used, because the host would have to observe that the other stream is
    done first.

    Args:
        max_copies: maximum number of tensors on the device, provided that users release them.
    """

    def __init__(self, device: torch.device, streams: Streams, max_copies: int) -> None:
        self.device, self._streams = device, streams
        self._up, self._down = streams.new(), streams.new()
        self._max_copies, self._num_in_use = max_copies, 0
        self._released: deque[tuple[Tensor, Event, Event]] = deque()

    def fence(self) -> None:
        """Order later uploads after all earlier downloads."""
        self._streams.wait(self._up, self._streams.record(self._down))

    def wait(self) -> None:
        """Block the host until all downloads are done."""
        self._streams.synchronize(self._streams.record(self._down))

    def upload(self, source: Tensor) -> DeviceCopy:
        """Begin to copy `source`, pinned, to the device; the copy must be released."""
        while self._released and self._num_in_use + len(self._released) >= self._max_copies:
            self._free_oldest()
        self._num_in_use += 1
        with self._streams.use(self._up):
            target = torch.empty_like(source, device=self.device, pin_memory=False)
            target.copy_(source, non_blocking=True)
            return DeviceCopy(target, self, self._streams.record(self._up))

    def await_copy(self, event: Event) -> None:
        """Make the current stream wait for an upload."""
        self._streams.wait(self._streams.current(), event)

    def take_back(self, tensor: Tensor) -> None:
        """Accept a released copy, after its last use on the current and the download stream."""
        self._num_in_use -= 1
        used, downloaded = (self._streams.record(s) for s in (self._streams.current(), self._down))
        self._released.append((tensor, used, downloaded))

    def free(self) -> None:
        """Free the memory of released copies; called when no other upload follows soon."""
        while self._released:
            self._free_oldest()

    def _free_oldest(self) -> None:
        _, *events = self._released.popleft()
        for event in events:
            self._streams.wait(self._up, event)

    def download(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source` to `target`, pinned, after the current stream has computed it."""
        self._streams.wait(self._down, self._streams.record(self._streams.current()))
        with self._streams.use(self._down):
            target.copy_(source, non_blocking=True)


class SyncStream:
    """The device stream on which the work of syncs runs.

    Megatron runs some modules, and with them their gathers, on streams of their own
    (`--moe-shared-expert-overlap`). Buffers of a sync come from the memory pool of the stream that
    training computes on and return to it, so they must be read on that stream.

    Args:
        stream: the stream of the progress thread, where there is one.
    """

    def __init__(self, streams: Streams, stream: Stream = None) -> None:
        self._streams = streams
        self._stream = stream

    def remember(self) -> None:
        """Make the current stream the one that syncs run on."""
        self._stream = self._streams.current()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Run on it, ordered after earlier and before later work of the current stream."""
        streams, current = self._streams, self._streams.current()
        if self._stream is None or self._stream == current:
            yield
            return
        streams.wait(self._stream, streams.record(current))
        with streams.use(self._stream):
            yield
        streams.wait(current, streams.record(self._stream))

    def use_unsynced(self) -> AbstractContextManager[Any]:
        """Run on it without synchronising with the current stream. For the progress thread."""
        return self._streams.use(self._stream)
