"""Copies between host and device beside compute, and the stream that a sync computes on.

On the CPU there are no streams (`comm/streams.py`): the same calls copy at once, so that their
memory can be counted where tests run.
"""

from __future__ import annotations

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
        streams: of the device; None where the tensor is there already.
        event: when it has arrived.
    """

    tensor: Tensor
    streams: Streams | None = None
    event: Event = None

    def ready(self) -> Tensor:
        """The tensor; the current stream waits for it, the host does not."""
        if self.streams is not None:
            compute = self.streams.current()
            self.streams.wait(compute, self.event)
            self.streams.keep(self.tensor, compute)  # the memory belongs to the copying stream
        return self.tensor


class OffloadStreams:
    """A stream to the device and one back, so that both directions run at once.

    Args:
        device: of the parameters.
        streams: of the device.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.device, self._streams = device, streams
        self._up, self._down = streams.new(), streams.new()

    def fence(self) -> None:
        """Let uploads from here on see all that was downloaded before."""
        self._streams.wait(self._up, self._streams.record(self._down))

    def wait(self) -> None:
        """Let the host wait for all that was downloaded."""
        self._streams.synchronize(self._streams.record(self._down))

    def upload(self, source: Tensor) -> DeviceCopy:
        """Begin to copy `source`, pinned, to a new tensor on the device."""
        with self._streams.use(self._up):
            target = torch.empty_like(source, device=self.device, pin_memory=False)
            target.copy_(source, non_blocking=True)
            return DeviceCopy(target, self._streams, self._streams.record(self._up))

    def download(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source` to `target`, pinned, after what computes it now."""
        self._streams.wait(self._down, self._streams.record(self._streams.current()))
        with self._streams.use(self._down):
            target.copy_(source, non_blocking=True)
        self._streams.keep(source, self._down)


class HomeStream:
    """Keeps the work of a sync on one stream of the device.

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
    def entered(self) -> Iterator[None]:
        """Work on it; what came before on the current stream is seen, and what follows sees it."""
        streams, current = self._streams, self._streams.current()
        if self._stream is None or self._stream == current:
            yield
            return
        streams.wait(self._stream, streams.record(current))
        with streams.use(self._stream):
            yield
        streams.wait(current, streams.record(self._stream))

    def alone(self) -> AbstractContextManager[Any]:
        """Work on it, behind what it was given; nobody waits. For the thread."""
        return self._streams.use(self._stream)
