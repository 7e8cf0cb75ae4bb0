"""One measurement: start a training in the hosts of a lab, follow it, and read what it left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from netlab import INTERFACE, Lab

from .kinds import IDEAL, Job, Window

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TAIL_LINES = 30
POLL_SECONDS = 0.05
FIRST_PORT = 29500
_LINE = re.compile(
    r"^.*?\biteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+)", re.MULTILINE
)
_FORWARD = re.compile(r"^\s*forward-compute \.*: \(([\d.]+), ", re.MULTILINE)


class RunFailedError(RuntimeError):
    """A training failed or took too long; the message holds the end of its output."""


@dataclass
class Measurement:
    """Raw numbers of one run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        host_step_seconds: mean length of the measured iterations: of every host for `ideal`, whose
            hosts do not wait for each other, else a single one.
        lines_ms: per host, [iteration, Megatron's "elapsed time per iteration"] of every line.
        window_bytes: what each host sent during the measured iterations, with headers.
        syncs: of the measured iterations: round, iteration, wire_bytes, seconds.
        replica_seconds: of replica 0, all inner steps.
        load: of the machine, one-minute average before and after.
    """

    kind: str
    rate: float | None
    repeat: int
    window: dict[str, int]
    tokens_per_second: float
    host_step_seconds: list[float]
    lines_ms: list[list[tuple[int, float]]]
    window_bytes: list[int]
    syncs: list[dict[str, Any]] = field(default_factory=list)
    replica_seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


class Bench:
    """Runs jobs in a lab, one after another.

    Args:
        time_limit: seconds until a single run is given up.
    """

    def __init__(self, lab: Lab, time_limit: float) -> None:
        self._lab = lab
        self._time_limit = time_limit
        self._port = FIRST_PORT

    def measure(self, job: Job, rate: float | None, repeat: int) -> Measurement:
        """Run a job once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        window = job.window(rate)
        load = [os.getloadavg()[0]]
        with tempfile.TemporaryDirectory(prefix="overlap-") as name:
            folder = Path(name)
            sent = self._run(job, window, rate, folder)
            lines = [_lines(folder / f"host{host}.log") for host in range(job.num_hosts)]
            speakers = range(job.num_hosts) if job.kind == IDEAL else [job.speaker]
            steps = [_step_seconds(lines[host], window) for host in speakers]
            per_host = job.tokens_per_iteration / len(steps)
            return Measurement(
                kind=job.kind,
                rate=rate,
                repeat=repeat,
                window=asdict(window),
                tokens_per_second=sum(per_host / seconds for seconds in steps),
                host_step_seconds=steps,
                lines_ms=lines,
                window_bytes=sent,
                syncs=_syncs(folder / "sync.jsonl", window),
                replica_seconds=[
                    line["seconds"]
                    for line in _json_lines(folder / "replica-0.jsonl")
                    if "seconds" in line
                ],
                load=[*load, os.getloadavg()[0]],
            )

    def forward_share(self, job: Job) -> tuple[float, float]:
        """Seconds of a forward pass, and of a whole step, in a run of the `ideal` kind.

        It is a run of its own: the timers that tell the forward cost time themselves.
        """
        window = job.window(None)
        with tempfile.TemporaryDirectory(prefix="overlap-") as name:
            self._run(job, window, None, Path(name), ["--timing-log-level", "2"])
            log = Path(name) / "host0.log"
            times = [float(text) / 1e3 for text in _FORWARD.findall(log.read_text())]
            if not times:
                raise RunFailedError(f"no forward time in\n{_tail(log)}")
            # The first block of timers is the start's; the median leaves a hiccup out, too.
            return sorted(times[1:] or times)[len(times[1:]) // 2], _step_seconds(
                _lines(log), window
            )

    def _run(
        self, job: Job, window: Window, rate: float | None, folder: Path, more: Sequence[str] = ()
    ) -> list[int]:
        """Run to the end; returns the bytes that each host sent in the window."""
        self._lab.set_rate(None)  # the start, which copies the parameters, need not be slow
        self._port += 1  # the last one may linger in the kernel
        flags = [*job.flags(window, str(folder)), *more]
        processes: list[subprocess.Popen[Any]] = []
        try:
            for host in range(job.num_hosts):
                processes.append(self._start(job, host, flags, folder))
            return self._follow(job, window, rate, processes, folder)
        finally:
            self._lab.set_rate(None)
            for process in processes:
                self._lab.kill(process)

    def _start(
        self, job: Job, host: int, flags: Sequence[str], folder: Path
    ) -> subprocess.Popen[Any]:
        alone = job.kind == IDEAL
        env = os.environ | {
            "RANK": "0" if alone else str(host),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._lab.address(host if alone else 0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
        argv = [sys.executable, "-m", "megatron_edit", script, *flags]
        with (folder / f"host{host}.log").open("w") as log:
            return self._lab.popen(
                host, argv, env, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY
            )

    def _follow(
        self,
        job: Job,
        window: Window,
        rate: float | None,
        processes: Sequence[subprocess.Popen[Any]],
        folder: Path,
    ) -> list[int]:
        """Limit the links once training has begun, and count bytes at the ends of the window."""
        deadline = time.monotonic() + self._time_limit
        marks: dict[int, list[int]] = {}
        log = folder / f"host{job.speaker}.log"
        while any(process.poll() is None for process in processes):
            _check(job, rate, processes, folder, deadline)
            reached = max((iteration for iteration, _ in _lines(log)), default=0)
            if reached and not marks:
                self._lab.set_rate(rate)
                marks[0] = self._lab.sent_bytes()
            for end in (window.first, window.last):
                if reached >= end and end not in marks:
                    marks[end] = self._lab.sent_bytes()
                    if end == window.last:
                        self._lab.set_rate(None)
            time.sleep(POLL_SECONDS)
        _check(job, rate, processes, folder, deadline)
        ends = (marks.get(window.last), marks.get(window.first))
        if ends[0] is None or ends[1] is None:
            raise RunFailedError(f"{job.kind}: ended before it was measured\n{_tail(log)}")
        return [after - before for after, before in zip(*ends, strict=True)]


def _check(
    job: Job,
    rate: float | None,
    processes: Sequence[subprocess.Popen[Any]],
    folder: Path,
    deadline: float,
) -> None:
    for host, process in enumerate(processes):
        log = folder / f"host{host}.log"
        where = f"{job.kind} at {rate or 'no limit'}"
        if process.poll():
            raise RunFailedError(
                f"{where}: host {host} exited with {process.returncode}\n{_tail(log)}"
            )
        if time.monotonic() > deadline:
            raise RunFailedError(f"{where}: not done in time; host {host}\n{_tail(log)}")


def _lines(log: Path) -> list[tuple[int, float]]:
    found = _LINE.findall(log.read_text(errors="replace"))
    return [(int(iteration), float(ms)) for iteration, ms in found]


def _step_seconds(lines: Sequence[tuple[int, float]], window: Window) -> float:
    """Mean length of the measured iterations. Each line tells the mean since the line before."""
    total = 0.0
    for (before, _), (iteration, ms) in pairwise(lines):
        if window.first < iteration <= window.last:
            total += (iteration - before) * ms / 1e3
    return total / (window.last - window.first)


def _syncs(path: Path, window: Window) -> list[dict[str, Any]]:
    names = ("round", "iteration", "wire_bytes", "seconds")
    return [
        {name: line[name] for name in names}
        for line in _json_lines(path)
        if window.first < line["iteration"] <= window.last
    ]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:])
