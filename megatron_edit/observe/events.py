"""Event files: JSON Lines under `--edit-log-dir`, each with one writer.

| file | writer |
|---|---|
| run.json, sync.jsonl, loss.jsonl | the writer rank of replica 0 |
| replica-<r>.jsonl | the writer rank of replica r |

What an earlier run left there is renamed when a run begins, before anything is written (`earlier`).
A disk that is full, or gone, never ends a training: there is one warning, lines wait in memory
(`line_files`), and at the end it is said how many were lost.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_edit.comm.placement import Placement
from megatron_edit.constants import LOW_CLIP, WATCHED_SYNCS
from megatron_edit.engine import SyncReport
from megatron_edit.errors import UsageError
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.console import say, warn
from megatron_edit.observe.earlier import files_to_move, move_aside, next_number
from megatron_edit.observe.line_files import MAX_WAITING_BYTES, LineWriter
from megatron_edit.observe.metrics import MetricSink, SyncMetrics
from megatron_edit.observe.records import (
    LOSSES,
    RUN,
    SYNCS,
    Ending,
    Evaluation,
    Iteration,
    LossRecord,
    replica_file,
)
from megatron_edit.observe.reports import digest_line, loss_rejections, sync_line, sync_summary
from megatron_edit.whole_files import write_whole


class SyncTimers(Protocol):
    """The host's own timers."""

    def add_sync(self, seconds: Mapping[str, float]) -> None:
        """Count what a sync took (`SyncReport.seconds`)."""


class CountOfAll(Protocol):
    """What all replicas have consumed together, where they run at their own speeds."""

    @property
    def samples(self) -> int:
        """Samples that all replicas have consumed so far, as far as this one knows."""

    @property
    def iteration(self) -> int:
        """The same in whole global batches."""

    def iteration_at(self, samples: int) -> int:
        """The number of whole global batches once all replicas have consumed `samples`."""


@dataclass
class _SampleCounts:
    """Samples that all replicas have consumed by a step, for losses that are known later."""

    _counts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def note(self, step: int, samples: int, batch: int) -> None:
        """Remember the count after a step, and how much the step, or the next one, consumes."""
        self._counts[step] = samples, batch

    def take(self, step: int) -> int | None:
        """The count of a step, whose predecessors are forgotten; None where nothing is known.

        Steps before a resume were counted by another process: there the batch is taken for theirs.
        """
        self._counts = {known: n for known, n in self._counts.items() if known >= step}
        if not self._counts:
            return None
        first = min(self._counts)
        samples, batch = self._counts[first]
        return samples - (first - step) * batch


