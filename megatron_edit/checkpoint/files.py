"""Checksums of the files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from megatron_edit.errors import UsageError

REMEDY = "load another checkpoint with --ckpt-step, or restore the file"


class FileRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and checksum of a file of a checkpoint."""

    size: int
    sha256: str


def record_of(path: Path) -> FileRecord:
    """Flush a file to disk and return its size and checksum. Releases the GIL while it reads."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _read(path)


def files_under(folder: Path, leave_out: Iterable[str] = ()) -> list[Path]:
    """Return all files under a folder, sorted, without the sub-folders named in `leave_out`."""
    left_out = {folder / name for name in leave_out}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and left_out.isdisjoint((path, *path.parents))
    )


def check_sizes(checkpoint: Path, files: Mapping[str, FileRecord]) -> None:
    """Check that all files exist and have the recorded size. Cheap: every rank calls it.

    Raises:
        UsageError: a file is missing, or has another size.
    """
    for name, record in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise UsageError(str(path), "a file of the checkpoint is missing", REMEDY)
        if path.stat().st_size != record.size:
            rule = f"must have {record.size} bytes, has {path.stat().st_size}"
            raise UsageError(str(path), rule, REMEDY)


def _read(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(os.fstat(file.fileno()).st_size, digest.hexdigest())


def check_content(checkpoint: Path, name: str, record: FileRecord) -> None:
    """Compare the checksum of one file with the recorded one.

    Raises:
        UsageError: it differs, or the file cannot be read.
    """
    path = checkpoint / name
    try:
        is_same = _read(path) == record
    except OSError as error:
        raise UsageError(str(path), f"cannot be read ({error.strerror})", REMEDY) from error
    if not is_same:
        raise UsageError(str(path), "is not what was saved (its checksum differs)", REMEDY)
