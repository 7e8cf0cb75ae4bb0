"""A file system with little room, which a test fills."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own in a new folder; where none can be mounted, the test is skipped.

    Args:
        folder: is made.
        num_bytes: its size.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Leave no byte of room; the file that takes it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    raise AssertionError("a disk without an end")
