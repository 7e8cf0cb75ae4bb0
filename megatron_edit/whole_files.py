"""Files that others may look at while they are written: there as a whole, or as they were."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, keeps_mode: bool = False) -> None:
    """Write a file, or replace it, at once.

    For what must outlast a loss of power, see `checkpoint`.

    Args:
        path: in a folder that is there.
        content: text is written as UTF-8.
        keeps_mode: whether the file is there already, and its permissions stay.

    Raises:
        OSError: it cannot be written.
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
