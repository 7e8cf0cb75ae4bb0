"""Polled wait for a collective that other ranks may join late, which still handles signals."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

UNLIMITED = timedelta(days=365)
POLL_SECONDS = 0.0002  # between two polls, at least
POLL_SHARE = 0.01  # of the time waited so far: a long wait needs fewer polls


class Waitable(Protocol):
    """A collective that was started."""

    @property
    def is_completed(self) -> bool:
        """Whether it is done or has failed."""


def poll_interval(waited: float, longest: float) -> float:
    """Seconds until the next poll, `longest` at most, after `waited` seconds."""
    return min(max(POLL_SECONDS, POLL_SHARE * waited), longest)


def wait_polling(work: Waitable, process_group: Any, poll: Callable[[], float]) -> None:
    """Wait for a collective in short sleeps, between which the interpreter handles signals.

    Args:
        work: a collective without a time-out.
        process_group: on which it runs.
        poll: called before each sleep; returns its length in seconds, or raises.
    """
    try:
        while not work.is_completed:
            time.sleep(poll())
    except BaseException:
        # Leak one reference to the group: its destructor would wait for this collective, which may
        # never end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        raise
