"""Root without its privileges over files, for tests of files that may not be read or written."""

from __future__ import annotations

import builtins
import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# <linux/capability.h>: a header, and two blocks of effective, permitted and inheritable bits.
_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_OVER_FILES = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH


def obey_file_modes() -> None:
    """From here on the modes of files hold for this thread, also where root runs it.

    *Mutates* the process: root stays root, without the capabilities to pass over modes. They come
    back for imports: becoming another user instead would fail wherever that user cannot read
    this clone, its environment or the interpreter.
    """
    if os.geteuid() != 0:
        return
    import_ = builtins.__import__

    def import_with_privileges(*args: Any, **kwargs: Any) -> Any:
        with _passing_over_modes():
            return import_(*args, **kwargs)

    _pass_over_modes(False)
    builtins.__import__ = import_with_privileges


@contextmanager
def _passing_over_modes() -> Iterator[None]:
    before = _pass_over_modes(True)
    try:
        yield
    finally:
        _pass_over_modes(before)


def _pass_over_modes(wanted: bool) -> bool:
    """Have the capabilities, as far as they are permitted, or not; whether they were there."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, bits = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, bits) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    before = bool(bits[0] & _OVER_FILES)
    bits[0] = bits[0] & ~_OVER_FILES | (bits[1] & _OVER_FILES if wanted else 0)
    if libc.capset(header, bits) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    return before
