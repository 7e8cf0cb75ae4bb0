"""The hub's journal: what was decided, durable before any replica hears of it.

One JSON object on each line of `journal.jsonl`, never rewritten:
`{"seq", "time", "term", "epoch", "event", ..., "hash"}`. `hash` covers the line and the hash before
it, so a line that was changed, lost or moved is found. Only the last line may be incomplete, after
a crash in the middle of a write: it was not sent to any replica, and opening the journal cuts it
off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_edit.elastic.messages import to_json
from megatron_edit.errors import EditError, UsageError

FILE_NAME = "journal.jsonl"
HASH_DIGITS = 32  # hexadecimal
EMPTY_HASH = "0" * HASH_DIGITS
OWN_FIELDS = ("seq", "time", "term", "epoch", "event", "hash")


class JournalError(EditError):
    """The journal cannot be trusted any more: the hub ends before it tells anybody anything."""

    exit_code = 4


@dataclass(frozen=True)
class JournalEntry:
    """One line.

    Attributes:
        seq: number of the line, from 1.
        time: seconds since 1970, on the hub's machine.
        term: how often a hub has been started on this journal, when the line was written.
        epoch: number of the membership that was valid, or that the line begins.
        event: `open`, `join`, `leave`, `epoch`, `commit` or `end`.
        fields: what else the event has.
        hash: of the line and of all before it.
    """

    seq: int
    time: float
    term: int
    epoch: int
    event: str
    fields: Mapping[str, Any]
    hash: str

    @classmethod
    def of(cls, previous: Self | None, moment: float, term: int, epoch: int, event: str,
           fields: Mapping[str, Any]) -> Self:  # fmt: skip
        """The line after `previous`."""
        seq, last = (0, EMPTY_HASH) if previous is None else (previous.seq, previous.hash)
        entry = cls(seq + 1, moment, term, epoch, event, dict(fields), "")
        return cls(seq + 1, moment, term, epoch, event, dict(fields), entry.hash_after(last))

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Read a line.

        Raises:
            ValueError: not such a line.
        """
        record = json.loads(line)
        try:
            own = {name: record.pop(name) for name in OWN_FIELDS}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("lacks a field") from error
        return cls(**own, fields=record)

    def hash_after(self, previous: str) -> str:
        """The hash that this line must have after a line whose hash is `previous`."""
        text = previous.encode() + to_json(self._record(), sorts=True)
        return hashlib.sha256(text).hexdigest()[:HASH_DIGITS]

    def line(self) -> bytes:
        """The line, with its end."""
        record = self._record() | {"hash": self.hash}
        return to_json(record) + b"\n"

    def _record(self) -> dict[str, Any]:
        own = {
            "seq": self.seq, "time": self.time, "term": self.term, "epoch": self.epoch,
            "event": self.event,
        }  # fmt: skip
        return own | dict(self.fields)


class Journal:
    """An open journal. One process at a time has it.

    Args:
        descriptor: of the file, open for reading and appending, and locked.
        path: of the file.
        entries: what it holds.
        clock: seconds since 1970.

    Attributes:
        path: see above.
        entries: all lines, in order.
    """

    def __init__(
        self, descriptor: int, path: Path, entries: list[JournalEntry],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._descriptor, self.path, self.entries, self._clock = descriptor, path, entries, clock
        self._size = os.fstat(descriptor).st_size

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the journal in a folder, and cut off an incomplete last line.

        Raises:
            UsageError: the folder cannot be used, another hub has it, or a line is damaged.
        """
        path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _sync_folder(folder)
        except OSError as error:
            raise UsageError(
                f"--state-dir {folder}", f"must be a writable folder ({error.strerror})",
                "name another folder",
            ) from None  # fmt: skip
        try:
            _lock(descriptor, folder)
            entries = _read(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, path, entries, clock)

    @property
    def last(self) -> JournalEntry | None:
        """The last line; None where there is none."""
        return self.entries[-1] if self.entries else None

    def append(self, term: int, epoch: int, event: str, **fields: Any) -> JournalEntry:
        """Write a line, and return when it is on the disk and was read back.

        Raises:
            JournalError: it may not be on the disk, or another process has written.
        """
        entry = JournalEntry.of(self.last, self._clock(), term, epoch, event, fields)
        line = entry.line()
        try:
            if os.fstat(self._descriptor).st_size != self._size:
                raise JournalError(f"{self.path}: another process has written to it")
            if os.write(self._descriptor, line) != len(line):
                raise JournalError(f"{self.path}: a line was written in part; is the disk full?")
            os.fsync(self._descriptor)
            if os.pread(self._descriptor, len(line) + 1, self._size) != line:
                raise JournalError(f"{self.path}: a line reads otherwise than it was written")
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written ({error.strerror})") from error
        self._size += len(line)
        self.entries.append(entry)
        return entry

    def close(self) -> None:
        """Release the file."""
        os.close(self._descriptor)


def read_journal(folder: Path) -> list[JournalEntry]:
    """The complete lines of a journal, which a hub may have open.

    Raises:
        UsageError: there is none, or a line is damaged.
    """
    path = folder / FILE_NAME
    try:
        return _parse(path.read_bytes(), path)[0]
    except OSError as error:
        raise UsageError(
            f"{path}", f"cannot be read ({error.strerror})", "name the hub's --state-dir"
        ) from None


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"--state-dir {folder}", "another hub has it", "stop that hub, or name another folder"
        ) from None
    except OSError as error:
        raise UsageError(
            f"--state-dir {folder}", f"its file system cannot lock files ({error.strerror})",
            "name a folder of a local disk",
        ) from None  # fmt: skip


def _read(descriptor: int, path: Path) -> list[JournalEntry]:
    """All complete lines; what follows them is cut off."""
    content = b""
    while chunk := os.pread(descriptor, 1 << 20, len(content)):
        content += chunk
    entries, size = _parse(content, path)
    if size < len(content):
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    return entries


def _parse(content: bytes, path: Path) -> tuple[list[JournalEntry], int]:
    """All complete lines, and how many bytes they are."""
    complete, _, _ = content.rpartition(b"\n")
    entries: list[JournalEntry] = []
    last = EMPTY_HASH
    for number, line in enumerate(complete.splitlines() if complete else (), 1):
        try:
            entry = JournalEntry.parse(line)
            if entry.seq != number or entry.hash != entry.hash_after(last):
                raise ValueError("does not follow from the lines before it")
        except ValueError as error:
            raise UsageError(
                f"{path}, line {number}", f"is damaged ({error})",
                "restore the file from a copy, or start the run from a checkpoint with an empty "
                "--state-dir",
            ) from None  # fmt: skip
        entries.append(entry)
        last = entry.hash
    return entries, len(complete) + 1 if complete else 0


def _sync_folder(folder: Path) -> None:
    """Make the file's entry in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
