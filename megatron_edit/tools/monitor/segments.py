"""The event files of a training that was resumed: one segment for each of its runs.

A run renames the files of an earlier run in the folder (`run.1.json`, `sync.1.jsonl`, ...), and
records in `run.json` which checkpoint it resumed from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.observe.line_files import (
    LineReader,
    last_records,
    stat_or_none,
    unreadable_error,
)
from megatron_edit.observe.records import as_count, samples_of
from megatron_edit.tools.monitor.facts import Facts, ResumePoint

LATE_BATCHES = 10  # a killed run may have saved a checkpoint before it wrote the last lines
_RENAMED = re.compile(r"run\.(\d+)\.json")


@dataclass(frozen=True)
class Segment:
    """The files of one run.

    Attributes:
        facts: contents of its `run.json`.
        began_at: Unix seconds at which `run.json` was written.
        syncs, losses: `sync.jsonl` and `loss.jsonl`.
        replicas: `replica-<r>.jsonl` of each.
        end: checkpoint that a later run resumed from; later lines here were repeated there. None
            for the newest run.
    """

    facts: Facts
    began_at: float
    syncs: LineReader
    losses: LineReader
    replicas: tuple[LineReader, ...]
    end: ResumePoint | None = None

    @classmethod
    def of(
        cls, folder: Path, facts: Facts, number: int | None = None, end: ResumePoint | None = None
    ) -> Segment:
        """Return the files of a run.

        Args:
            folder: `--edit-log-dir`.
            facts: of the run.
            number: in its renamed files; None for the newest run.
            end: checkpoint that a later run resumed from.
        """
        middle = "" if number is None else f".{number}"
        found = stat_or_none(folder / f"run{middle}.json")
        names = ["sync", "loss", *(f"replica-{r}" for r in range(facts.num_replicas))]
        syncs, losses, *replicas = (LineReader(folder / f"{name}{middle}.jsonl") for name in names)
        began_at = math.nan if found is None else found.st_mtime
        return cls(facts, began_at, syncs, losses, tuple(replicas), end)

    @property
    def files(self) -> tuple[LineReader, ...]:
        """All files but `run.json`."""
        return (self.syncs, self.losses, *self.replicas)

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

        Args:
            iteration: of the line.
            samples: of all replicas until then; used where replicas make unequal numbers of steps.
        """
        if self.end is None:
            return True
        if self.facts.strategy.is_timed and samples is not None:
            return samples <= self.end.samples
        return iteration <= self.end.iteration


def earlier_segments(folder: Path, newest: Facts) -> list[Segment]:
    """Return the earlier runs of the newest run's training, oldest first.

    A run that never got as far as the checkpoint belongs to another training.

    Args:
        folder: `--edit-log-dir`.
        newest: facts of the newest run, whose files have not been renamed.

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
            samples = sum(samples_of(record))
        return as_count(record["iteration"]) * batch if samples is None else as_count(samples)
    except (KeyError, TypeError, ValueError):
        return 0


def _renamed_runs(folder: Path) -> Iterator[tuple[int, Facts]]:
    """Yield the renamed runs, newest first, up to the first that cannot be read."""
    try:
        names = [_RENAMED.fullmatch(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise unreadable_error(folder, error) from None
    for number in sorted((int(name[1]) for name in names if name), reverse=True):
        try:
            yield number, Facts.of((folder / f"run.{number}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # earlier runs may belong to another training
            return
