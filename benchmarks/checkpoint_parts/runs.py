"""Measure one run: start a training, follow it until its checkpoints are complete, and end it."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from frame.launch import REPOSITORY, Forks, Rank
from frame.readings import read_json_lines

from .kinds import AT_SYNC, MID_ROUND, NOTES_VARIABLE, PAUSE_VARIABLE, WARMUP_SAVES, Case

SCRIPT = Path(__file__).with_name("pretrain_saving.py")
POLL_SECONDS = 0.1
FIRST_PORT = 27500
PROBE_BYTES = 1 << 28
IDLE_SHARE = 0.2

OWN, OUTER, OTHERS, REST = "replica 0", "outer state", "other replicas", "rest"
PARTS = (OWN, OUTER, OTHERS, REST)
LANDING = ("gather parameters", "save/settle")


@dataclass(frozen=True)
class Save:
    """One complete checkpoint.

    Attributes:
        position: `at a sync`, `in mid-round`, or empty for stock Megatron.
        num_bytes: of its files, by part.
        stalls: per rank, seconds in `save_checkpoint_and_time`.
        spans: seconds of the rank with the longest stall, by span; they sum up to its stall.
        complete: seconds from the start of the save on the first rank until it was complete.
        finalized: seconds, on the slowest rank, in the calls of the training loop that completed
            it; asynchronous saves only.
        loop: seconds by which it lengthened the training loop; None without comparable iterations.
    """

    iteration: int
    position: str
    num_bytes: dict[str, int]
    stalls: list[float]
    spans: dict[str, float]
    complete: float
    finalized: float
    loop: float | None = None

    @property
    def stall(self) -> float:
        """Longest stall of a rank."""
        return max(self.stalls)

    @property
    def aside(self) -> float:
        """The stall without landing: the last exchange must land before the parameters are gathered
        for the save, else it would land in the next forward pass."""
        return self.stall - sum(self.spans.get(name, 0.0) for name in LANDING)


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        turn: number of the repeat, from 0; None for a single run that measures only bytes.
        parameters: of the model.
        saves: in order; the first is not timed.
        busy: share of the cores that other programs used, just before and just after.
    """

    case: Case
    turn: int | None
    parameters: int
    saves: list[Save]
    busy: list[float]


def completion_times(notes: Sequence[Sequence[dict[str, Any]]]) -> dict[int, float]:
    """Return when the checkpoint of each iteration was complete."""
    return {note["complete"]: note["at"] for own in notes for note in own if "complete" in note}


def saves_of(
    notes: Sequence[Sequence[dict[str, Any]]], checkpoints: Path, case: Case
) -> list[Save]:
    """Return all checkpoints that are complete and followed by enough iterations on every rank."""
    found, loops = [], [Loop(own, case, completion_times(notes)) for own in notes]
    for iteration, at in sorted(completion_times(notes).items()):
        calls = [note for own in notes for note in own if note.get("save") == iteration]
        if len(calls) < len(notes) or any(loop.duration(iteration) is None for loop in loops):
            continue
        costs = [cost for loop in loops if (cost := loop.cost(iteration)) is not None]
        stalls = [call["ended"] - call["began"] for call in calls]
        began = min(call["began"] for call in calls)
        folder = checkpoints / f"iter_{iteration:07d}"
        found.append(
            Save(
                iteration=iteration,
                position=position_of(folder),
                num_bytes=count_bytes(folder),
                stalls=stalls,
                spans=calls[stalls.index(max(stalls))]["spans"],
                complete=at - began,
                finalized=max(_finalized(own, began, at) for own in notes),
                loop=max(costs) if len(costs) == len(loops) else None,
            )
        )
    return found


class Loop:
    """The times of the iterations of a rank.

    Args:
        notes: of the rank.
        case: gives the iterations with a save.
        complete: when the checkpoint of each iteration was complete.
    """

    def __init__(
        self, notes: Sequence[dict[str, Any]], case: Case, complete: Mapping[int, float]
    ) -> None:
        self._case = case
        self._begins = {note["iteration"]: note["at"] for note in notes if "iteration" in note}
        self._writing = [
            (note["began"], complete.get(note["save"], math.inf))
            for note in notes
            if "save" in note
        ]

    def duration(self, iteration: int) -> float | None:
        """Return the seconds of an iteration and the rest of its span; None if unfinished."""
        end = self._begins.get(iteration + self._case.span)
        return None if end is None else float(end - self._begins[iteration])

    def cost(self, iteration: int) -> float | None:
        """Return the duration of a save minus the median over comparable iterations of the run."""
        own = self.duration(iteration)
        others = [seconds for other in self._begins if self._is_comparable(other, iteration)
                  if (seconds := self.duration(other)) is not None]  # fmt: skip
        return own - median(others) if own is not None and others else None

    def _is_comparable(self, other: int, iteration: int) -> bool:
        """Return whether an iteration after the first save is comparable, and without any save."""
        case = self._case
        begin, end = self._begins[other], self._begins.get(other + case.span, math.inf)
        is_idle = not any(began < end and begin < at for began, at in self._writing)
        return is_idle and other > case.interval and case.is_same_place(other, iteration)


