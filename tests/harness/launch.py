"""The client of the preloaded server: one call runs a function in all ranks of a world."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.jobs import Job, Report

REPOSITORY = Path(__file__).resolve().parents[2]
_TAIL_CHARACTERS = 3000
# All ranks of a test are on this machine, whose host name may not resolve.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        returncode: 0, the code of a `SystemExit`, 1 for an exception, or minus the signal.
        value: what the function returned, or None where it did not return.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    value: Any


class _Server:
    """A running server process and the client's end of its socket pair."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.server", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=os.environ | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._receive()  # "ready"

    def run(self, job: Job) -> Report:
        """Run a job and return its report."""
        self._connection.send(job)
        report: Report = self._receive()
        return report

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._log.seek(0)
            raise RuntimeError(f"the server of ranks died:\n{self._log.read()}") from None

    def close(self) -> None:
        """Make the server kill its ranks and exit."""
        self._connection.close()
        self._process.wait(timeout=30)
        self._log.close()


@functools.cache
def _server() -> _Server:
    return _Server()


def shut_down() -> None:
    """Close the server if there is one. The next call to `run_ranks` starts another."""
    if _server.cache_info().currsize:
        server = _server()
        _server.cache_clear()
        server.close()


def run_ranks(
    target: str,
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
    grace: float = 15,
    cwd: Path | None = None,
    check: bool = False,
) -> list[RankResult]:
    """Call ``target(*args)`` in `world_size` fresh processes that have Megatron imported.

    The process environment is torchrun's: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. No process group exists yet.

    Args:
        target: ``"package.module:function"``, imported in the rank.
        args: picklable arguments, the same for all ranks.
        env: additions to the environment; None unsets a variable.
        timeout: seconds until all ranks are killed and the call fails.
        grace: seconds until the other ranks are killed once a rank has failed.
        check: also fail if a rank did not exit with 0.

    Raises:
        AssertionError: the time-out passed, or `check` found a failed rank; with output tails.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        job = Job(
            target=target,
            world_size=world_size,
            args=args,
            env=env or {},
            cwd=cwd or directory,
            directory=directory,
            timeout=timeout,
            grace=grace,
        )
        try:
            report = _server().run(job)
        except BaseException:  # also a test's own timeout: its ranks must not outlive it
            shut_down()
            raise
        results = [_result(directory, r, code) for r, code in enumerate(report.returncodes)]
    if report.timed_out:
        raise AssertionError(f"{target}: not done after {timeout} s\n{_tails(results)}")
    if check and any(report.returncodes):
        raise AssertionError(f"{target}: exited with {report.returncodes}\n{_tails(results)}")
    killed = [result for result in results if result.returncode == -signal.SIGKILL]
    if killed:  # shown if the test fails; with the stacks of those that had not ended
        print(_tails(killed))
    return results


def _result(directory: Path, rank: int, code: int) -> RankResult:
    def text(suffix: str) -> str:
        path = directory / f"rank{rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    value = directory / f"rank{rank}.value"
    return RankResult(
        rank=rank,
        returncode=code,
        stdout=text("stdout"),
        stderr=text("stderr") + text("stacks"),  # of a rank that had to be killed
        value=pickle.loads(value.read_bytes()) if value.exists() else None,
    )


def _tails(results: list[RankResult]) -> str:
    return "\n".join(
        f"--- rank {r.rank}, exit code {r.returncode}, {name} ---\n{text[-_TAIL_CHARACTERS:]}"
        for r in results
        for name, text in (("stdout", r.stdout), ("stderr", r.stderr))
        if text
    )
