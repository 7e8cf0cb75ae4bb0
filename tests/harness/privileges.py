"""Dropping root's privileges on files, for tests of unreadable or unwritable files."""

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


def apply_file_modes() -> None:
    """Make file modes apply to this thread from now on, even if root runs it.

    *Mutates* the process: root stays root, without the capabilities to bypass file modes. They are
    restored during imports. Becoming another user instead would fail if that user cannot read this
    clone, its environment or the interpreter.
    """
    if os.geteuid() != 0:
        return
    import_ = builtins.__import__

    def import_with_privileges(*args: Any, **kwargs: Any) -> Any:
        with _bypassing_modes():
            return import_(*args, **kwargs)

    _set_bypass(False)
    builtins.__import__ = import_with_privileges


@contextmanager
def _bypassing_modes() -> Iterator[None]:
    before = _set_bypass(True)
    try:
        yield
    finally:
        _set_bypass(before)


def _set_bypass(wanted: bool) -> bool:
    """Set or drop the capabilities, as far as permitted; return whether they were set."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, bits = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, bits) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    before = bool(bits[0] & _OVER_FILES)
    bits[0] = bits[0] & ~_OVER_FILES | (bits[1] & _OVER_FILES if wanted else 0)
    if libc.capset(header, bits) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    return before
