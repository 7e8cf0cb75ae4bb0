"""Console output: replica 0 writes to the console, the other replicas to files of their own.

Failed writes, to a full disk or a closed pipe, never end a training: they are dropped
(`tolerate_broken_output`).
"""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from megatron_edit.errors import EditError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PREFIX = "[edit]"
_STREAMS = ("stdout", "stderr")
_RANK = re.compile(r"^\[rank\d+\]: ")  # PyTorch's prefix to each line of an error


def say(text: str) -> None:
    """Print one line on standard output, and flush it."""
    sys.stdout.write(f"{PREFIX} {text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Print one line on standard error, and flush it.

    It appears even where standard output is dropped for lack of a file.
    """
    sys.stderr.write(f"{PREFIX} {text}\n")
    sys.stderr.flush()


class _FirstRecord(logging.Handler):
    """Prints the first warning of a library's log, and drops the others."""

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record of the log."""
        self.setLevel(logging.CRITICAL + 1)
        text = record.getMessage().splitlines()[0]
        warn(f"{record.name}: {text}; training goes on, later warnings of it are not shown")


def show_one_warning(logger: str) -> None:
    """Show one warning of a library that exports in threads: there may be one per export.

    Args:
        logger: name of its log, whose handlers are replaced.
    """
    log = logging.getLogger(logger)
    log.propagate, log.handlers = False, [_FirstRecord(logging.WARNING)]


class DroppingFile(io.FileIO):
    """A file descriptor whose failing writes are dropped, and counted.

    Attributes:
        num_lost_bytes: bytes dropped so far.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.num_lost_bytes = 0
        self._is_line_partial = False  # whether the last write may have left a partial line

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written, and report everything as written."""
        view = memoryview(data).cast("B")
        try:
            if self._is_line_partial:
                super().write(b"\n")
                self._is_line_partial = False
            while (written := super().write(view)) is None:
                select.select([], [self.fileno()], [])  # a full non-blocking pipe
        except OSError:
            self._is_line_partial = True
            self.num_lost_bytes += len(view)
            return len(view)
        return written


def tolerate_broken_output() -> Callable[[], None]:
    """Drop failed writes of Python's standard output and standard error instead of raising.

    Libraries in C ignore such errors. A stream without a file descriptor is not changed.

    Returns:
        A function that undoes it, and reports on standard error how many bytes were lost.
    """
    before: dict[str, tuple[TextIO, TextIO, DroppingFile]] = {}
    for name in _STREAMS:
        stream = getattr(sys, name)
        with suppress(AttributeError, OSError, ValueError):  # also io.UnsupportedOperation
            stream.flush()
            raw = DroppingFile(stream.fileno())
            tolerant = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, tolerant)
            before[name] = stream, tolerant, raw

    def undo() -> None:
        for name, (stream, tolerant, raw) in before.items():
            tolerant.flush()
            if raw.num_lost_bytes:
                warn(f"{raw.num_lost_bytes} bytes of {name} could not be written, and are lost")
            if getattr(sys, name) is tolerant:
                setattr(sys, name, stream)
        before.clear()

    return undo


def name_replica_in_tracebacks(replica: int, rank: int) -> None:
    """Prefix each line of an uncaught error with ``[replica1 rank0]: ``.

    PyTorch's own prefix ``[rank0]: `` does not identify the replica. *Mutates* ``sys.excepthook``;
    the previous hook prints the error.
    """
    print_error = sys.excepthook

    def print_with_replica(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with redirect_stderr(io.StringIO()) as printed:
            print_error(kind, error, trace)
        lines = printed.getvalue().removesuffix("\n").split("\n")
        prefix = f"[replica{replica} rank{rank}]: "
        sys.stderr.write("".join(f"{prefix}{_RANK.sub('', line)}\n" for line in lines))
        sys.stderr.flush()

    sys.excepthook = print_with_replica


@dataclass
class MovedOutput:
    """The original targets of standard output and standard error.

    Attributes:
        saved: copies of the moved file descriptors, by number.
    """

    saved: dict[int, int]

    def record(self, error: BaseException) -> None:
        """Write an error to the file of the output, too; the caller reports it on the console."""
        if 2 not in self.saved or isinstance(error, SystemExit):
            return
        if isinstance(error, EditError):
            warn(str(error))
        else:
            traceback.print_exception(error, file=sys.stderr)

    def restore(self) -> None:
        """Restore the original file descriptors. Idempotent."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in self.saved.items():
            os.dup2(copy, number)
            os.close(copy)
        self.saved.clear()


def move_output_to(path: Path | None) -> MovedOutput:
    """Redirect this process's standard output and standard error to `path`.

    It works on file descriptors, so that output of C libraries is redirected too. Without a file
    only standard output is dropped: errors must remain visible.

    Args:
        path: file to append to, shared by the ranks of one replica; None drops the output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    target = None
    if path is not None:
        try:
            target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            warn(f"{path} cannot be opened ({error.strerror}); this rank's output is dropped")
    numbers = (1,) if target is None else (1, 2)
    if target is None:
        target = os.open(os.devnull, os.O_WRONLY)
    moved = MovedOutput({number: os.dup(number) for number in numbers})
    for number in numbers:
        os.dup2(target, number)
    os.close(target)
    return moved
