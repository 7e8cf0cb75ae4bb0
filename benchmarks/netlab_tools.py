"""What `netlab` stands on: the commands of iproute2, their errors, and signals during clean-up."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_numbers = itertools.count()


class LabError(RuntimeError):
    """The lab cannot be made or used; one line says why."""


class LabUnavailableError(LabError):
    """This machine or this user cannot have a lab at all."""


def fresh_prefix() -> str:
    """Start of the names of one lab's namespaces; no other lab on this machine has it."""
    return f"lab{os.getpid()}-{next(_numbers)}-"


def require_lab() -> None:
    """Check that this machine can have a lab.

    Raises:
        LabUnavailableError: it cannot; the message says what is missing.
    """
    if os.geteuid() != 0:
        raise LabUnavailableError("network namespaces need root: run this as root")
    for name in ("ip", "tc"):
        tool(name)
    probe = fresh_prefix() + "probe"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "delete", probe)
    except LabError as error:
        raise LabUnavailableError(f"no network namespaces here: {error}") from error


def tool(name: str) -> str:
    """Path of a command of iproute2."""
    # For users other than root, /usr/sbin may not be on the path.
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise LabUnavailableError(f"{name} is missing: install iproute2")
    return path


def run(name: str, *arguments: str) -> str:
    """Run a command of iproute2 to its end; returns what it printed.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run(
        [tool(name), *arguments], capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise LabError(f"{name} {' '.join(arguments)}: {reason}")
    return done.stdout


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that `with` blocks end."""
    with _handling(ENDING_SIGNALS, _leave):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """For a clean-up: a second Ctrl-C in the middle would leave namespaces behind."""
    with _handling((signal.SIGINT, *ENDING_SIGNALS), signal.SIG_IGN):
        yield


@contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
