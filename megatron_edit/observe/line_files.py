"""Writing and reading of JSON Lines files.

The disk of a writer may be full or missing: lines wait in memory and are retried. A file that is
read may still grow, end in a partial line, be damaged, or be replaced.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_edit.errors import UsageError

MAX_WAITING_BYTES = 8 << 20  # per file, of lines that could not be written yet
TAIL_BYTES = 64 << 10


class LineWriter:
    """Appends to one file, of which it is the only writer.

    A line is written completely or not at all: nothing is buffered below this class, and a line
    that a full disk truncated is removed.

    Args:
        path: of the file. Its folder is made where it is missing.

    Attributes:
        num_dropped: lines that were dropped because too many were waiting.
    """

    def __init__(self, path: Path) -> None:
        self.num_dropped = 0
        self._path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def append(self, line: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Queue a line for the next `flush`.

        Args:
            line: an object with JSON values only.
            is_last: whether it is queued however many lines wait.
        """
        text = json.dumps(line).encode() + b"\n"
        if self._waiting_bytes + len(text) > MAX_WAITING_BYTES and not is_last:
            self.num_dropped += 1
            return
        self._waiting.append(text)
        self._waiting_bytes += len(text)

    def flush(self) -> None:
        """Write all waiting lines.

        Raises:
            OSError: not all could be written; the rest wait for the next call.
        """
        try:
            while self._waiting:
                _write_or_undo(self._open(), self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError:
            self._close()  # the file handle may be stale
            raise

    def close(self) -> None:
        """Write the waiting lines if possible, and close the file. Idempotent."""
        with suppress(OSError):
            self.flush()
        self._close()

    def _open(self) -> int:
        """Return the open file; it is created again if it was deleted."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self._close()
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                _write_or_undo(self._descriptor, b"\n")  # ends a remaining partial line
        return self._descriptor

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _write_or_undo(descriptor: int, data: bytes) -> None:
    """Append all the data, or nothing.

    Raises:
        OSError: it could not be written.
    """
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def stat_or_none(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder; None where there is none.

    Raises:
        UsageError: the status cannot be read.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise unreadable_error(path, error) from None


def unreadable_error(path: Path, error: OSError | ValueError) -> UsageError:
    """Return the error for a file or folder that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(str(path), f"cannot be read ({reason})", "give the folder of --edit-log-dir")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also where the bytes are not text
        return None
    return record if isinstance(record, dict) else None


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last record in the last 64 KiB of a file; None where there is none."""
    try:
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = source.read().split(b"\n")
    except OSError:
        return None
    return next((found for line in reversed(lines) if (found := _record(line))), None)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file up to the first damaged line; empty without a file."""
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        if (record := _record(line)) is None:
            break
        records.append(record)
    return records


class LineReader:
    """Reads each complete line once, as the file grows.

    Args:
        path: of the file; it need not exist yet.

    Attributes:
        path: of the file.
        num_damaged: lines so far that are not JSON objects, or that a caller could not use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start_over()

    def start_over(self) -> None:
        """Let the next call of `read` begin with the first line."""
        self.num_damaged = 0
        self._offset = 0
        self._rest = b""
        self._inode: int | None = None

    @property
    def was_replaced(self) -> bool:
        """Whether the file was replaced by a newer run's, deleted or truncated."""
        if self._inode is None:
            return False
        now = stat_or_none(self.path)
        return now is None or now.st_ino != self._inode or now.st_size < self._offset

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the lines written since the last call. A partial line waits.

        Raises:
            UsageError: the file exists and cannot be read.
        """
        new = self._new_bytes()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            if (record := _record(line)) is not None:
                yield record
            else:
                self.num_damaged += bool(line.strip())

    def _new_bytes(self) -> bytes:
        found = stat_or_none(self.path)
        if found is None:
            return b""
        try:
            if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
                raise ValueError("no file")
            with self.path.open("rb") as source:
                inode = os.fstat(source.fileno()).st_ino
                self._inode = inode if self._inode is None else self._inode
                if inode != self._inode:  # replaced just now: the next call starts over
                    return b""
                source.seek(self._offset)
                return source.read()
        except FileNotFoundError:  # renamed just now
            return b""
        except (OSError, ValueError) as error:
            raise unreadable_error(self.path, error) from None
