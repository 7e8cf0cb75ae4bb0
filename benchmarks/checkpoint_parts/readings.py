"""What a run leaves behind: the notes of its ranks, and the files of its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .kinds import AT_SYNC, MID_ROUND, Case

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
        spans: seconds of the rank that stalled longest, by where; they sum up to its stall.
        complete: seconds from when the first rank came to the save until it was complete.
        finalized: seconds, the longest of all ranks, in the calls of the training loop that
            completed it; asynchronous saves only.
        loop: seconds by which it made the training loop longer; None where there is nothing to
            compare with.
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
        """Of the rank that stalled longest."""
        return max(self.stalls)

    @property
    def aside(self) -> float:
        """The stall without what Megatron waits for before it saves: the gather of parameters,
        into which EDiT's last exchange has to land first, where it was to land in the forward pass
        that comes next."""
        return self.stall - sum(self.spans.get(name, 0.0) for name in LANDING)


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        turn: number of the turn, from 0; None where it was run once, for its bytes.
        parameters: of the model.
        saves: in order; the first is no good for times.
        busy: part of the machine's cores that others used, just before and just after.
    """

    case: Case
    turn: int | None
    parameters: int
    saves: list[Save]
    busy: list[float]


def completed(notes: Sequence[Sequence[dict[str, Any]]]) -> dict[int, float]:
    """When the checkpoint of each iteration was complete."""
    return {note["complete"]: note["at"] for own in notes for note in own if "complete" in note}


def saves_of(
    notes: Sequence[Sequence[dict[str, Any]]], checkpoints: Path, case: Case
) -> list[Save]:
    """All checkpoints that are complete, and after which every rank has gone on for a while."""
    found, loops = [], [Loop(own, case, completed(notes)) for own in notes]
    for iteration, at in sorted(completed(notes).items()):
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
                num_bytes=weigh(folder),
                stalls=stalls,
                spans=calls[stalls.index(max(stalls))]["spans"],
                complete=at - began,
                finalized=max(_finalized(own, began, at) for own in notes),
                loop=max(costs) if len(costs) == len(loops) else None,
            )
        )
    return found


class Loop:
    """The iterations of a rank.

    Args:
        notes: of the rank.
        case: says when it saves.
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
        """Seconds from the begin of an iteration until the end of the last that counts with it."""
        end = self._begins.get(iteration + self._case.span)
        return None if end is None else float(end - self._begins[iteration])

    def cost(self, iteration: int) -> float | None:
        """By how much a save made that longer, beside those of the run that are alike."""
        own = self.duration(iteration)
        others = [seconds for other in self._begins if self._is_idle_like(other, iteration)
                  if (seconds := self.duration(other)) is not None]  # fmt: skip
        return own - median(others) if own is not None and others else None

    def _is_idle_like(self, other: int, iteration: int) -> bool:
        """Whether nothing is saved, or still being written; what comes before the first save does
        not count."""
        case = self._case
        begin, end = self._begins[other], self._begins.get(other + case.span, math.inf)
        is_idle = not any(began < end and begin < at for began, at in self._writing)
        return is_idle and other > case.interval and case.is_like(other, iteration)


def _finalized(notes: Iterable[dict[str, Any]], began: float, at: float) -> float:
    """Of the calls from a save until it is complete."""
    return sum(float(n["finalize"]) for n in notes if "finalize" in n and began <= n["began"] <= at)


def position_of(checkpoint: Path) -> str:
    """By its manifest."""
    manifest = checkpoint / "edit" / "edit.json"
    if not manifest.exists():
        return ""
    return MID_ROUND if json.loads(manifest.read_text())["has_anchor"] else AT_SYNC


def weigh(checkpoint: Path) -> dict[str, int]:
    """Bytes of its files, by part."""
    found = dict.fromkeys(PARTS, 0)
    for path in checkpoint.rglob("*"):
        if path.is_file():
            found[part_of(path.relative_to(checkpoint))] += path.stat().st_size
    return found


def part_of(path: Path) -> str:
    """To which part of a checkpoint a file belongs."""
    first, *more = path.parts
    if first != "edit" or not more:
        return OWN
    if more[0] == "outer":
        return OUTER
    return OTHERS if more[0].startswith("replica_") else REST
