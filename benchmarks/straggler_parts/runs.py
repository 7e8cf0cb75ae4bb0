"""One measurement: start a training, follow it until enough is measured, and end it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from .kinds import IDEAL, SKIPPED_ROUNDS, SYNCING, Job
from .plan import MARKS_VARIABLE, PLAN_VARIABLE, REPLICA_VARIABLE
from .readings import (
    Mark,
    Measurement,
    Stretch,
    read_marks,
    read_syncs,
    rounds_of,
    stretches_by_steps,
    stretches_by_syncs,
    stretches_by_time,
    tail,
    tokens_per_second,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("pretrain_slowed.py")
POLL_SECONDS = 0.25
FIRST_PORT = 27000
GRACE_SECONDS = 30  # a replica ends itself so long after its time, should nobody else do it
# Most of the start of a training is the import of these. They are imported once, in a process from
# which the replicas are then forked. Not Megatron: it must not be there before the plugin is.
PRELOADED = ["torch", "torch.distributed.tensor", "torch._inductor.compile_fx", "torch.utils.data"]


class RunFailedError(RuntimeError):
    """A training failed or took too long; the message holds the end of its output."""


@dataclass
class Run:
    """A training in progress."""

    job: Job
    folder: Path
    processes: list[ForkServerProcess] = field(default_factory=list)

    def log(self, replica: int) -> Path:
        """Console output of a replica."""
        return self.folder / f"console{replica}.log"

    def marks_file(self, replica: int) -> Path:
        """Where a replica notes when its steps begin."""
        return self.folder / f"marks{replica}.txt"

    def marks(self) -> list[list[Mark]]:
        """Of all replicas, so far."""
        return [read_marks(self.marks_file(replica)) for replica in range(self.job.num_replicas)]

    def stretches(self) -> list[Stretch] | None:
        """What is to be measured, once it is all there."""
        job, marks = self.job, self.marks()
        if job.kind in SYNCING:
            return stretches_by_syncs(marks, read_syncs(self.folder), job.scenario.rounds)
        if job.kind == IDEAL and job.plan.is_random:
            return stretches_by_steps(marks, *job.edit_steps)  # with the same draws
        return stretches_by_time(marks, job.seconds)

    def failed(self, reason: str, replica: int) -> RunFailedError:
        """The error to raise."""
        name, said = f"{self.job.scenario.name}, {self.job.kind}", tail(self.log(replica))
        return RunFailedError(f"{name}: {reason}; replica {replica} said last:\n{said}")


class Bench:
    """Runs jobs one after another.

    Args:
        time_limit: seconds until a single run is given up.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._last_port = FIRST_PORT - 1
        os.environ["OMP_NUM_THREADS"] = "1"  # the replicas share this machine's cores
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def measure(self, job: Job, repeat: int) -> Measurement:
        """Run a job once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="stragglers-") as name:
            run = Run(job, Path(name))
            stretches = self._run(run)
            syncs = read_syncs(run.folder)  # none of kinds without rounds
            rounds = job.scenario.rounds
            return Measurement(
                scenario=job.scenario.name,
                kind=job.kind,
                repeat=repeat,
                stretches=stretches,
                tokens_per_second=tokens_per_second(stretches, job.tokens_per_step),
                round_seconds=rounds_of(run.marks()[0], syncs, rounds),
                syncs=syncs[SKIPPED_ROUNDS : SKIPPED_ROUNDS + rounds],
                load=[load, os.getloadavg()[0]],
            )

    def _run(self, run: Run) -> list[Stretch]:
        num_replicas = run.job.num_replicas
        ports = free_ports(self._last_port, num_replicas)
        self._last_port = ports[-1]  # one that was used may linger in the kernel
        flags = run.job.flags(str(run.folder))
        try:
            for replica in range(num_replicas):
                env = _environment(run, replica, ports)
                given = (env, flags, run.log(replica), int(self._time_limit) + GRACE_SECONDS)
                process = self._context.Process(target=train, args=given, daemon=True)
                process.start()
                run.processes.append(process)
            return self._follow(run)
        finally:
            for process in run.processes:
                process.kill()
            for process in run.processes:
                process.join()

    def _follow(self, run: Run) -> list[Stretch]:
        """Wait until enough is measured."""
        deadline = time.monotonic() + self._time_limit
        while (stretches := run.stretches()) is None:
            for replica, process in enumerate(run.processes):
                if not process.is_alive():
                    raise run.failed(f"replica {replica} exited with {process.exitcode}", replica)
            if time.monotonic() > deadline:
                raise run.failed(f"not done after {self._time_limit:.0f} s", 0)
            time.sleep(POLL_SECONDS)
        return stretches


def train(env: Mapping[str, str], flags: Sequence[str], log: Path, limit_seconds: int) -> None:
    """What the process of a replica does. It is new, but has torch already."""
    train_script(SCRIPT, env, flags, log, limit_seconds)


def train_script(
    script: Path, env: Mapping[str, str], flags: Sequence[str], log: Path, limit_seconds: int
) -> None:
    """Run a training script under the launcher in this process, which ends with it or its time."""
    signal.alarm(limit_seconds)
    with log.open("w", buffering=1) as console:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(console.fileno(), stream.fileno())
    os.environ.update(env)
    sys.path.insert(0, str(REPOSITORY))
    from megatron_edit.launcher import main

    code = main([str(script), *flags])
    if code:
        raise SystemExit(code)


def free_ports(after: int, count: int) -> list[int]:
    """The next ports that nobody listens on now.

    They are below those that a system gives to outgoing connections: one of these could otherwise
    take a port before the replicas do.
    """
    found: list[int] = []
    port = after
    while len(found) < count:
        port += 1
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _environment(run: Run, replica: int, ports: Sequence[int]) -> dict[str, str]:
    """What torchrun would set, and the part of this replica in the plan."""
    is_alone = run.job.kind == IDEAL
    values: dict[str, Any] = {
        "RANK": 0 if is_alone else replica,
        "WORLD_SIZE": run.job.world_size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[replica if is_alone else 0],
        "GLOO_SOCKET_IFNAME": "lo",
        PLAN_VARIABLE: run.job.plan.to_json(),
        REPLICA_VARIABLE: replica,
        MARKS_VARIABLE: run.marks_file(replica),
    }
    return {name: str(value) for name, value in values.items()}
