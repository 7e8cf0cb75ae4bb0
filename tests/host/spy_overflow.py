"""Hooks that overflow or count gradients of synchronous steps."""

from __future__ import annotations

from tests.host.spy import overflow_one_replica, record


def overflow_and_record() -> None:
    """Call `overflow_one_replica` and `record`."""
    overflow_one_replica()
    record()
