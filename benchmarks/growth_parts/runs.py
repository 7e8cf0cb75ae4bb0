"""Run a case, and count the bytes that its hosts' interfaces send in a sync."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from frame.gpt import Window
from frame.launch import REPOSITORY, Hosts, Rank, Training
from frame.readings import read_console, read_syncs
from netlab import INTERFACE, Lab

from .cases import Case

# Small models step in 15 ms, and the counters must be read between two syncs, which takes 0.1 ms.
SAMPLE_SECONDS = 0.01
_TX_BYTES = 8  # column of /proc/net/dev, after the name


@dataclass(frozen=True)
class Sample:
    """Bytes sent by each host until a Unix time, with headers."""

    time: float
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """Raw numbers of one run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        units: of the model.
        parameters: of the model, as Megatron counts them.
        wire_bytes: payload that replica 0 sent per measured sync, as recorded by EDiT.
        interface_bytes: sent by each host's interface per sync; None without samples between syncs.
        seconds: EDiT's times of each measured sync on replica 0.
        load: of the machine, one-minute average before and after.
        exit_codes: of the hosts' processes; not 0 only where training had finished.
    """

    num_layers: int
    hidden_size: int
    num_replicas: int
    rate: float | None
    repeat: int
    units: int
    parameters: int
    wire_bytes: list[int]
    interface_bytes: list[float] | None
    seconds: list[dict[str, float]]
    load: list[float]
    exit_codes: list[int]

    @property
    def sync_ms(self) -> list[float]:
        """Milliseconds of each measured sync, without waiting."""
        return [1e3 * (each["exposed"] - each["wait"]) for each in self.seconds]


class Bench:
    """Runs cases in a lab one after another, and samples the interface counters.

    Args:
        mode: EDiT's sync mode.
        tau: sync interval.
        rounds: measured in a run.
        time_limit: seconds until a run is stopped.
    """

    def __init__(self, lab: Lab, mode: str, tau: int, rounds: int, time_limit: float) -> None:
        self._lab, self._hosts = lab, Hosts(lab)
        self._mode, self._tau = mode, tau
        self._window = Window.of_rounds(tau, rounds)
        self._time_limit = time_limit

    def measure(
        self, case: Case, rate: float | None, repeat: int, package: Path = REPOSITORY
    ) -> Reading:
        """Run a case once, with the package in a folder.

        Raises:
            RunFailedError: it failed or took too long.
        """
        load, window = os.getloadavg()[0], self._window
        with tempfile.TemporaryDirectory(prefix="growth-") as name:
            words = case.flags(self._mode, tau=self._tau, window=window, log_dir=name)
            ranks = [Rank(words, package=package)] * case.num_replicas
            with self._hosts.training(f"{case}", Path(name), ranks) as training:
                samples, codes = self._follow(training, rate)
            if not (parameters := read_console(training.log()).num_parameters):
                raise training.failed("Megatron did not print the number of parameters", 0)
            syncs = read_syncs(training.folder)
            measured = read_syncs(training.folder, window)
            return Reading(
                num_layers=case.num_layers,
                hidden_size=case.hidden_size,
                num_replicas=case.num_replicas,
                rate=rate,
                repeat=repeat,
                units=len(syncs[0]["units"]),
                parameters=parameters,
                wire_bytes=[sync["wire_bytes"] for sync in measured],
                interface_bytes=bytes_per_sync(samples, syncs),
                seconds=[sync["seconds"] for sync in measured],
                load=[load, os.getloadavg()[0]],
                exit_codes=codes,
            )

    def _follow(self, training: Training, rate: float | None) -> tuple[list[Sample], list[int]]:
        """Sample the counters until the training ends; returns the samples and the exit codes.

        The link is limited from the start, as small models reach their first sync very soon.
        """
        samples: list[Sample] = []

        def take_sample() -> None:
            sent = [sent_bytes(pid) for pid in training.pids]
            if all(count is not None for count in sent):
                samples.append(Sample(time.time(), tuple(count or 0 for count in sent)))

        self._lab.set_rate(rate)
        codes = training.to_end(take_sample, limit=self._time_limit, poll=SAMPLE_SECONDS)
        return samples, codes


def sent_bytes(pid: int) -> int | None:
    """Return the bytes sent so far by the host of a process; None while there is no process."""
    try:
        # The file shows the namespace of the process: no command has to be run inside it.
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    except OSError:
        return None
    counters = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
    return int(counters[INTERFACE][_TX_BYTES]) if INTERFACE in counters else None


def bytes_per_sync(
    samples: Sequence[Sample], syncs: Sequence[Mapping[str, Any]]
) -> list[float] | None:
    """Return the bytes that each host sent per sync, from samples taken between syncs.

    Args:
        samples: in order of time.
        syncs: lines of `sync.jsonl`: `time` is just after a sync, `seconds.total` its length.
    """
    quiet: list[tuple[int, tuple[int, ...]]] = []
    for number, (before, after) in enumerate(pairwise(syncs)):
        begin, end = before["time"], after["time"] - after["seconds"]["total"]
        between = [sample for sample in samples if begin < sample.time < end]
        if between:
            # Replicas finish a sync and reach the next a little before or after replica 0.
            middle = min(between, key=lambda sample: abs(sample.time - (begin + end) / 2))
            quiet.append((number, middle.sent))
    if len(quiet) < 2:
        return None
    (first, start), (last, stop) = quiet[0], quiet[-1]
    return [(b - a) / (last - first) for a, b in zip(start, stop, strict=True)]
