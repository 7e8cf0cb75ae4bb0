"""Starting a training, following its log with a progress bar, and aborting it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.errors import EditError
from megatron_edit.observe.line_files import stat_or_none
from megatron_edit.tools.compare.console_log import RunLog

NUM_TAIL_LINES = 40
POLL_SECONDS = 0.2
STOP_SECONDS = 45  # torchrun gives its ranks 30 seconds to end
# Begins torchrun's report on a failed rank, which hides the output of the rank itself.
LAUNCHER_REPORT = "failed (exitcode: "


class RunFailedError(EditError):
    """A training ended with an exit code other than 0, or was aborted.

    Args:
        name: of the training.
        reason: of the failure.
        exit_code: for the present process.
        log_path: of its output.

    Attributes:
        reason: of the failure, with the path of the output.
        tail: the last lines of the output, with line ends.
    """

    def __init__(self, name: str, reason: str, exit_code: int, log_path: Path) -> None:
        self.exit_code = exit_code
        self.reason = f"{reason}; all of its output: {log_path}"
        self.tail = tail(log_path)
        super().__init__(f"{name} {self.reason}")


@dataclass(frozen=True)
class Limits:
    """Limits after which a training is aborted.

    Attributes:
        seconds: of run time; None for no limit.
        silent_seconds: without output; None for no limit.
        silent_factor: a silence may also be this many times as long as the longest one before it:
            lines come every few steps, and slow steps take long. 0: it may not.
    """

    seconds: float | None = None
    silent_seconds: float | None = None
    silent_factor: float = 0.0

    def exceeded(self, *, running: float, silent: float, longest: float = 0.0) -> str:
        """Return which limit is exceeded, as text; empty if none.

        Args:
            running: seconds since the start.
            silent: seconds since the last line.
            longest: longest silence before, seconds.
        """
        if self.seconds is not None and running > self.seconds:
            return f"was not done after {self.seconds:g} s"
        if self.silent_seconds is not None:
            limit = max(self.silent_seconds, self.silent_factor * longest)
            if silent > limit:
                return f"has printed nothing for {limit:g} s"
        return ""


def follow(
    name: str,
    command: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    limits: Limits | None = None,
    events: Path | None = None,
) -> RunLog:
    """Run `command` to its end; its output goes to `log_path` and into the returned log.

    Args:
        name: of the training.
        command: of the training, in the foreground.
        log_path: for all output.
        environment: of the command.
        cwd: working directory; None for the present one.
        limits: after which it is aborted; None for no limits.
        events: folder whose files grow with every step, as a sign that it is not silent; None
            where there are none. It need not exist.

    Raises:
        RunFailedError: the command failed or took too long.
    """
    with log_path.open("wb") as sink:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the ranks
        )
    try:
        log, reason = _watch(name, process, log_path, limits or Limits(), events)
    finally:
        _stop(process)
    if reason:
        raise RunFailedError(name, reason, 1, log_path)
    if code := process.returncode:
        ours = code if code > 0 else 128 - code  # a signal, as shells do
        raise RunFailedError(name, f"ended with exit code {code}", ours, log_path)
    return log


def _watch(
    name: str, process: subprocess.Popen[bytes], log_path: Path, limits: Limits, events: Path | None
) -> tuple[RunLog, str]:
    """Read the log until the process ends or a limit is exceeded."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    log, rest = RunLog(), b""
    began = heard = time.monotonic()
    longest, written = 0.0, 0
    # In a file, each refresh is a line: fewer are enough.
    pause = 0.5 if sys.stderr.isatty() else 20.0
    with tqdm(desc=name, mininterval=pause, maxinterval=60) as bar, log_path.open("rb") as source:
        while True:
            is_over = process.poll() is not None  # before the read, to get all of its output
            *found, rest = (rest + source.read()).split(b"\n")
            for line in found:
                log.feed(line.decode("utf-8", errors="replace"))
            now = time.monotonic()
            if found or _bytes_in(events) > written:
                longest, heard, written = max(longest, now - heard), now, _bytes_in(events)
            bar.total = log.num_iterations or None
            bar.set_postfix_str(f"loss {log.last_loss:.3f}", refresh=False)
            bar.update(log.last_iteration - bar.n)
            if is_over:
                return log, ""
            if reason := limits.exceeded(running=now - began, silent=now - heard, longest=longest):
                return log, reason
            time.sleep(POLL_SECONDS)


def _bytes_in(folder: Path | None) -> int:
    """Return the size of all files of a folder; 0 where there is none."""
    if folder is None or not folder.is_dir():
        return 0
    found = (stat_or_none(path) for path in folder.iterdir())
    return sum(each.st_size for each in found if each is not None)


def tail(log_path: Path) -> list[str]:
    """Return the last lines of a log, without the launcher's report; empty without a log."""
    if not log_path.exists():
        return []
    last = deque[str](maxlen=NUM_TAIL_LINES)
    with log_path.open(encoding="utf-8", errors="replace") as source:
        for line in source:
            if LAUNCHER_REPORT in line:
                break
            last.append(line)
    return list(last)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a training; the launcher then ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def torchrun_line(num_ranks: int) -> list[str]:
    """Return the command that starts `num_ranks` ranks with this environment's torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_ranks)]


def environment_of_ranks(num_ranks: int) -> dict[str, str]:
    """Return the present environment; all ranks on the CPU if there are too few GPUs."""
    import torch

    environment = dict(os.environ, PYTHONUNBUFFERED="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    if 0 < torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
