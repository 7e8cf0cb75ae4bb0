"""Free ports for processes that tests start."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import suppress

# Below the ports of outgoing connections, which could take a port before the ranks use it.
# Concurrent processes must not find the same port free either: each process binds the first port
# of a block for its lifetime, and hands out the others.
_FIRST, _BLOCK, _LAST = 15_000, 500, 32_000


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine on which no process listens now."""
    found: list[int] = []
    while len(found) < count:
        port = next(_candidates())
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    return found


@functools.cache
def _candidates() -> Iterator[int]:
    """Return an endless iterator over the ports of this process's block."""
    for first in range(_FIRST, _LAST, _BLOCK):
        claim = socket.socket()
        try:
            claim.bind(("", first))
        except OSError:
            claim.close()
            continue
        return _of_block(claim, first)
    raise RuntimeError(f"every block of ports from {_FIRST} to {_LAST} is taken")


def _of_block(claim: socket.socket, first: int) -> Iterator[int]:
    with claim:
        yield from itertools.cycle(range(first + 1, first + _BLOCK))
