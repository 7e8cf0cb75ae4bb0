"""Run a case, and count the bytes that its hosts' interfaces send in a sync."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from netlab import INTERFACE, Lab
from overlap_parts.kinds import Job
from overlap_parts.runs import Bench, Run

# Small models step in 15 ms: the counters must be seen between two syncs. A look takes 0.1 ms.
SAMPLE_SECONDS = 0.01
_NUM_PARAMETERS = re.compile(r"> number of parameters on .*: (\d+)\s*$", re.MULTILINE)
_TX_BYTES = 8  # column of /proc/net/dev, after the name


@dataclass(frozen=True)
class Sample:
    """What each host had sent at a Unix time, with headers."""

    time: float
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """Raw numbers of one run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        units: of the model.
        parameters: of the model, as Megatron counts them.
        wire_bytes: per measured sync, payload that replica 0 sent, by EDiT's own count.
        interface_bytes: per sync, what each host's interface sent; None: no look between syncs.
        seconds: per measured sync, EDiT's durations on replica 0.
        load: of the machine, one-minute average before and after.
        exit_codes: of the hosts' processes; other than 0 only where training was over already.
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


class GrowthBench(Bench):
    """Runs cases one after another and watches the interfaces all the time."""

    def __init__(self, lab: Lab, time_limit: float) -> None:
        super().__init__(lab, time_limit, sys.executable)
        self._samples: list[Sample] = []

    def read(self, job: Job, rate: float | None, repeat: int) -> Reading:
        """Run a job once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        window, load = job.window(rate), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="growth-") as name:
            run = Run(job, window, rate, Path(name))
            self._run(run, job.flags(window, name))
            lines = (run.folder / "sync.jsonl").read_text().splitlines()
            count = _NUM_PARAMETERS.search(run.log(0).read_text(errors="replace"))
            if count is None:
                raise run.failed("Megatron did not tell the number of parameters", 0)
            syncs = [json.loads(line) for line in lines]
            measured = [s for s in syncs if window.first < s["iteration"] <= window.last]
            return Reading(
                num_layers=job.model.num_layers,
                hidden_size=job.model.hidden_size,
                num_replicas=job.num_hosts,
                rate=rate,
                repeat=repeat,
                units=len(syncs[0]["units"]),
                parameters=int(count[1]),
                wire_bytes=[sync["wire_bytes"] for sync in measured],
                interface_bytes=bytes_per_sync(self._samples, syncs),
                seconds=[sync["seconds"] for sync in measured],
                load=[load, os.getloadavg()[0]],
                exit_codes=[process.returncode for process in run.processes],
            )

    def _follow(self, run: Run) -> list[int]:
        """Sample the counters until all is over; returns nothing of use.

        The link is limited from the start: small models reach their first sync sooner than anyone
        could see it come.
        """
        deadline = time.monotonic() + self._time_limit
        self._samples = []
        self._lab.set_rate(run.rate)
        while any(process.poll() is None for process in run.processes):
            self._check(run, deadline)
            sent = [sent_bytes(process.pid) for process in run.processes]
            if all(count is not None for count in sent):
                self._samples.append(Sample(time.time(), tuple(count or 0 for count in sent)))
            time.sleep(SAMPLE_SECONDS)
        self._check(run, deadline)
        return []


def sent_bytes(pid: int) -> int | None:
    """Bytes sent so far by the host that a process is in; None before it is there, or after."""
    try:
        # The file shows the process's own namespace: no command has to be started in there.
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    except OSError:
        return None
    counters = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
    return int(counters[INTERFACE][_TX_BYTES]) if INTERFACE in counters else None


def bytes_per_sync(
    samples: Sequence[Sample], syncs: Sequence[Mapping[str, Any]]
) -> list[float] | None:
    """Bytes that each host sent per sync, from samples taken between syncs, when all is quiet.

    Args:
        samples: in order of time.
        syncs: lines of `sync.jsonl`: `time` is just after a sync, `seconds.total` its length.
    """
    quiet: list[tuple[int, tuple[int, ...]]] = []
    for number, (before, after) in enumerate(pairwise(syncs)):
        begin, end = before["time"], after["time"] - after["seconds"]["total"]
        between = [sample for sample in samples if begin < sample.time < end]
        if between:
            # Replicas leave a sync and reach the next a little before or after replica 0.
            middle = min(between, key=lambda sample: abs(sample.time - (begin + end) / 2))
            quiet.append((number, middle.sent))
    if len(quiet) < 2:
        return None
    (first, start), (last, stop) = quiet[0], quiet[-1]
    return [(b - a) / (last - first) for a, b in zip(start, stop, strict=True)]
