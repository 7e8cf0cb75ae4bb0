"""Whether a training script runs under the launcher (or a rehearsal of a launch)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_LAUNCHED: ContextVar[bool] = ContextVar("is_launched", default=False)


def is_launched() -> bool:
    """Whether a script runs under the launcher, in this context."""
    return _IS_LAUNCHED.get()


@contextmanager
def launched() -> Iterator[None]:
    """Inside, the script runs under the launcher, and activates nothing once more."""
    token = _IS_LAUNCHED.set(True)
    try:
        yield
    finally:
        _IS_LAUNCHED.reset(token)
