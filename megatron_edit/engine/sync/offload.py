"""Copies between host and device beside compute, and the stream that a sync computes on.

On the CPU there are no streams (`comm/streams.py`): the same calls copy at once, so that their
memory can be counted where tests run.
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
    """A tensor on its way to the device.

    Attributes:
        tensor: where it arrives.
        source: who brings it; None where the tensor lives on the device.
        event: when it has arrived.
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
        """The current stream is given no more work on it. To be called once, at the end.

        Memory of what is not released may be given out again while it is in use.
        """
        if self.source is not None:
            self.source.take_back(self.tensor)


class OffloadStreams:
    """A stream to the device and one back, so that both directions run at once.

    Note: memory. The host runs ahead of the device, and would queue uploads of the whole outer
    state, each with memory of its own. So there are `max_copies` on the device at most: before
    another is uploaded the upload stream waits for the last use of the oldest one that was
    released. That one's memory then goes back to the pool of this very stream, which may give it
    out again at once; no copy is kept for any other stream, as the host would have to find that
    one done before.

    Args:
        device: of the parameters.
        streams: of the device.
        max_copies: tensors on the device at most, as long as users release what they have used.
    """

    def __init__(self, device: torch.device, streams: Streams, max_copies: int) -> None:
        self.device, self._streams = device, streams
        self._up, self._down = streams.new(), streams.new()
        self._max_copies, self._num_in_use = max_copies, 0
        self._released: deque[tuple[Tensor, Event, Event]] = deque()

    def fence(self) -> None:
        """Let uploads from here on see all that was downloaded before."""
        self._streams.wait(self._up, self._streams.record(self._down))

    def wait(self) -> None:
        """Let the host wait for all that was downloaded."""
        self._streams.synchronize(self._streams.record(self._down))

    def upload(self, source: Tensor) -> DeviceCopy:
        """Begin to copy `source`, pinned, to the device; to be released."""
        while self._released and self._num_in_use + len(self._released) >= self._max_copies:
            self._free_oldest()
        self._num_in_use += 1
        with self._streams.use(self._up):
            target = torch.empty_like(source, device=self.device, pin_memory=False)
            target.copy_(source, non_blocking=True)
            return DeviceCopy(target, self, self._streams.record(self._up))

    def await_copy(self, event: Event) -> None:
        """Let the current stream wait for an upload."""
        self._streams.wait(self._streams.current(), event)

    def take_back(self, tensor: Tensor) -> None:
        """A copy is used no more by what the current stream, and that of downloads, are given."""
        self._num_in_use -= 1
        used, home = (self._streams.record(s) for s in (self._streams.current(), self._down))
        self._released.append((tensor, used, home))

    def free(self) -> None:
        """Keep no memory of copies that were released: no other upload follows soon."""
        while self._released:
            self._free_oldest()

    def _free_oldest(self) -> None:
        _, *events = self._released.popleft()
        for event in events:
            self._streams.wait(self._up, event)

    def download(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source` to `target`, pinned, after what computes it now."""
        self._streams.wait(self._down, self._streams.record(self._streams.current()))
        with self._streams.use(self._down):
            target.copy_(source, non_blocking=True)


class SyncStream:
    """The stream of the device that the work of syncs runs on.

    Megatron runs some modules, and with them their gathers, on streams of their own
    (`--moe-shared-expert-overlap`). Buffers of a sync come from the pool of the stream that
    training computes on and go back there, so that is where they must be read.

    Args:
        streams: of the device.
        stream: another stream for it, where a thread of its own does that work.
    """

    def __init__(self, streams: Streams, stream: Stream = None) -> None:
        self._streams = streams
        self._stream = stream

    def remember(self) -> None:
        """The current stream is the one."""
        self._stream = self._streams.current()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Work on it; what came before on the current stream is seen, and what follows sees it."""
        streams, current = self._streams, self._streams.current()
        if self._stream is None or self._stream == current:
            yield
            return
        streams.wait(self._stream, streams.record(current))
        with streams.use(self._stream):
            yield
        streams.wait(current, streams.record(self._stream))

    def use_unsynced(self) -> AbstractContextManager[Any]:
        """Work on it, behind what it was given; nobody waits. For the thread."""
        return self._streams.use(self._stream)
