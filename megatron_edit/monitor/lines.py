"""A JSON Lines file that may still grow, end in half a line, be damaged, or be replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 22


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
        """Whether another file is there now, of a newer run, or this one was cut."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return self._inode is not None
        return self._inode is not None and (now.st_ino != self._inode or now.st_size < self._offset)

    @property
    def unread_bytes(self) -> int:
        """What has come since the last time."""
        try:
            return max(0, self.path.stat().st_size - self._offset)
        except FileNotFoundError:
            return 0

    def read(self, on_bytes: Callable[[int], object] = lambda _: None) -> Iterator[dict[str, Any]]:
        """The records of the lines that have come since the last time. Half a line waits.

        Args:
            on_bytes: told how many bytes were read, now and then.
        """
        try:
            source = self.path.open("rb")
        except FileNotFoundError:
            return
        with source:
            if self._inode is None:
                self._inode = self.path.stat().st_ino
            source.seek(self._offset)
            while chunk := source.read(CHUNK_BYTES):
                self._offset += len(chunk)
                on_bytes(len(chunk))
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                for line in whole:
                    if (record := self._parse(line)) is not None:
                        yield record

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except ValueError:  # also where the bytes are no text
            record = None
        if isinstance(record, dict):
            return record
        self.num_damaged += bool(line.strip())
        return None
