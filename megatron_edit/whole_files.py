"""Files that others may look at while they are written: there as a whole, or as they were."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, or replace it, at once.

    For what must outlast a loss of power, see `checkpoint`.

    Args:
        path: in a folder that is there.
        text: its content, written as UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
