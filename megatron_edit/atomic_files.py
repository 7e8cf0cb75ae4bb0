"""Atomic writes, for files that other processes may read at any time."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, *, keeps_mode: bool = False) -> None:
    """Write or replace a file atomically.

    It is not synced to disk; for files that must survive a power loss use `checkpoint`.

    Args:
        content: text is written as UTF-8.
        keeps_mode: whether to keep the permissions of the file, which must exist.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        if keeps_mode:
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
