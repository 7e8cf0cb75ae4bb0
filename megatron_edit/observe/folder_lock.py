"""One run at a time in a folder of event files."""

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
ENDING_SECONDS = 10.0  # for a run that is just ending
# A file server keeps the locks of a machine that went down until its lease ends, a minute or two.
LEASE_SECONDS = 180.0
_POLL_SECONDS = 0.25
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """A lock of the operating system, on a file in the folder.

    It ends with the process that holds it, however that ends, and processes that are forked from it
    do not hold it. The file stays: were it removed, two runs could lock two files of one name.

    Args:
        folder: `--edit-log-dir`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> UsageError | None:
        """Lock the folder; what to say where another run has it.

        Blocks: while another run has it, `ENDING_SECONDS`, or `LEASE_SECONDS` for one on another
        machine, which may have gone down.

        Where nothing can be locked (a file system without locks, a full disk), the run goes on
        without, and that is said.
        """
        path = self._folder / NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if (holder := self._wait_for_lock()) is not None:
                self.release()
                return _held(self._folder, holder)
            with suppress(OSError):  # of a full disk: who holds it is then not known, that is all
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        except OSError as error:
            warn(
                f"{path} cannot be locked ({error.strerror}); a second run into this folder would "
                "not be noticed"
            )
        return None

    def release(self) -> None:
        """Let other runs have the folder. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _wait_for_lock(self) -> str | None:
        """Lock the file. Who has it, where that one keeps it for too long."""
        assert self._descriptor is not None, "no file to lock"
        began, is_said = time.monotonic(), False
        while not self._try_to_lock():
            waited = time.monotonic() - began
            if waited > ENDING_SECONDS:
                holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
                host = holder.partition(" ")[0]
                if host in ("", socket.gethostname()) or waited > LEASE_SECONDS:
                    return holder
                if not is_said:
                    say(
                        f"{flag('log_dir')} {self._folder}: locked by {_shown(holder)}, which may "
                        f"have gone down; waiting for the lock, {LEASE_SECONDS:.0f} s at most"
                    )
                    is_said = True
            time.sleep(_POLL_SECONDS)
        return None

    def _try_to_lock(self) -> bool:
        assert self._descriptor is not None, "no file to lock"
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            raise
        return True


def _held(folder: Path, holder: str) -> UsageError:
    return UsageError(
        f"{flag('log_dir')} {folder}",
        f"another run writes its event files there ({_shown(holder)})",
        "give each run a folder of its own, or start this one when the other has ended",
    )


def _shown(holder: str) -> str:
    host, _, process = holder.partition(" ")
    return f"process {process} on {host}" if process else "another process"
