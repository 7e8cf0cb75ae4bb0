"""JSON Lines files whose disk may be full, or gone: lines wait in memory and are tried again."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_WAITING_BYTES = 8 << 20  # per file, of lines that could not be written yet


class LineWriter:
    """Appends to one file, of which it is the only writer.

    A line stands in the file as a whole or not at all: nothing is buffered below this class, and
    what a full disk has cut off is taken back.

    Args:
        path: of the file. Its folder is made where it is missing.

    Attributes:
        num_dropped: lines that were given up because too many waited already.
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
        """Take a line for the next `flush`.

        Args:
            line: an object without values that JSON does not know.
            is_last: whether it is kept however many lines wait.
        """
        text = json.dumps(line).encode() + b"\n"
        if self._waiting_bytes + len(text) > MAX_WAITING_BYTES and not is_last:
            self.num_dropped += 1
            return
        self._waiting.append(text)
        self._waiting_bytes += len(text)

    def flush(self) -> None:
        """Write all lines that wait.

        Raises:
            OSError: not all could be written; the others wait for the next call.
        """
        try:
            while self._waiting:
                _write_or_undo(self._open(), self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError:
            self._close()  # a handle that has gone stale is of no use later
            raise

    def close(self) -> None:
        """Write what waits, if that can be done, and close the file. Idempotent."""
        with suppress(OSError):
            self.flush()
        self._close()

    def _open(self) -> int:
        """The file, made anew where somebody has deleted it."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self._close()
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self._path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                _write_or_undo(self._descriptor, b"\n")  # half a line that could not be undone
        return self._descriptor

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _write_or_undo(descriptor: int, data: bytes) -> None:
    """Append all of it, or nothing.

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