def _finalized(notes: Iterable[dict[str, Any]], began: float, at: float) -> float:
    """Return the seconds of the finalize calls between a save and its completion."""
    return sum(float(n["finalize"]) for n in notes if "finalize" in n and began <= n["began"] <= at)


def position_of(checkpoint: Path) -> str:
    """Return the position of a checkpoint in a round, by its manifest."""
    manifest = checkpoint / "edit" / "edit.json"
    if not manifest.exists():
        return ""
    return MID_ROUND if json.loads(manifest.read_text())["has_anchor"] else AT_SYNC


def count_bytes(checkpoint: Path) -> dict[str, int]:
    """Return the bytes of the files of a checkpoint, by part."""
    found = dict.fromkeys(PARTS, 0)
    for path in checkpoint.rglob("*"):
        if path.is_file():
            found[part_of(path.relative_to(checkpoint))] += path.stat().st_size
    return found


def part_of(path: Path) -> str:
    """Return the part of a checkpoint that a file belongs to."""
    first, *more = path.parts
    if first != "edit" or not more:
        return OWN
    if more[0] == "outer":
        return OUTER
    return OTHERS if more[0].startswith("replica_") else REST


class Bench:
    """Runs cases one after another.

    Args:
        folder: for temporary checkpoints; None is the system's.
        time_limit: seconds until a run is stopped.
    """

    def __init__(self, folder: Path | None, time_limit: float) -> None:
        self._folder = folder
        self._time_limit = time_limit
        self._forks = Forks(FIRST_PORT, time_limit)

    def measure(self, case: Case, turn: int | None, package: Path = REPOSITORY) -> Measurement:
        """Run a case once, with the package in a folder.

        Raises:
            RunFailedError: it failed or took too long.
        """
        before, num_saves = busy_share(), WARMUP_SAVES + case.num_saves
        with self._temporary() as name:
            folder = Path(name)
            files = [folder / f"notes{rank}.jsonl" for rank in range(case.world_size)]
            checkpoints = folder / "checkpoints"
            checkpoints.mkdir()
            ranks = [_rank(case, folder, file, package) for file in files]

            def find_saves() -> list[Save] | None:
                found = saves_of(list(map(read_json_lines, files)), checkpoints, case)
                return found[:num_saves] if len(found) >= num_saves else None

            with self._forks.training(case.name, folder, ranks) as training:
                saves = training.until(find_saves, limit=self._time_limit, poll=POLL_SECONDS)
                calls = [n for file in files for n in read_json_lines(file) if "save" in n]
                if any(call["is_async"] != case.is_async for call in calls):
                    raise training.failed("Megatron has disabled asynchronous saves", 0)
            parameters = calls[0]["parameters"]
            return Measurement(case, turn, parameters, saves, [before, busy_share()])

    def wait_until_idle(self, patience: float) -> float:
        """Wait for an idle machine, at most `patience` seconds; returns the seconds waited."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience and busy_share(3.0) > IDLE_SHARE:
            time.sleep(2.0)
        return waited

    def disk_speed(self) -> float:
        """Return the bytes per second that one process writes to the disk, with fsync."""
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


def _rank(case: Case, folder: Path, notes: Path, package: Path) -> Rank:
    """Return the command of a rank, with the file for its notes."""
    pause = case.async_pause if case.is_async else case.pause
    env = {NOTES_VARIABLE: str(notes), PAUSE_VARIABLE: str(pause)}
    return Rank(case.flags(str(folder)), env, SCRIPT, package=package)


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of the cores in use; between two runs, by other programs."""
    idle, total = _ticks()
    time.sleep(seconds)
    more_idle, more_total = _ticks()
    return 1.0 - (more_idle - idle) / max(1, more_total - total)


def _ticks() -> tuple[int, int]:
    """Return the clock ticks of all cores: idle (with I/O wait), and total."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
