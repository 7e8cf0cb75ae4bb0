"""A JSON Lines file that may still grow, end in half a line, be damaged, or be replaced."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_edit.errors import UsageError

CHUNK_BYTES = 1 << 22
TAIL_BYTES = 1 << 18


def status(path: Path) -> os.stat_result | None:
    """Of a file or folder; None where there is none.

    Raises:
        UsageError: that cannot be found out.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError | ValueError) -> UsageError:
    """What to say of a file or folder that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(str(path), f"cannot be read ({reason})", "give the folder of --edit-log-dir")


def last_records(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file, of 256 KiB, that are JSON objects; none without a file."""
    found = status(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return []
    try:
        with path.open("rb") as source:
            source.seek(max(0, found.st_size - TAIL_BYTES))
            lines = source.read().split(b"\n")
    except OSError as error:
        raise unreadable(path, error) from None
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also where the bytes are no text
        return None
    return record if isinstance(record, dict) else None


class LineFile:
    """Reads each whole line once.

    Args:
        path: of the file; it need not be there yet.

    Attributes:
        path: the same.
        num_damaged: lines so far that are no JSON objects, or that nobody could make sense of.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_damaged = 0
        self._offset = 0
        self._rest = b""
        self._inode: int | None = None

    @property
    def was_replaced(self) -> bool:
        """Whether another file is there now, of a newer run, or none, or this one was cut."""
        if self._inode is None:
            return False
        now = status(self.path)
        return now is None or now.st_ino != self._inode or now.st_size < self._offset

    @property
    def unread_bytes(self) -> int:
        """What has come since the last time."""
        now = status(self.path)
        return 0 if now is None else max(0, now.st_size - self._offset)

    def read(self, on_bytes: Callable[[int], object] = lambda _: None) -> Iterator[dict[str, Any]]:
        """The records of the lines that have come since the last time. Half a line waits.

        Args:
            on_bytes: told how many bytes were read, now and then.

        Raises:
            UsageError: the file is there, and cannot be read.
        """
        for chunk in self._chunks():
            self._offset += len(chunk)
            on_bytes(len(chunk))
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                if (record := self._parse(line)) is not None:
                    yield record

    def _chunks(self) -> Iterator[bytes]:
        found = status(self.path)
        if found is None:
            return
        try:
            if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
                raise ValueError("no file")
            with self.path.open("rb") as source:
                inode = os.fstat(source.fileno()).st_ino
                self._inode = inode if self._inode is None else self._inode
                if inode != self._inode:  # replaced just now: the next reading begins anew
                    return
                source.seek(self._offset)
                while chunk := source.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:  # renamed just now
            return
        except (OSError, ValueError) as error:
            raise unreadable(self.path, error) from None

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if (record := _record(line)) is not None:
            return record
        self.num_damaged += bool(line.strip())
        return None
