"""Running a case: its ranks are forked, a stage at a time, and their console is followed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from straggler_parts.runs import free_ports, train_script

from megatron_edit.tools.compare.follow import tail

from .cases import Case
from .corruption import PLAN_VARIABLE, REPLICA_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
CORRUPTED = Path(__file__).with_name("pretrain_corrupted.py")
POLL_SECONDS = 0.5
FIRST_PORT = 28000
GRACE_SECONDS = 30  # for the others once one has failed, or is done
DONE = "[after training is done]"
_PR_SET_PDEATHSIG = 1


class RunFailedError(RuntimeError):
    """A run failed or took too long; the message holds the end of its output."""


@dataclass(frozen=True)
class StageFiles:
    """What a stage left behind.

    Attributes:
        folder: with the event files.
        exit_codes: of the ranks; one that broke off after training was over does not fail a run.
        seconds: from its first process to the end of the last.
        cpu_seconds: of all ranks; says more than `seconds` where others use the machine, too.
    """

    folder: Path
    exit_codes: tuple[int, ...]
    seconds: float
    cpu_seconds: float

    def console(self, replica: int = 0) -> Path:
        """Output of a replica's only rank."""
        return self.folder / f"console{replica}.log"


class Bench:
    """Runs cases one after another on this machine, without a GPU.

    Args:
        corpus: flags of Megatron that name the data.
        time_limit: seconds until a stage is given up.
    """

    def __init__(self, corpus: Sequence[str], time_limit: float) -> None:
        self._corpus = list(corpus)
        self._time_limit = time_limit
        self._last_port = FIRST_PORT - 1
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share this machine's cores
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        paths = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of the process below
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["convergence_parts.warm"])

    def run(self, case: Case, folder: Path, on_console: Callable[[Path], None]) -> list[StageFiles]:
        """Train a case from its first to its last step.

        Args:
            case: what to train.
            folder: takes all files; checkpoints go elsewhere and are removed.
            on_console: called with the newest console file, again and again.

        Raises:
            RunFailedError: it failed or took too long.
        """
        with tempfile.TemporaryDirectory(prefix="convergence-") as saves:
            stages = []
            for number in range(len(case.stages)):
                stage = folder / f"stage{number}"
                stage.mkdir(parents=True)
                stages.append(self._run_stage(case, number, stage, saves, on_console))
            return stages

    def _run_stage(
        self, case: Case, number: int, folder: Path, saves: str,
        on_console: Callable[[Path], None],
    ) -> StageFiles:  # fmt: skip
        num_ranks = case.stages[number].num_replicas
        words = [*case.stage_words(number, saves), *self._corpus, "--edit-log-dir", str(folder)]
        script = SCRIPT if case.corruption is None else CORRUPTED
        (self._last_port,) = free_ports(self._last_port, 1)  # one that was used may linger
        others_are_done = self._context.Event()
        processes: list[ForkServerProcess] = []
        began = time.monotonic()
        try:
            for rank in range(num_ranks):
                given = (
                    script, self._environment(case, rank, num_ranks), words,
                    folder / f"console{rank}.log", int(self._time_limit) + GRACE_SECONDS,
                    others_are_done if rank == 0 else None,
                )  # fmt: skip
                process = self._context.Process(target=be_rank, args=given)
                process.start()
                processes.append(process)
            codes = self._follow(processes, folder, others_are_done, on_console)
        finally:
            for process in processes:
                _kill_group(process)
            for process in processes:
                process.join()
        computed = sum(float(p.read_text()) for p in folder.glob("*.cpu"))
        return StageFiles(folder, codes, time.monotonic() - began, computed)

    def _environment(self, case: Case, rank: int, num_ranks: int) -> dict[str, str]:
        """What torchrun would set, and what the corrupted script wants to know."""
        values: dict[str, Any] = {
            "RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._last_port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if case.corruption is not None:
            values |= {PLAN_VARIABLE: case.corruption.to_json(), REPLICA_VARIABLE: rank}
        return {name: str(value) for name, value in values.items()}

    def _follow(
        self, processes: Sequence[ForkServerProcess], folder: Path, others_are_done: Event,
        on_console: Callable[[Path], None],
    ) -> tuple[int, ...]:  # fmt: skip
        """Wait for all ranks, and judge how they ended."""
        deadline = time.monotonic() + self._time_limit
        has_failed = False
        while any(process.is_alive() for process in processes):
            if not any(process.is_alive() for process in processes[1:]):
                others_are_done.set()
            if not has_failed and any(process.exitcode for process in processes):
                has_failed = True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
            on_console(folder / "console0.log")
        codes = tuple(-1 if p.exitcode is None else p.exitcode for p in processes)
        for rank, code in enumerate(codes):
            if code and not is_over(folder, rank):
                said = "".join(tail(folder / f"console{rank}.log"))
                raise RunFailedError(f"rank {rank} ended with {code} and said last:\n{said}")
        return codes


def _kill_group(process: ForkServerProcess) -> None:
    """Kill a rank and what it has started: Megatron's writers of checkpoints."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def is_over(folder: Path, rank: int) -> bool:
    """Whether a rank's training came to its end, however the process ended then."""
    files = [folder / f"console{rank}.log", folder / f"replica-{rank}.log"]
    return any(DONE in path.read_text(errors="replace") for path in files if path.exists())


def be_rank(
    script: Path,
    env: Mapping[str, str],
    words: Sequence[str],
    log: Path,
    limit_seconds: int,
    others_are_done: Event | None,
) -> None:
    """What the process of a rank does. The first holds the store, so it leaves last."""
    os.setsid()  # a group of its own, to be ended with all that it starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would wait for it
    try:
        train_script(script, env, words, log, limit_seconds)
    finally:
        log.with_suffix(".cpu").write_text(f"{time.process_time():.3f}")
        if others_are_done is not None:
            with suppress(OSError):
                others_are_done.wait(GRACE_SECONDS)
