"""The event files of a training that was resumed: one segment for each of its runs.

A run renames the files of an earlier run in the folder (`run.1.json`, `sync.1.jsonl`, ...), and
records in `run.json` which checkpoint it resumed from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.constants import REPLICA_NAME
from megatron_edit.observe.line_files import (
    LineReader,
    last_records,
    stat_or_none,
    unreadable_error,
)
from megatron_edit.observe.records import as_count, replica_file, samples_of_all
from megatron_edit.tools.monitor.facts import Facts, ResumePoint

LATE_BATCHES = 10  # a killed run may have saved a checkpoint before it wrote the last lines
_RENAMED = re.compile(r"run\.(\d+)\.json")
_NUMBERED = re.compile(r".*\.\d+")  # in the name of a file: an earlier run's
_CLOCK_SECONDS = 1.0  # resolution of the times of files


@dataclass(frozen=True)
class Segment:
    """The files of one run."""

    folder: Path
    middle: str  # in the names of renamed files: `.1`; empty for the newest run
    facts: Facts
    began_at: float  # Unix seconds at which `run.json` was written
    syncs: LineReader
    losses: LineReader
    replicas: dict[str, LineReader]  # by name or number; of an elastic run those found so far
    end: ResumePoint | None = None  # that a later run resumed from: it repeated what follows

    @classmethod
    def of(
        cls, folder: Path, facts: Facts, number: int | None = None, end: ResumePoint | None = None
    ) -> Segment:
        """Return the files of a run; `number` is that of renamed files."""
        middle = "" if number is None else f".{number}"
        found = stat_or_none(folder / f"run{middle}.json")
        syncs, losses = (LineReader(folder / f"{name}{middle}.jsonl") for name in ("sync", "loss"))
        began_at = math.nan if found is None else found.st_mtime
        segment = cls(folder, middle, facts, began_at, syncs, losses, {}, end)
        segment.add_replicas(() if facts.is_elastic else map(str, range(facts.num_replicas)))
        segment.find_replicas()
        return segment

    @property
    def files(self) -> tuple[LineReader, ...]:
        """All files but `run.json`."""
        return (self.syncs, self.losses, *self.replicas.values())

    def add_replicas(self, names: Iterable[str]) -> None:
        """Add the files of replicas whose names are known; they need not exist yet."""
        for name in names:
            if name not in self.replicas:
                path = (self.folder / replica_file(name)).with_suffix(f"{self.middle}.jsonl")
                self.replicas[name] = LineReader(path)

    def find_replicas(self) -> None:
        """Add the new files in the folder, in an elastic run.

        Raises:
            UsageError: the folder cannot be read.
        """
        if self.facts.is_elastic:
            self.add_replicas(sorted(self._names_in_folder()))

    def _names_in_folder(self) -> Iterator[str]:
        pattern = re.compile(rf"replica-({REPLICA_NAME}){re.escape(self.middle)}\.jsonl")
        for path in _paths_in(self.folder):
            match = pattern.fullmatch(path.name)
            if match is None or match[1] in self.replicas:
                continue
            if not self.middle and _NUMBERED.fullmatch(match[1]):
                continue
            now = stat_or_none(path)  # a file that was not written to since is an earlier run's
            if now is None or now.st_mtime >= self.began_at - _CLOCK_SECONDS:
                yield match[1]

    def has_reached(self, point: ResumePoint) -> bool:
        """Return whether this run got as far as a checkpoint, by its last lines.

        A run that did not cannot have written it. True where the batch size is not known.
        """
        batch = self.facts.batch_size
        if batch is None:
            return True
        furthest = self.facts.resumed_from.samples if self.facts.resumed_from else 0
        for file in self.files:
            for record in last_records(file.path):
                furthest = max(furthest, _samples_of(record, batch))
        return furthest + LATE_BATCHES * batch >= point.samples

    def keeps(self, iteration: int, samples: float | None) -> bool:
        """Return whether a line is part of the training, and was not repeated after a resume.

        The samples are those of all replicas; they decide where steps are unequal.
        """
        if self.end is None:
            return True
        if self.facts.has_unequal_steps and samples is not None:
            return samples <= self.end.samples
        return iteration <= self.end.iteration


def earlier_segments(folder: Path, newest: Facts) -> list[Segment]:
    """Return the earlier runs of the newest run's training, oldest first.

    A run that never got as far as the checkpoint belongs to another training.

    Raises:
        UsageError: the folder cannot be read.
    """
    found: list[Segment] = []
    end = point = newest.resumed_from
    runs = _renamed_runs(folder) if point is not None else iter(())
    for number, facts in runs:
        if point is None or end is None:
            break
        end = min(point, end, key=lambda each: each.samples)
        segment = Segment.of(folder, facts, number, end)
        if not segment.has_reached(point):
            break
        found.append(segment)
        point = facts.resumed_from
    return found[::-1]


def _samples_of(record: dict[str, Any], batch: int) -> int:
    """Return the samples of all replicas in a line of any file; 0 where it has none."""
    samples = record.get("samples_all")
    try:
        if isinstance(record.get("samples"), list):  # a sync: one number per replica
            samples = samples_of_all(record)
        return as_count(record["iteration"]) * batch if samples is None else as_count(samples)
    except (KeyError, TypeError, ValueError):
        return 0


def _renamed_runs(folder: Path) -> Iterator[tuple[int, Facts]]:
    """Yield the renamed runs, newest first, up to the first that cannot be read."""
    names = [_RENAMED.fullmatch(path.name) for path in _paths_in(folder)]
    for number in sorted((int(name[1]) for name in names if name), reverse=True):
        try:
            yield number, Facts.of((folder / f"run.{number}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # earlier runs may belong to another training
            return


def _paths_in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable_error(folder, error) from None