class EventLog:
    """Writes the event files and the console lines of one rank.

    Args:
        log_dir: `--edit-log-dir`, which is there; None keeps the console lines only.
        placement: decides which files this rank writes.
        flush_interval: iterations between two flushes.
    """

    def __init__(self, log_dir: Path | None, placement: Placement, flush_interval: int = 1) -> None:
        self._placement = placement
        self._flush_interval = max(1, flush_interval)
        self._dir = log_dir if placement.is_writer else None
        self._is_first = placement.replica == 0
        self._files: dict[str, LineWriter] = {}
        # Taken now, moved in `begin`: replicas meet in between, so that all find the same number.
        self._number_of_earlier = 0 if self._dir is None else next_number(self._dir)
        is_earlier_there = self._dir is not None and (self._dir / RUN).exists()
        self._segment_number = self._number_of_earlier + is_earlier_there
        self._header: str | None = None  # the text of run.json, from `begin` on
        self._is_folder_ready = True
        self._samples = _SampleCounts()
        self._lines: list[tuple[str, Mapping[str, Any]]] = []  # since the last flush, by file
        self._ending: Ending | None = None
        self._has_failed = False
        self._timers: SyncTimers | None = None
        self._metrics: tuple[SyncMetrics, MetricSink] | None = None
        self._count_of_all: CountOfAll | None = None
        self._health: deque[tuple[float, float]] = deque(maxlen=WATCHED_SYNCS)

    def connect(self, metrics: SyncMetrics, sink: MetricSink) -> None:
        """Also write scalars from here on.

        Args:
            metrics: makes them.
            sink: the host's writers.
        """
        self._metrics = metrics, sink

    def count_all(self, count: CountOfAll) -> None:
        """Replicas run at their own speeds: iterations are whole global batches of all of them.

        Args:
            count: of samples.
        """
        self._count_of_all = count

    def connect_timers(self, timers: SyncTimers) -> None:
        """Also show there what syncs take, from here on.

        Args:
            timers: the host's.
        """
        self._timers = timers

    def begin(self, run: Mapping[str, Any]) -> None:
        """Move an earlier run's files of this rank out of the way, and write `run.json`.

        Args:
            run: its content; only replica 0 writes it.
        """
        if self._dir is None:
            return
        self._header = json.dumps(run, indent=2, sort_keys=True, default=str) + "\n"
        self._is_folder_ready = False
        self.flush()

    def on_iteration(self, iteration: Iteration) -> None:
        """One inner iteration is over."""
        self._append(replica_file(self._placement.replica), iteration.line())
        if iteration.replica_step % self._flush_interval == 0:
            self.flush()

    def on_sync(self, report: SyncReport) -> None:
        """A sync is over."""
        if self._count_of_all is not None:
            report = replace(report, step=self._count_of_all.iteration_at(sum(report.samples)))
        if self._timers is not None:
            self._timers.add_sync(report.seconds)
        self._append(replica_file(self._placement.replica), digest_line(report))
        if self._is_first:
            self._append(SYNCS, sync_line(report))
        if self._metrics is not None:
            metrics, sink = self._metrics
            samples = sum(report.samples)
            sink.write(metrics.values(report), report.step, samples)
        if self._is_first and self._placement.is_writer:
            say(sync_summary(report))
            for line in loss_rejections(report):
                say(line)
            self._watch_health(report)
        self.flush()

    def count_samples(self, step: int, samples: int, batch: int) -> None:
        """Note what all replicas have consumed after a step, before its loss is known.

        Args:
            step: from 0 on, where a run begins.
            samples: consumed so far.
            batch: samples of one step of all replicas.
        """
        if self._is_first and self._dir is not None:
            self._samples.note(step, samples, batch)

    def on_losses(
        self, first_step: int, losses: Sequence[float], samples: int | None = None
    ) -> None:
        """Mean losses over the replicas, of steps `first_step`, `first_step` + 1, ...

        Args:
            first_step: of the first loss.
            losses: one for each step, or one for a whole round.
            samples: consumed by all replicas at the end of that round; None where each step has its
                loss, and `count_samples` was told of it.
        """
        if (count := self._count_of_all) is not None:  # of a warm-up step, or of a round's end
            first_step, samples = count.iteration, count.samples
        if self._is_first:
            for step, loss in enumerate(losses, start=first_step):
                total = self._samples.take(step) if samples is None else samples
                self._append(LOSSES, LossRecord(step, total, None, loss).line())
        if self._metrics is not None:
            self._metrics[1].write_losses(first_step, losses)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """All replicas have evaluated."""
        if self._is_first:
            self._append(LOSSES, evaluation.line())
            self.flush()

    def on_end(self, ending: Ending) -> None:
        """Training is over; `close` writes it down."""
        self._ending = ending

    def on_message(self, text: str) -> None:
        """A line for people: on the console for replica 0, else in the replica's own file."""
        if self._placement.is_writer:
            say(text)

    def on_local_message(self, text: str) -> None:
        """A line about this rank: on the console, whatever the replica; it is rare and bad."""
        place = self._placement
        warn(f"replica {place.replica} rank {place.rank}: {text}")

    def flush(self) -> None:
        """Bring everything written so far to the disk. What cannot be written now waits."""
        if self._dir is None:
            return
        lines, self._lines = self._lines, []
        for name, line in lines:
            self._writer_of(name).append(line)
        if self._header is not None and not self._attempt(self._prepare_folder):
            return  # nothing is written before an earlier run's files are out of the way
        for file in self._files.values():
            self._attempt(file.flush)

    def close(self) -> None:
        """Close all files, and say how many lines were lost. Idempotent."""
        if self._metrics is not None:
            self._metrics[1].flush()
            self._metrics = None
        self.flush()
        if self._dir is not None and self._header is not None and self._ending is not None:
            mine = replica_file(self._placement.replica)
            self._writer_of(mine).append(self._ending.line(self.num_lost), is_last=True)
            self._ending = None
            self.flush()
        if lost := self.num_lost:
            self.on_local_message(f"{lost} lines of event files in {self._dir} were lost")
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def num_lost(self) -> int:
        """Lines of this rank that are not in a file, and will not be if it ends now."""
        return sum(file.num_dropped + file.num_waiting for file in self._files.values())

    @property
    def segment_number(self) -> int:
        """Which run in the folder this is, from 1: the number that its files get when a later run
        renames them."""
        return self._segment_number

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self._dir is not None:
            self._lines.append((name, line))

    def _writer_of(self, name: str) -> LineWriter:
        assert self._dir is not None, "no folder to write to"
        if name not in self._files:
            self._files[name] = LineWriter(self._dir / name)
        return self._files[name]

    def _prepare_folder(self) -> None:
        """Move an earlier run's files, once; write `run.json`, again where the folder was deleted.

        Raises:
            OSError: that cannot be done now.
        """
        assert self._dir is not None and self._header is not None, "no folder to prepare"
        needed = self._dir / RUN if self._is_first else self._dir
        if self._is_folder_ready and needed.exists():
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        if not self._is_folder_ready:
            move_aside(files_to_move(self._dir, self._placement), self._number_of_earlier)
        if self._is_first:
            write_whole(self._dir / RUN, self._header)
        self._is_folder_ready = True

    def _attempt(self, write: Callable[[], None]) -> bool:
        """Whether something could be written; the first failure is told."""
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self.on_local_message(
                    f"event files in {self._dir} cannot be written ({error.strerror}); training "
                    f"goes on, up to {MAX_WAITING_BYTES >> 20} MiB of lines for each file wait "
                    "until they can"
                )
            return False
        return True

    def _watch_health(self, report: SyncReport) -> None:
        """Warn of weights near one-hot, or a clip that always binds (method section 3)."""
        effective = effective_replicas(report.decision.weights).median().item()
        self._health.append((effective, report.clip.nan_to_num(1.0).median().item()))
        if len(self._health) < WATCHED_SYNCS or report.round % WATCHED_SYNCS:
            return
        half = self._placement.num_replicas / 2
        if all(seen < half for seen, _ in self._health):
            say(
                f"WARNING: for {WATCHED_SYNCS} syncs the median unit has stood on fewer than "
                f"{half:g} replicas; give a higher --edit-weight-temperature, or auto, or look at "
                "the anomalies"
            )
        if all(clip < LOW_CLIP for _, clip in self._health):
            say(
                f"WARNING: for {WATCHED_SYNCS} syncs the median unit was clipped below "
                f"{LOW_CLIP:g}; raise --edit-clip, or lower the learning rate"
            )


def prepare_log_dir(path: str | None) -> Path | None:
    """Make the folder of the event files.

    Raises:
        UsageError: it cannot be made or written to.
    """
    if path is None:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"--edit-log-dir {path}",
            f"must be a folder that can be written to ({error.strerror})",
            "give another folder, or correct its permissions",
            is_local=True,
        ) from error
    return folder
