"""Measure one run: start a training in the hosts of a lab, follow it, and read its output."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from frame.gpt import Window, link_name
from frame.launch import Hosts, Rank, Training
from frame.readings import Console, read_console, read_syncs
from netlab import Lab

from .kinds import Job

POLL_SECONDS = 0.1
_FORWARD = re.compile(r"^\s*forward-compute \.*: \(([\d.]+), ", re.MULTILINE)
_SYNC_FIELDS = ("round", "iteration", "wire_bytes", "seconds")


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        window: the measured iterations.
        host_step_seconds: mean length of the measured iterations: of every host where each is a
            job of its own (`Job.is_apart`), else a single number.
        window_bytes: sent by each host during the measured iterations, with headers.
        syncs: in the measured iterations: round, iteration, wire_bytes, seconds.
        load: of the machine, one-minute average before and after.
        exit_codes: of the hosts' processes; not 0 only where training had finished.
    """

    kind: str
    rate: float | None
    repeat: int
    window: Window
    tokens_per_second: float
    host_step_seconds: list[float]
    window_bytes: list[int]
    syncs: list[dict[str, Any]]
    load: list[float]
    exit_codes: list[int]

    @property
    def short(self) -> dict[str, Any]:
        """A row of OUTPUT."""
        return {
            "kind": self.kind,
            "rate": self.rate,
            "repeat": self.repeat,
            "tokens_per_second": self.tokens_per_second,
            "window_bytes": self.window_bytes,
            "num_syncs": len(self.syncs),
            "exit_codes": self.exit_codes,
        }


def step_seconds(lines: Sequence[tuple[int, float]], window: Window) -> float:
    """Return the mean seconds of the measured iterations; each line has the mean since the last."""
    measured = [
        (iteration - before) * ms / 1e3
        for (before, _), (iteration, ms) in pairwise(lines)
        if window.first < iteration <= window.last
    ]
    return sum(measured) / (window.last - window.first)


class Bench:
    """Runs jobs in a lab, one after another.

    Args:
        time_limit: seconds until a run is stopped.
    """

    def __init__(self, lab: Lab, time_limit: float) -> None:
        self._lab, self._hosts = lab, Hosts(lab)
        self._time_limit = time_limit

    def measure(self, job: Job, rate: float | None, repeat: int) -> Measurement:
        """Run a job once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        window, load = job.window(rate), os.getloadavg()[0]
        with self._training(job, rate, window) as training:
            sent, codes = self._follow(training, job, rate, window)
            hosts = range(job.num_hosts) if job.is_apart else [job.logging_host]
            steps = [step_seconds(_lines(training.log(host)), window) for host in hosts]
            syncs = read_syncs(training.folder, window)
            return Measurement(
                kind=job.kind,
                rate=rate,
                repeat=repeat,
                window=window,
                tokens_per_second=sum(job.tokens_per_iteration / len(steps) / s for s in steps),
                host_step_seconds=steps,
                window_bytes=sent,
                syncs=[{name: sync[name] for name in _SYNC_FIELDS} for sync in syncs],
                load=[load, os.getloadavg()[0]],
                exit_codes=codes,
            )

    def forward_share(self, job: Job) -> float:
        """Return the share of the forward pass in a step of the `ideal` kind.

        It is measured in a separate run, as the timers themselves take time.
        """
        window, timers = job.window(None), ("--timing-log-level", "2")
        with self._training(job, None, window, *timers) as training:
            self._follow(training, job, None, window)
            console = training.log().read_text(errors="replace")
            times = [float(text) / 1e3 for text in _FORWARD.findall(console)]
            if not times:
                raise training.failed("Megatron printed no forward time", 0)
            return median(times) / step_seconds(_lines(training.log()), window)

    @contextmanager
    def _training(
        self, job: Job, rate: float | None, window: Window, *more: str
    ) -> Iterator[Training]:
        with tempfile.TemporaryDirectory(prefix="overlap-") as name:
            words = [*job.flags(window, name), *more]
            ranks = [Rank(words) for _ in range(job.num_hosts)]
            what = f"{job.kind} at {link_name(rate)}"
            with self._hosts.training(what, Path(name), ranks, apart=job.is_apart) as training:
                yield training

    def _follow(
        self, training: Training, job: Job, rate: float | None, window: Window
    ) -> tuple[list[int], list[int]]:
        """Limit the links once training has begun, and count bytes at both ends of the window.

        Returns:
            The bytes that each host sent in the window, and the exit codes.
        """
        console, counts = Console(training.log(job.logging_host)), dict[int, list[int]]()
        is_limited = False

        def poll_console() -> None:
            nonlocal is_limited
            reached = console.read().last_iteration
            if reached >= 1 and not is_limited:
                self._lab.set_rate(rate)
                is_limited = True
            for end in (window.first, window.last):
                if reached >= end and end not in counts:
                    counts[end] = self._lab.sent_bytes()
                    if end == window.last:
                        self._lab.set_rate(None)  # so that the end is fast

        codes = training.to_end(poll_console, limit=self._time_limit, poll=POLL_SECONDS)
        if window.last not in counts:
            raise training.failed("ended before it was measured", job.logging_host)
        ends = zip(counts[window.first], counts[window.last], strict=True)
        return [after - before for before, after in ends], codes


def _lines(log: Path) -> list[tuple[int, float]]:
    """Return iteration and milliseconds of all iteration lines."""
    return list(read_console(log).milliseconds().items())
