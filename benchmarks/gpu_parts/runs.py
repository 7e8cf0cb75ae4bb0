"""Run a case to the end of training, and read its output."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from frame.launch import Forks, Rank, RunFailedError, free_ports
from frame.readings import RunLog, edit_losses, inner_steps, read_json_lines, read_syncs

from .cases import ELASTIC, KILL, SHARED, STOP, Case
from .pretrain_measured import FAULT, FAULT_FILE, MEMORY

SCRIPT = Path(__file__).with_name("pretrain_measured.py")
CALLS = (sys.executable, "-m", "gpu_parts.group_calls")
LOST = 4  # exit code where a replica is lost
MIN_COMMITS = 2  # of an elastic run
FIRST_PORT, FIRST_RENDEZVOUS = 28000, 28500
POLL_SECONDS = 0.25
_BACKEND = re.compile(r"exchanges over (\w+) \(")


@dataclass(frozen=True)
class Reading:
    """The measurements of a case.

    Attributes:
        case: name of the case.
        losses: nats per token, mean over the replicas, by iteration or, under A-EDiT, by round.
        iterations: of the losses.
        digests: of the parameters after each sync, a list for each replica.
        step_ms: length of every step, of replica 0.
        sync_steps: steps after which the syncs began.
        exposed_ms: exposed time of every sync, as EDiT records it.
        backend: between the replicas; None for stock Megatron.
        peak_bytes: peak device memory of the first rank; None on the CPU.
        num_parameters: of a replica.
        seconds: of the run, start included.
    """

    case: str
    losses: list[float]
    iterations: list[int]
    digests: list[list[str]]
    step_ms: list[float]
    sync_steps: list[int]
    exposed_ms: list[float]
    backend: str | None
    peak_bytes: int | None
    num_parameters: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case that is no training to its end.

    Attributes:
        case: name of the case.
        complaints: a line for each failed check.
        numbers: what was measured, by name.
        seconds: of the run, start included.
    """

    case: str
    complaints: list[str]
    numbers: dict[str, float]
    seconds: float


class Bench:
    """Runs cases; several threads may do so at once.

    Args:
        device: `cuda` or `cpu`.
        count: devices; replicas share a single device, each in a launch of its own.
        time_limit: most seconds of a case.
        output: the logs of failed ranks are written next to this file.
    """

    def __init__(self, device: str, count: int, time_limit: float, output: Path) -> None:
        self._device, self._count, self._output = device, count, output
        # Megatron would compile small functions in each rank, which takes longer than training.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        self._forks = Forks(FIRST_PORT, time_limit, gpus=device == "cuda")
        self._port, self._choice = FIRST_RENDEZVOUS, threading.Lock()

    @property
    def are_forked(self) -> bool:
        """Whether ranks are forked from a process that has imported the slow modules."""
        return self._forks.are_forked

    def measure(self, case: Case, limit: float) -> Reading | Outcome:
        """Run a case once.

        Args:
            case: to run.
            limit: seconds until it is stopped.

        Raises:
            RunFailedError: it failed, took too long, or its output is incomplete.
        """
        began = time.monotonic()
        if not case.is_training:
            complaints, numbers = self._call_group(limit)
            return Outcome(case.name, complaints, numbers, time.monotonic() - began)
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
            folder = Path(name)
            try:
                for words in _launches(case, folder):
                    codes = self._train(case, folder, words, limit - (time.monotonic() - began))
                seconds = time.monotonic() - began
                if case.special == KILL:
                    return Outcome(case.name, *_after_kill(folder, codes), seconds)
                if case.special == ELASTIC:
                    return Outcome(case.name, *_after_hub(folder), seconds)
                return read(case, folder, seconds)
            except RunFailedError:
                self._keep_logs(case, folder)
                raise
            except (OSError, EOFError, ValueError, KeyError) as error:
                self._keep_logs(case, folder)
                raise RunFailedError(f"its output is incomplete: {error!r}") from error

    def _train(self, case: Case, folder: Path, words: Sequence[str], limit: float) -> Sequence[int]:
        """Run a launch to its end; returns the exit codes of its ranks."""
        apart = case.is_apart or (self._count == 1 and not case.shares_device)
        with self._hub(case, folder) as hub:
            ranks = self._ranks(case, folder, words, hub, apart=apart)
            one_machine = not case.shares_device  # else each rank would take a GPU of its own
            with self._forks.training(
                case.name, folder, ranks, apart=apart, one_machine=one_machine
            ) as training:
                return training.to_end(
                    lambda: None, limit=limit, poll=POLL_SECONDS, may_fail=case.special == KILL
                )

    @contextmanager
    def _hub(self, case: Case, folder: Path) -> Iterator[str]:
        """Run the hub of an elastic case inside the `with` block; yields its address."""
        if case.special != ELASTIC:
            yield ""
            return
        address = f"127.0.0.1:{self._free_port()}"
        argv = [sys.executable, "-m", "megatron_edit", "hub", "--listen", address,
                "--state-dir", str(folder / "hub")]  # fmt: skip
        with (folder / "console-hub.log").open("w") as log:
            hub = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield address
        finally:
            hub.kill()
            hub.wait()

    def _call_group(self, limit: float) -> tuple[list[str], dict[str, float]]:
        """Make all calls of `Group` in a process; returns complaints and microseconds."""
        argv = [*CALLS, self._device]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"not done after {limit:.0f} s") from None
        if done.returncode:
            raise RunFailedError(f"exit code {done.returncode}; {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return found["complaints"], found["microseconds"]

    def _free_port(self) -> int:
        with self._choice:
            (self._port,) = (port,) = free_ports(self._port, 1)
        return port

    def _keep_logs(self, case: Case, folder: Path) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob("console*.log"), *folder.glob("replica-*.log")]:
            name = f"{self._output.stem}.{case.name}.{path.name}"
            shutil.copy(path, self._output.with_name(name))

    def _ranks(
        self, case: Case, folder: Path, more: Sequence[str], hub: str, *, apart: bool
    ) -> list[Rank]:
        words = [*case.flags(self._device, str(folder)), *more]
        numbers = range(case.num_ranks)
        own: list[list[str]] = [[] for _ in numbers]
        if hub:
            own = [["--edit-hub", hub, "--edit-replica-name", f"r{rank}"] for rank in numbers]
        elif apart and not case.is_stock:  # each rank is a replica
            words += ["--edit-rendezvous", f"127.0.0.1:{self._free_port()}"]
            own = [["--edit-replica-id", str(rank)] for rank in numbers]
        return [Rank([*words, *one], self._environment(case, folder, rank, apart=apart), SCRIPT)
                for rank, one in enumerate(own)]  # fmt: skip

    def _environment(
        self, case: Case, folder: Path, rank: int, *, apart: bool
    ) -> Mapping[str, str]:
        found = {
            MEMORY: str(folder / f"memory{rank}.json"), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }  # fmt: skip
        if case.shares_device:
            found |= SHARED
        if apart and self._device == "cuda" and self._count > 1:  # a launch takes its first GPU
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank + 1)))
            found |= {"CUDA_VISIBLE_DEVICES": visible.split(",")[rank]}
        if case.special in (STOP, KILL) and rank == case.num_ranks - 1:
            found |= {FAULT: case.special, FAULT_FILE: str(folder / "fault")}
        return found


