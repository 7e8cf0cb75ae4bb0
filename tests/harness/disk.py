"""A small file system that a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a small file system on a new folder; skip the test if that is not possible.

    Args:
        folder: mount point, which is created.
        num_bytes: size of the file system.
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
    """Fill the disk and return the file that takes the space."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    raise AssertionError("the disk has no size limit")
