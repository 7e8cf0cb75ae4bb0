"""One measurement: start a training in the hosts of a lab, follow it, and read what it left."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from frame.gpt import Window, link_name
from frame.launch import REPOSITORY, Hosts, Rank, Training
from netlab import Lab

from .kinds import Job
from .readings import (
    GrowingLog,
    Measurement,
    console_lines,
    forward_seconds,
    replica_seconds,
    step_seconds,
    syncs,
)
from .rivals import RIVALS

RIVAL_SCRIPT = Path(__file__).with_name("pretrain_torchft.py")
POLL_SECONDS = 0.1


class Bench:
    """Runs jobs in a lab, one after another.

    Args:
        time_limit: seconds until a single run is given up.
        rival_python: the interpreter that has torchft.
    """

    def __init__(self, lab: Lab, time_limit: float, rival_python: str = sys.executable) -> None:
        self._lab, self._hosts = lab, Hosts(lab)
        self._time_limit = time_limit
        self._rival_python = rival_python

    def measure(
        self, job: Job, rate: float | None, repeat: int, package: Path = REPOSITORY
    ) -> Measurement:
        """Run a job once, with the package in a folder.

        Raises:
            RunFailedError: it failed or took too long.
        """
        window, load = job.window(rate), os.getloadavg()[0]
        with self._training(job, rate, window, package) as training:
            sent, codes = self._follow(training, job, rate, window)
            lines = [console_lines(training.log(host)) for host in range(job.num_hosts)]
            speakers = range(job.num_hosts) if job.is_apart else [job.speaker]
            steps = [step_seconds(lines[host], window) for host in speakers]
            return Measurement(
                kind=job.kind,
                rate=rate,
                repeat=repeat,
                window=window,
                tokens_per_second=sum(job.tokens_per_iteration / len(steps) / s for s in steps),
                host_step_seconds=steps,
                lines_ms=lines,
                window_bytes=sent,
                syncs=syncs(training.folder, window),
                replica_seconds=replica_seconds(training.folder),
                load=[load, os.getloadavg()[0]],
                exit_codes=codes,
            )

    def forward_share(self, job: Job) -> float:
        """The part of a step of the `ideal` kind that its forward pass takes.

        From a run of its own, as the timers that tell it cost some time themselves.
        """
        window = job.window(None)
        timers = ("--timing-log-level", "2")
        with self._training(job, None, window, REPOSITORY, *timers) as training:
            self._follow(training, job, None, window)
            seconds = forward_seconds(training.log())
            if seconds is None:
                raise training.failed("Megatron printed no forward time", 0)
            return seconds / step_seconds(console_lines(training.log()), window)

    @contextmanager
    def _training(
        self, job: Job, rate: float | None, window: Window, package: Path, *more: str
    ) -> Iterator[Training]:
        with tempfile.TemporaryDirectory(prefix="overlap-") as name:
            words = [*job.flags(window, name), *more]
            ranks = [Rank(words, package=package)] * job.num_hosts
            if job.kind in RIVALS:
                ranks = [
                    replace(self._rival(words, host, job.num_hosts), package=package)
                    for host in range(job.num_hosts)
                ]
            what = f"{job.kind} at {link_name(rate)}"
            with self._hosts.training(what, Path(name), ranks, apart=job.is_apart) as training:
                yield training

    def _rival(self, words: list[str], host: int, num_hosts: int) -> Rank:
        env = {
            "REPLICA": str(host),
            "NUM_REPLICAS": str(num_hosts),
            "FIRST_ADDRESS": self._lab.address(0),
        }
        return Rank(words, env, RIVAL_SCRIPT, self._rival_python)

    def _follow(
        self, training: Training, job: Job, rate: float | None, window: Window
    ) -> tuple[list[int], list[int]]:
        """Limit the links once training has begun, and count bytes at the ends of the window.

        Returns:
            The bytes that each host sent in the window, and the exit codes.
        """
        log, marks = GrowingLog(training.log(job.speaker)), dict[int, list[int]]()
        is_limited = False

        def look() -> None:
            nonlocal is_limited
            reached = log.iteration()
            if reached and not is_limited:
                self._lab.set_rate(rate)
                is_limited = True
            for end in (window.first, window.last):
                if reached >= end and end not in marks:
                    marks[end] = self._lab.sent_bytes()
                    if end == window.last:
                        self._lab.set_rate(None)  # the end need not be slow, either

        codes = training.to_end(look, limit=self._time_limit, poll=POLL_SECONDS)
        if window.last not in marks:
            raise training.failed("ended before it was measured", job.speaker)
        ends = zip(marks[window.first], marks[window.last], strict=True)
        return [after - before for before, after in ends], codes
