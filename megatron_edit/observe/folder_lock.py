"""A lock that allows one run at a time in a folder of event files."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.observe.console import say, warn

NAME = "run.lock"
ENDING_SECONDS = 10.0  # time for a run that is just ending
# A file server keeps the locks of a crashed machine until its lease ends, a minute or two.
LEASE_SECONDS = 180.0
_POLL_SECONDS = 0.25
_LOCKED = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """A lock of the operating system on a file in the folder.

    It is released when the process that holds it ends, in whatever way; forked processes do not
    inherit it. The file is never removed: else two runs could lock two files of the same name.

    Args:
        folder: `--edit-log-dir`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> UsageError | None:
        """Lock the folder; return an error if another run holds the lock.

        Blocks while another run holds it: up to `ENDING_SECONDS`, or `LEASE_SECONDS` for a run on
        another machine, which may have crashed.

        If the file cannot be locked (a file system without locks, a full disk), the run continues
        without a lock, after a warning.
        """
        path = self._folder / NAME
        try:
            self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if (holder := self._wait_for_lock(descriptor)) is not None:
                self.release()
                return UsageError(
                    f"{flag('log_dir')} {self._folder}",
                    f"another run writes its event files there ({_shown(holder)})",
                    "give each run a folder of its own, or start this one when the other has ended",
                )
            with suppress(OSError):  # full disk: only the name of the holder is missing
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        except OSError as error:
            warn(
                f"{path} cannot be locked ({error.strerror}); a second run into this folder would "
                "not be noticed"
            )
        return None

    def release(self) -> None:
        """Release the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> str | None:
        """Wait for the lock; return its holder if it is held for too long, else None."""
        began, is_announced = time.monotonic(), False
        while not _try_to_lock(descriptor):
            waited = time.monotonic() - began
            if waited > ENDING_SECONDS:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                host = holder.partition(" ")[0]
                if host in ("", socket.gethostname()) or waited > LEASE_SECONDS:
                    return holder
                if not is_announced:
                    say(
                        f"{flag('log_dir')} {self._folder}: locked by {_shown(holder)}, which may "
                        f"have gone down; waiting for the lock, {LEASE_SECONDS:.0f} s at most"
                    )
                    is_announced = True
            time.sleep(_POLL_SECONDS)
        return None


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        raise
    return True


def _shown(holder: str) -> str:
    host, _, process = holder.partition(" ")
    return f"process {process} on {host}" if process else "another process"
