"""One measurement: start a training, follow it until its checkpoints are complete, and end it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from straggler_parts.runs import PRELOADED, RunFailedError, free_ports, train_script

from .kinds import WARMUP_SAVES, Case
from .readings import Measurement, read_notes, saves_of, tail

SCRIPT = Path(__file__).with_name("pretrain_saving.py")
NOTES_VARIABLE, PAUSE_VARIABLE = "CHECKPOINT_NOTES", "CHECKPOINT_PAUSE"
POLL_SECONDS = 0.1
FIRST_PORT = 27500
GRACE_SECONDS = 30  # a rank ends itself so long after its time, should nobody else do it
PROBE_BYTES = 1 << 28
QUIET_SHARE = 0.2


@dataclass
class Run:
    """A training in progress."""

    case: Case
    folder: Path
    processes: list[ForkServerProcess] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
        return self.folder / "checkpoints"

    def log(self, rank: int) -> Path:
        """Console output of a rank; of replicas after the first it has the start alone."""
        return self.folder / f"console{rank}.log"

    def notes_file(self, rank: int) -> Path:
        """Where a rank notes its saves."""
        return self.folder / f"notes{rank}.jsonl"

    def notes(self) -> list[list[dict[str, Any]]]:
        """Of all ranks, so far."""
        return [read_notes(self.notes_file(rank)) for rank in range(self.case.world_size)]

    def failed(self, reason: str, rank: int) -> RunFailedError:
        """The error to raise."""
        logs = [self.log(rank), *sorted((self.folder / "log").glob("*.log"))]
        said = "\n".join(tail(log) for log in logs)
        return RunFailedError(f"{self.case.name}: {reason}; rank {rank} said last:\n{said}")


class Bench:
    """Runs cases one after another.

    Args:
        folder: in which checkpoints are written, and removed again; None is the system's.
        time_limit: seconds until a single run is given up.
    """

    def __init__(self, folder: Path | None, time_limit: float) -> None:
        self._folder = folder
        self._time_limit = time_limit
        self._last_port = FIRST_PORT - 1
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share this machine's cores
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def measure(self, case: Case, turn: int | None) -> Measurement:
        """Run a case once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        before = busy_share()
        with self._temporary() as name:
            run = Run(case, Path(name))
            self._run(run)
            notes = run.notes()
            calls = [note for own in notes for note in own if "save" in note]
            if any(call["is_async"] != case.is_async for call in calls):
                raise run.failed("Megatron has switched asynchronous saves off", 0)
            saves = saves_of(notes, run.checkpoints, case)
            return Measurement(
                case=case,
                turn=turn,
                parameters=calls[0]["parameters"],
                saves=saves[: WARMUP_SAVES + case.num_saves],
                busy=[before, busy_share()],
            )

    def wait_for_quiet(self, patience: float) -> float:
        """Wait until others leave the machine alone, at most so many seconds; how many it took."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience and busy_share(3.0) > QUIET_SHARE:
            time.sleep(2.0)
        return waited

    def disk_speed(self) -> float:
        """Bytes per second of one process that writes, until they are on the disk."""
        block = os.urandom(1 << 20)
        with self._temporary() as name, Path(name, "probe").open("wb", buffering=0) as file:
            began = time.monotonic()
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return PROBE_BYTES / (time.monotonic() - began)

    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(
            prefix="checkpoints-", dir=self._folder, ignore_cleanup_errors=True
        )

    def _run(self, run: Run) -> None:
        ports = free_ports(self._last_port, 1)
        self._last_port = ports[-1]  # one that was used may linger in the kernel
        flags = run.case.flags(str(run.folder))
        run.checkpoints.mkdir()
        try:
            for rank in range(run.case.world_size):
                env = _environment(run, rank, ports[0])
                given = (env, flags, run.log(rank), int(self._time_limit) + GRACE_SECONDS)
                # Not a daemon: those may not have children, and asynchronous saves need some.
                process = self._context.Process(target=train, args=given)
                process.start()
                run.processes.append(process)
            self._follow(run)
        finally:
            for process in run.processes:
                _kill(process)
            for process in run.processes:
                process.join()

    def _follow(self, run: Run) -> None:
        """Wait until all checkpoints are complete."""
        wanted = WARMUP_SAVES + run.case.num_saves
        deadline = time.monotonic() + self._time_limit
        while len(saves_of(run.notes(), run.checkpoints, run.case)) < wanted:
            for rank, process in enumerate(run.processes):
                if not process.is_alive():
                    raise run.failed(f"rank {rank} exited with {process.exitcode}", rank)
            if time.monotonic() > deadline:
                raise run.failed(f"not done after {self._time_limit:.0f} s", 0)
            time.sleep(POLL_SECONDS)


def train(env: Mapping[str, str], flags: Sequence[str], log: Path, limit_seconds: int) -> None:
    """What the process of a rank does. It is new, but has torch already."""
    os.setpgid(0, 0)  # to be ended together with its own children
    train_script(SCRIPT, env, flags, log, limit_seconds)


def busy_share(seconds: float = 1.0) -> float:
    """The part of the machine's cores that is in use; between two runs, by others."""
    idle, total = _ticks()
    time.sleep(seconds)
    more_idle, more_total = _ticks()
    return 1.0 - (more_idle - idle) / max(1, more_total - total)


def _ticks() -> tuple[int, int]:
    """Of all cores: idle ones, also those that wait for the disk; and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _kill(process: ForkServerProcess) -> None:
    """With its children, which write checkpoints."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # where it has not come to its own group yet


def _environment(run: Run, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set, and where to note what."""
    values: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": run.case.world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": run.case.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        NOTES_VARIABLE: run.notes_file(rank),
        PAUSE_VARIABLE: run.case.async_pause if run.case.is_async else run.case.pause,
    }
    return {name: str(value) for name, value in values.items()}
