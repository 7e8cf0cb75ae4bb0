"""What a run leaves behind: Megatron's console lines and EDiT's event files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from frame.gpt import Window

from megatron_edit.tools.compare.console_log import read_json_lines

_LINE = re.compile(
    r"^.*?\biteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+)", re.MULTILINE
)
_FORWARD = re.compile(r"^\s*forward-compute \.*: \(([\d.]+), ", re.MULTILINE)
_SYNC_FIELDS = ("round", "iteration", "wire_bytes", "seconds")


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        window: which iterations were measured.
        host_step_seconds: mean length of the measured iterations: of every host where each is a
            job of its own (`Job.is_apart`), else a single one.
        lines_ms: per host, [iteration, Megatron's "elapsed time per iteration"] of every line.
        window_bytes: what each host sent during the measured iterations, with headers.
        syncs: of the measured iterations: round, iteration, wire_bytes, seconds.
        replica_seconds: of replica 0, all inner steps.
        load: of the machine, one-minute average before and after.
        exit_codes: of the hosts' processes; other than 0 only where training was over already.
    """

    kind: str
    rate: float | None
    repeat: int
    window: Window
    tokens_per_second: float
    host_step_seconds: list[float]
    lines_ms: list[list[tuple[int, float]]]
    window_bytes: list[int]
    syncs: list[dict[str, Any]]
    replica_seconds: list[float]
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


class GrowingLog:
    """A console log that is still written to; each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""
        self._iteration = 0

    def iteration(self) -> int:
        """The last iteration that has been printed; 0 before the first."""
        with self._path.open(errors="replace") as log:
            log.seek(self._offset)
            text = self._rest + log.read()
            self._offset = log.tell()
        whole, _, self._rest = text.rpartition("\n")
        for number, _ in _LINE.findall(whole):
            self._iteration = int(number)
        return self._iteration


def console_lines(log: Path) -> list[tuple[int, float]]:
    """Iteration and milliseconds of all iteration lines."""
    found = _LINE.findall(log.read_text(errors="replace"))
    return [(int(iteration), float(ms)) for iteration, ms in found]


def step_seconds(lines: Sequence[tuple[int, float]], window: Window) -> float:
    """Mean length of the measured iterations. Each line tells the mean since the line before."""
    total = 0.0
    for (before, _), (iteration, ms) in pairwise(lines):
        if window.first < iteration <= window.last:
            total += (iteration - before) * ms / 1e3
    return total / (window.last - window.first)


def forward_seconds(log: Path) -> float | None:
    """Length of the forward passes of an iteration, where Megatron's timers of level 2 were on."""
    times = [float(text) / 1e3 for text in _FORWARD.findall(log.read_text(errors="replace"))]
    return median(times) if times else None


def syncs(folder: Path, window: Window) -> list[dict[str, Any]]:
    """What EDiT says of the syncs of the measured iterations."""
    return [
        {name: line[name] for name in _SYNC_FIELDS}
        for line in read_json_lines(folder / "sync.jsonl")
        if window.first < line["iteration"] <= window.last
    ]


def replica_seconds(folder: Path) -> list[float]:
    """Length of each inner step of replica 0, under EDiT."""
    lines = read_json_lines(folder / "replica-0.jsonl")
    return [line["seconds"] for line in lines if "seconds" in line]
