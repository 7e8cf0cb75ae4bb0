"""The stream that a sync computes on, wherever the host comes from to have a unit landed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
