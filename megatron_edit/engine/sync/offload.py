"""Streams: copies between host and device beside compute, and the one that a sync computes on.

On the CPU there are no streams: the same calls copy at once, so that their memory can be counted
where tests run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceCopy:
    """A tensor on its way to the device.

    Attributes:
        tensor: where it arrives.
        event: when it has; None where it is there already.
    """

    tensor: Tensor
    event: Any = None

    def ready(self) -> Tensor:
        """The tensor; the current stream waits for it, the host does not."""
        if self.event is not None:
            compute = torch.cuda.current_stream(self.tensor.device)
            compute.wait_event(self.event)
            self.tensor.record_stream(compute)  # the memory belongs to the copying stream
        return self.tensor


class OffloadStreams:
    """A stream to the device and one back, so that both directions run at once.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up, self._down = None, None
        if device.type == "cuda":
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def fence(self) -> None:
        """Let uploads from here on see all that was downloaded before."""
        if self._up is not None:
            self._up.wait_stream(self._down)

    def wait(self) -> None:
        """Let the host wait for all that was downloaded."""
        if self._down is not None:
            self._down.synchronize()

    def upload(self, source: Tensor) -> DeviceCopy:
        """Begin to copy `source`, pinned, to a new tensor on the device."""
        if self._up is None:
            return DeviceCopy(torch.empty_like(source, device=self.device).copy_(source))
        with torch.cuda.stream(self._up):
            target = torch.empty_like(source, device=self.device, pin_memory=False)
            target.copy_(source, non_blocking=True)
            return DeviceCopy(target, self._up.record_event())

    def download(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source` to `target`, pinned, after what computes it now."""
        if self._down is None:
            target.copy_(source)
            return
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._down)


class HomeStream:
    """Keeps the work of a sync on one stream of the device.

    Megatron runs some modules, and with them their gathers, on streams of their own
    (`--moe-shared-expert-overlap`). Buffers of a sync come from the pool of the stream that
    training computes on and go back there, so that is where they must be read.

    Args:
        device: of the parameters; on a CPU there is nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def remember(self) -> None:
        """The current stream is the one."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work on it; what came before on the current stream is seen, and what follows sees it."""
        if self._stream is None or self._stream == torch.cuda.current_stream(self._device):
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
