"""A store that counts what one rank sends to it and reads from it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


class CountingStore(dist.Store):  # type: ignore[misc]
    """Passes calls on to a store that all ranks share, and counts them for one rank.

    Args:
        inner: shared by the ranks.

    Attributes:
        sent, received: bytes of values.
        num_calls: of all kinds.
        num_clones: further connections.
    """

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.sent = self.received = self.num_calls = self.num_clones = 0

    @property
    def traffic(self) -> int:
        """Bytes of values in both directions."""
        return self.sent + self.received

    def _send(self, *values: str | bytes) -> None:
        self.num_calls += 1
        self.sent += sum(map(len, values))

    def _receive(self, *values: bytes) -> None:
        self.num_calls += 1
        self.received += sum(map(len, values))

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._send(value)
        self.inner.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several values."""
        self._send(*values)
        self.inner.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        value = bytes(self.inner.get(key))
        self._receive(value)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        values = [bytes(value) for value in self.inner.multi_get(keys)]
        self._receive(*values)
        return values

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._receive(b"8 bytes.")
        return int(self.inner.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._receive(b"1")
        return bool(self.inner.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta = PATIENCE) -> None:
        """Wait until all keys are set."""
        self._receive()
        self.inner.wait(keys, timeout)

    def clone(self) -> CountingStore:
        """Count as this one does."""
        self.num_clones += 1
        return self

    def has_extended_api(self) -> bool:
        """No: torch then uses only `set`, `get`, `check` and `wait`."""
        return False
