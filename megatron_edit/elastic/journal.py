"""The hub's journal: what was decided, durable before any replica hears of it.

One JSON object on each line of `journal.jsonl`, never rewritten:
`{"seq", "time", "term", "epoch", "event", ..., "hash"}`. `hash` covers the line and the hash before
it, so a line that was changed, lost or moved is found. Only the last line may be incomplete, after
a crash in the middle of a write: it was not sent to any replica, and opening the journal cuts it
off. A last line that was written, but perhaps not synced, is made durable before it is believed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_edit.elastic.channel import RUN_BYTES
from megatron_edit.elastic.messages import to_json
from megatron_edit.errors import EditError, UsageError

FILE_NAME = "journal.jsonl"
HASH_DIGITS = 32  # hexadecimal
EMPTY_HASH = "0" * HASH_DIGITS
READ_BYTES = 1 << 20
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
        event: `open`, `join`, `copied`, `leave`, `epoch`, `deal`, `commit`, `stop` or `end`.
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
        return to_json(self._record() | {"hash": self.hash}) + b"\n"

    def _record(self) -> dict[str, Any]:
        return {
            "seq": self.seq, "time": self.time, "term": self.term, "epoch": self.epoch,
            "event": self.event, **self.fields,
        }  # fmt: skip


class Journal:
    """An open journal. One process at a time has it.

    Args:
        descriptor: of the file, open for reading and appending, locked, and durable.
        clock: seconds since 1970.

    Attributes:
        path: see above.
        last: the last line; None where there is none.
        last_commit: the last line of a commit.
        run: identifier of the run, after its first line; empty before.

    Raises:
        UsageError: a line is damaged.
    """

    def __init__(self, descriptor: int, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._descriptor, self.path, self._clock = descriptor, path, clock
        self.last: JournalEntry | None = None
        self.last_commit: JournalEntry | None = None
        self.run, self._is_broken = b"", False
        size = 0
        for line, entry in _parse(_lines(descriptor), path):
            size += len(line)
            self._note(entry)
        if size < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        self._size = size

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the journal in a folder, and cut off an incomplete last line.

        Raises:
            UsageError: the folder cannot be used, another hub has it, or a line is damaged.
        """
        path = folder / FILE_NAME
        try:
            new = [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(
                f"--state-dir {folder}", f"must be a writable folder ({error.strerror})",
                "name another folder",
            ) from None  # fmt: skip
        try:
            _lock(descriptor, folder)
            _make_durable(descriptor, [folder, *(each.parent for each in new)])
            return cls(descriptor, path, clock)
        except BaseException:
            os.close(descriptor)
            raise

    def entries(self) -> Iterator[JournalEntry]:
        """All lines, in order, read from the file."""
        return (entry for _, entry in _parse(_lines(self._descriptor), self.path))

    def append(self, term: int, epoch: int, event: str, **fields: Any) -> JournalEntry:
        """Write a line, and return when it is on the disk and was read back.

        Raises:
            JournalError: it may not be on the disk, or another process has written.
        """
        if self._is_broken:
            raise JournalError(f"{self.path}: an earlier line may not be on the disk")
        entry = JournalEntry.of(self.last, self._clock(), term, epoch, event, fields)
        line, self._is_broken = entry.line(), True
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
        self._size, self._is_broken = self._size + len(line), False
        self._note(entry)
        return entry

    def _note(self, entry: JournalEntry) -> None:
        self.last = entry
        if entry.event == "commit":
            self.last_commit = entry
        if not self.run:
            self.run = bytes.fromhex(entry.hash)[:RUN_BYTES]

    def close(self) -> None:
        """Release the file."""
        os.close(self._descriptor)


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


def _make_durable(descriptor: int, folders: list[Path]) -> None:
    """Sync what a hub may have written without knowing whether it reached the disk.

    After a failed sync the system may hold lines in memory that it does not write any more, so the
    file is read from the disk again where the system allows it.

    Raises:
        UsageError: it cannot be synced.
    """
    try:
        os.fsync(descriptor)
        for folder in folders:
            _sync_folder(folder)
    except OSError as error:
        raise UsageError(
            f"--state-dir {folders[0]}", f"cannot be synced ({error.strerror})",
            "check the disk, or name another folder",
        ) from None  # fmt: skip
    with suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _lines(descriptor: int) -> Iterator[bytes]:
    """All complete lines of a file, with their ends."""
    rest, offset = b"", 0
    while chunk := os.pread(descriptor, READ_BYTES, offset):
        offset += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)


def _parse(lines: Iterator[bytes], path: Path) -> Iterator[tuple[bytes, JournalEntry]]:
    """All lines, with what they say.

    Raises:
        UsageError: a line is damaged.
    """
    last = EMPTY_HASH
    for number, line in enumerate(lines, 1):
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
        last = entry.hash
        yield line, entry


def _sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
