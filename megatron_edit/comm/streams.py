"""Streams of a device: the only place that calls `torch.cuda` for them.

Work is given to a stream and runs in the order in which it was given; streams run beside each
other, unless one waits for an event of another. Whoever needs streams is handed an object that has
these operations, by its `Group` or by who made it, so that a test can hand out another one that
writes down what it is told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

type Stream = Any  # whatever `current` and `new` return; None on the CPU
type Event = Any  # whatever `record` returns; None on the CPU


class Streams(Protocol):
    """The streams of one device. Nothing but `synchronize` lets the host wait."""

    def current(self) -> Stream:
        """The stream that work of this thread is given to."""

    def new(self) -> Stream:
        """Another stream."""

    def serve_thread(self) -> None:
        """Make the device that of this thread: a thread begins on the first one."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, `stream` is the current one: work and new tensors are its own."""

    def record(self, stream: Stream) -> Event:
        """An event behind all that `stream` was given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What `stream` is given from here on runs after `event`."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Memory of `tensor`, once free, is given out again only after what `stream` was given.

        Needed where `stream` is not the one that was current when the tensor was made.
        """

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`. Blocks: the host."""

    def is_done(self, event: Event) -> bool:
        """Whether `event` has come to pass. Waits for nothing."""


class CudaStreams:
    """Those of CUDA.

    Args:
        device: whose.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.index is None:  # "cuda": the current device of the thread that calls this
            self._device = torch.device(device.type, torch.cuda.current_device())

    def current(self) -> Stream:
        """The CUDA stream that is current in this thread."""
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        """Another CUDA stream of the device."""
        return torch.cuda.Stream(self._device)

    def serve_thread(self) -> None:
        """Make the device the current one of this thread; a new thread begins on device 0."""
        torch.cuda.set_device(self._device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside, `stream` is the current one: kernels and memory of new tensors are its own."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def record(self, stream: Stream) -> Event:
        """A CUDA event behind all that `stream` was given so far."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let `stream` do later work only after `event`; the host goes on."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""
        tensor.record_stream(stream)

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`. Blocks: the host."""
        event.synchronize()

    def is_done(self, event: Event) -> bool:
        """Whether the device has come past `event`. Waits for nothing."""
        return bool(event.query())


class NoStreams:
    """On the CPU: all work is done at once, by the host."""

    def current(self) -> Stream:
        """None: there are no streams."""
        return None

    def new(self) -> Stream:
        """None: there are no streams."""
        return None

    def serve_thread(self) -> None:
        """Do nothing: a thread has no device of its own."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context that changes nothing."""
        return nullcontext()

    def record(self, stream: Stream) -> Event:
        """None: all work before it is done."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """Do nothing: all work before `event` is done."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: no work is left that could use the memory."""

    def synchronize(self, event: Event) -> None:
        """Return at once: all work before `event` is done."""

    def is_done(self, event: Event) -> bool:
        """True: all work before `event` is done."""
        return True


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
