"""Streams of a device, and page-locked memory: the only module that calls `torch.cuda` for them.

Work on a stream runs in the order in which it was queued; streams run concurrently, unless one
waits for an event of another. Users of streams receive an object with these operations, from their
`Group` or their creator, so that tests can pass one that records the calls.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

type Stream = Any  # whatever `current` and `new` return; None on the CPU
type Event = Any  # whatever `record` returns; None on the CPU
type Mark = Any  # whatever `mark` returns
type Span = tuple[Mark, Mark]  # begin and end


class Streams(Protocol):
    """The streams of one device. Only `synchronize` and `seconds` block the host."""

    def current(self) -> Stream:
        """The stream on which this thread queues work."""

    def new(self) -> Stream:
        """Create a stream."""

    def use_device_in_thread(self) -> None:
        """Make the device the current one of this thread; a new thread begins on device 0."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` the current one: it gets new work, and its pool new tensors."""

    def record(self, stream: Stream) -> Event:
        """Record an event after all work queued on `stream` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for `event`."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Do not reuse the memory of `tensor` before work queued on `stream` is done.

        Needed where `stream` was not the current one when the tensor was allocated.
        """

    def synchronize(self, event: Event) -> None:
        """Block the host until `event`."""

    def is_done(self, event: Event) -> bool:
        """Whether the device has passed `event`. Does not block."""

    def mark(self) -> Mark:
        """The time at which the device passes this point of the current stream. Does not block."""

    def seconds(self, span: Span) -> float:
        """Seconds between two marks. Blocks the host until the device has passed the second."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.index is None:  # "cuda": the current device of the thread that calls this
            self._device = torch.device(device.type, torch.cuda.current_device())

    def current(self) -> Stream:
        """The CUDA stream that is current in this thread."""
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        """Create a CUDA stream of the device."""
        return torch.cuda.Stream(self._device)

    def use_device_in_thread(self) -> None:
        """Make the device the current one of this thread; a new thread begins on device 0."""
        torch.cuda.set_device(self._device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` the current one: it gets new kernels, and its pool new tensors."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def record(self, stream: Stream) -> Event:
        """Record a CUDA event after all work queued on `stream` so far."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for `event`. Does not block the host."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""
        tensor.record_stream(stream)

    def synchronize(self, event: Event) -> None:
        """Block the host until `event`."""
        event.synchronize()

    def is_done(self, event: Event) -> bool:
        """Whether the device has passed `event`. Does not block."""
        return bool(event.query())

    def mark(self) -> Mark:
        """A CUDA event with the time, recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current())
        return event

    def seconds(self, span: Span) -> float:
        """Seconds between two such events. Blocks the host until the second."""
        begin, end = span
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


class NoStreams:
    """The CPU has no streams: the host does all work immediately."""

    def current(self) -> Stream:
        """None: there are no streams."""
        return None

    def new(self) -> Stream:
        """None: there are no streams."""
        return None

    def use_device_in_thread(self) -> None:
        """Do nothing: threads on the CPU have no current device."""

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

    def mark(self) -> Mark:
        """Now, in seconds."""
        return time.monotonic()

    def seconds(self, span: Span) -> float:
        """Seconds between two marks."""
        begin, end = span
        return float(end - begin)


def page_locked(numel: int) -> Tensor | None:
    """Page-locked host memory of exactly this size, fp32, uninitialized; None if CUDA refuses it.

    It stays page-locked until the process ends: for tensors that live as long.
    """
    flat = torch.empty(numel)
    code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    return flat if code == 0 else None


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
