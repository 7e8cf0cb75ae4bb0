"""The console belongs to replica 0; the others write to files of their own."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

PREFIX = "[edit]"


def say(text: str) -> None:
    """Print one line for people, at once."""
    sys.stdout.write(f"{PREFIX} {text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Print one line on the error stream, which is never dropped."""
    sys.stderr.write(f"{PREFIX} {text}\n")
    sys.stderr.flush()


def move_output_to(path: Path | None) -> None:
    """Send this process's standard output, and its errors where there is a file, to `path`.

    It works on file descriptors, so that libraries in C are moved too. Without a file only the
    output is dropped: errors must stay visible somewhere. An uncaught exception is always shown
    on the console that the process was started with, too.

    Args:
        path: file to append to, shared by the ranks of one replica; None drops the output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(
        path or os.devnull, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if path else 0), 0o644
    )
    os.dup2(target, 1)
    if path is not None:
        console = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
        os.dup2(target, 2)

        def show_twice(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            for stream in (sys.stderr, console):
                traceback.print_exception(kind, error, trace, file=stream)

        sys.excepthook = show_twice
    os.close(target)
