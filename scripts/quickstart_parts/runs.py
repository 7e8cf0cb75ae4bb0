"""Starting a training, following its log with a progress bar, and stopping it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_edit.errors import EditError

from .parse import RunLog

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TAIL_LINES = 40
STOP_SECONDS = 20
# Starts what torchrun says of a failed rank: two screens that hide what the rank itself said.
LAUNCHER_REPORT = "failed (exitcode: "


class RunFailedError(EditError):
    """A training ended with an exit code other than 0.

    Args:
        name: what the run is called.
        exit_code: what its launcher exited with; ours then.
        log_path: where all of its output is.
    """

    def __init__(self, name: str, exit_code: int, log_path: Path) -> None:
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code  # a signal, as shells do
        super().__init__(f"{name} ended with exit code {exit_code}; all of its output: {log_path}")


def launch_line(flags: Sequence[str], *, num_ranks: int) -> list[str]:
    """The command that starts `num_ranks` local ranks; `torchrun` of this very environment."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    return [*launcher, "--nproc-per-node", str(num_ranks), "-m", "megatron_edit", script, *flags]


def run_environment(num_ranks: int) -> dict[str, str]:
    """The environment of the ranks: as ours, but all ranks on the CPU if there are too few GPUs."""
    import torch

    environment = dict(os.environ, PYTHONUNBUFFERED="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    if 0 < torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def follow(
    name: str,
    command: Sequence[str],
    *,
    log_path: Path,
    num_iterations: int,
    environment: Mapping[str, str] | None = None,
) -> RunLog:
    """Runs `command` to its end; its output goes to `log_path` and into the returned log.

    Raises:
        RunFailedError: the command failed; the end of its output has been printed.
    """
    from tqdm import tqdm

    log, tail = RunLog(), deque[str](maxlen=NUM_TAIL_LINES)
    is_over = False
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None, "the pipe was asked for"
    # A bar in a file is one line per refresh: few are enough there.
    pause = 0.5 if sys.stderr.isatty() else 20.0
    try:
        with (
            log_path.open("w", encoding="utf-8") as sink,
            tqdm(
                total=num_iterations, desc=name, unit="it", mininterval=pause, maxinterval=60
            ) as bar,
        ):
            for line in process.stdout:
                sink.write(line)
                log.feed(line)
                is_over = is_over or LAUNCHER_REPORT in line
                if not is_over:
                    tail.append(line)
                if log.last_iteration > bar.n:
                    bar.set_postfix_str(f"loss {log.last_loss:.3f}", refresh=False)
                    bar.update(log.last_iteration - bar.n)
        exit_code = process.wait()
    finally:
        _stop(process)
    if exit_code:
        sys.stderr.writelines(tail)
        raise RunFailedError(name, exit_code, log_path)
    return log


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a run that was interrupted; the launcher ends its ranks when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
