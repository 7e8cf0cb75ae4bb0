"""The console belongs to replica 0; the others write to files of their own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megatron_edit.errors import EditError

PREFIX = "[edit]"
_RANK = re.compile(r"^\[rank\d+\]: ")  # PyTorch's, before each line of an error


def say(text: str) -> None:
    """Print one line for people, at once."""
    sys.stdout.write(f"{PREFIX} {text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Print one line on the error stream, which is never dropped."""
    sys.stderr.write(f"{PREFIX} {text}\n")
    sys.stderr.flush()


def name_replica_in_tracebacks(replica: int, rank: int) -> None:
    """Begin the lines of an error that ends this process with ``[replica1 rank0]: ``.

    PyTorch begins them with ``[rank0]: ``, which every replica has one of. *Mutates*
    ``sys.excepthook``; what it was prints the error.
    """
    print_error = sys.excepthook

    def print_with_replica(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            print_error(kind, error, trace)
        lines = printed.getvalue().removesuffix("\n").split("\n")
        prefix = f"[replica{replica} rank{rank}]: "
        sys.stderr.write("".join(f"{prefix}{_RANK.sub('', line)}\n" for line in lines))
        sys.stderr.flush()

    sys.excepthook = print_with_replica


@dataclass
class MovedOutput:
    """Where standard output and errors were before they were moved.

    Attributes:
        saved: copies of the moved file descriptors, by number.
    """

    saved: dict[int, int]

    def record(self, error: BaseException) -> None:
        """Write an error to where the output went; the console will hear of it, too."""
        if 2 not in self.saved or isinstance(error, SystemExit):
            return
        if isinstance(error, EditError):
            warn(str(error))
        else:
            traceback.print_exception(error, file=sys.stderr)

    def restore(self) -> None:
        """Give the process its console back. Idempotent."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in self.saved.items():
            os.dup2(copy, number)
            os.close(copy)
        self.saved.clear()


def move_output_to(path: Path | None) -> MovedOutput:
    """Send this process's standard output, and its errors where there is a file, to `path`.

    It works on file descriptors, so that libraries in C are moved too. Without a file only the
    output is dropped: errors must stay visible somewhere.

    Args:
        path: file to append to, shared by the ranks of one replica; None drops the output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if path else 0)
    target = os.open(path or os.devnull, flags, 0o644)
    numbers = (1,) if path is None else (1, 2)
    moved = MovedOutput({number: os.dup(number) for number in numbers})
    for number in numbers:
        os.dup2(target, number)
    os.close(target)
    return moved