def _after_kill(folder: Path, codes: Sequence[int]) -> tuple[list[str], dict[str, float]]:
    """Check the exit codes where the last rank was killed; returns complaints and numbers."""
    if not (folder / "fault").exists():
        raise ValueError("the last rank was not killed")
    seconds = time.time() - float((folder / "fault").read_text())
    complaints = [f"rank {rank} exited with {code}, not {LOST}"
                  for rank, code in enumerate(codes[:-1]) if code != LOST]  # fmt: skip
    return complaints, {"seconds until all ranks ended": seconds}


def _after_hub(folder: Path) -> tuple[list[str], dict[str, float]]:
    """Check the journal of an elastic run; returns complaints and numbers."""
    lines = read_json_lines(folder / "hub" / "journal.jsonl")
    commits = sum(line["event"] == "commit" for line in lines)
    few = [f"{commits} commits, fewer than {MIN_COMMITS}"] if commits < MIN_COMMITS else []
    return few, {"commits": float(commits)}


def _launches(case: Case, folder: Path) -> list[list[str]]:
    """Return the further flags of each launch: one, or two of which the second resumes."""
    if not case.resumes_at:
        return [[]]
    checkpoints, step = str(folder / "checkpoints"), str(case.resumes_at)
    save = ["--save", checkpoints, "--save-interval", step]
    return [[*save, "--exit-interval", step], [*save, "--load", checkpoints]]


def read(case: Case, folder: Path, seconds: float) -> Reading:
    """Read the measurements of a case from its folder.

    Raises:
        OSError, ValueError, KeyError: the output is incomplete.
    """
    consoles = sorted(folder.glob("console*.log"))
    lines = [line for path in consoles for line in path.read_text(errors="replace").splitlines()]
    log = RunLog.of(lines)
    losses = log.losses() if case.is_stock else edit_losses(folder, log)
    syncs = read_syncs(folder)
    steps = step_ms(case, folder, log)
    if not losses or len(steps) < case.least_steps or not log.num_parameters:
        found = f"{len(losses)} losses, {len(steps)} steps, {log.num_parameters} parameters"
        raise ValueError(f"too few values: {found}")
    return Reading(
        case=case.name,
        losses=list(losses.values()),
        iterations=list(losses),
        digests=[digests(folder, replica) for replica in range(case.num_replicas)],
        step_ms=steps,
        sync_steps=[line["iteration"] for line in syncs],
        exposed_ms=[1e3 * line["seconds"]["exposed"] for line in syncs],
        backend=backend(lines),
        peak_bytes=json.loads((folder / "memory0.json").read_text()),
        num_parameters=log.num_parameters,
        seconds=seconds,
    )


def digests(folder: Path, replica: int) -> list[str]:
    """Return the digests of a replica's parameters after every sync."""
    lines = read_json_lines(folder / f"replica-{replica}.jsonl")
    return [line["digest"] for line in lines if "digest" in line]


def step_ms(case: Case, folder: Path, log: RunLog) -> list[float]:
    """Return the milliseconds of every step of replica 0."""
    if case.is_stock:
        return list(log.milliseconds().values())
    return [1e3 * seconds for seconds in inner_steps(folder)]


def backend(lines: Sequence[str]) -> str | None:
    """Return the backend between the replicas, from the console of the first replica."""
    found = (_BACKEND.search(line) for line in lines)
    return next((match[1] for match in found if match), None)
