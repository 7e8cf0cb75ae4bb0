"""Waiting for a collective that others may come to late, without being blind and deaf meanwhile."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

UNLIMITED = timedelta(days=365)
POLL_SECONDS = 0.0002  # between two polls, at least
POLL_SHARE = 0.01  # of the time waited so far: who waits long need not poll so often


class Waitable(Protocol):
    """A collective that was started."""

    @property
    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""


def poll_interval(waited: float, longest: float) -> float:
    """Seconds until the next poll, `longest` at most, after `waited` seconds."""
    return min(max(POLL_SECONDS, POLL_SHARE * waited), longest)


def wait_polling(work: Waitable, process_group: Any, poll: Callable[[], float]) -> None:
    """Wait in short slices, in which the interpreter handles signals.

    Args:
        work: a collective that has no time-out of its own.
        process_group: that it runs on.
        poll: called before each slice; gives its length in seconds, or raises.
    """
    try:
        while not work.is_completed:
            time.sleep(poll())
    except BaseException:
        # The group must never be destroyed: that would wait for this collective, which may never
        # end. So one reference to it is leaked.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        raise
