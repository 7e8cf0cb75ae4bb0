"""Records whether a training script runs under the launcher (or in a dry run of it)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_LAUNCHED: ContextVar[bool] = ContextVar("is_launched", default=False)


def is_launched() -> bool:
    """Whether the current context runs a script under the launcher."""
    return _IS_LAUNCHED.get()


@contextmanager
def launched() -> Iterator[None]:
    """Mark the context as run by the launcher, so that a patched script does not start it again."""
    token = _IS_LAUNCHED.set(True)
    try:
        yield
    finally:
        _IS_LAUNCHED.reset(token)
