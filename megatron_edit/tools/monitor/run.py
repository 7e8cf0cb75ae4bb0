"""The event files of a training, read once and again as they grow."""

from __future__ import annotations

import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.observe.line_files import LineReader, stat_or_none, unreadable_error
from megatron_edit.observe.records import (
    ENDS,
    FAILED,
    FINISHED,
    RUN,
    STOPPED,
    VALIDATION,
    Ending,
    Iteration,
    LossRecord,
    SyncRecord,
    as_count,
    samples_of,
)
from megatron_edit.tools.monitor.facts import Facts, ResumePoint
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.segments import Segment, earlier_segments
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.pages.texts import duration

SILENT_SECONDS = 120.0
SILENT_STEPS = 10  # times the longest recent step of the slowest replica
WAITING, RUNNING, LOST = "waiting", "running", "lost"  # states other than `ENDS`


class MonitoredRun:
    """The contents so far of a training's event files, over all runs of the training.

    Args:
        folder: `--edit-log-dir`.

    Attributes:
        folder: `--edit-log-dir`.
        facts: of the newest run; None until `run.json` exists.
        resumed_at: iterations at which the training was resumed, as far as the files of earlier
            runs exist.
        began_at: Unix seconds at which the first run began; None until `run.json` exists.
        losses: mean over the replicas, by iteration, or by samples of all replicas.
        loss: the newest of these losses.
        evaluations: the newest evaluation on each data set.
        syncs: all syncs.
        replicas: by number.
        drift: round and replica where a digest first differed from another replica's.
        read_at: Unix seconds of the last reading.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reset()

    def _reset(self) -> None:
        self.facts: Facts | None = None
        self.resumed_at: list[int] = []
        self.began_at: float | None = None
        self.losses, self.loss = Bins(), math.nan
        self._validation: dict[int, float] = {}  # by x; the end of training evaluates again
        self.evaluations: dict[str, LossRecord] = {}
        self.syncs = Syncs(0)
        self.replicas: list[Replica] = []
        self.drift: tuple[int, int] | None = None
        self.read_at = time.time()
        self._digests: dict[int, str] = {}
        self._segments: list[Segment] = []
        self._current_segment: Segment | None = None
        self._damaged: Counter[str] = Counter()
        self._version: tuple[int, int] | None = None

    @property
    def files(self) -> tuple[LineReader, ...]:
        """Files of the newest run, without `run.json`."""
        return self._segments[-1].files if self._segments else ()

    def unread_bytes(self) -> int:
        """Return how many bytes can be read now. Opens `run.json` if it exists.

        Raises:
            UsageError: `run.json` was not written by this package, or a file cannot be read.
        """
        self._open()
        return sum(file.unread_bytes for segment in self._segments for file in segment.files)

    def poll(self, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        """Read the new lines; read a newer run in the folder from its start.

        Args:
            on_bytes: called now and then with the number of bytes just read.

        Raises:
            UsageError: `run.json` was not written by this package, or a file cannot be read.
        """
        if self._was_replaced:
            self._reset()
        self._open()
        self.read_at = time.time()
        for segment in self._segments:
            self._read(segment, on_bytes)
        del self._segments[:-1]  # earlier runs write no more
        if self._was_replaced:  # during the read: the lines read may belong to both runs
            self.poll(on_bytes)

    def _read(self, segment: Segment, on_bytes: Callable[[int], object]) -> None:
        if segment is not self._current_segment:
            self._begin_segment(segment)
        readers: list[tuple[LineReader, Callable[[Mapping[str, Any]], None]]] = [
            (segment.syncs, partial(self._add_sync, segment)),
            (segment.losses, partial(self._add_loss, segment)),
            *((file, partial(self._add_replica_line, segment, replica))
              for replica, file in zip(self.replicas, segment.replicas, strict=False)),
        ]  # fmt: skip
        for file, add_record in readers:
            for record in file.read(on_bytes):
                try:
                    add_record(record)
                except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1
            if file.num_damaged:
                self._damaged[file.path.name] = file.num_damaged

    def _begin_segment(self, segment: Segment) -> None:
        """Begin a run: the next lines belong to it."""
        self._current_segment, facts = segment, segment.facts
        self.syncs.resume(facts.num_replicas)
        for replica in self.replicas[: facts.num_replicas]:
            replica.resume(facts.warmup_steps, facts.last_local_step)

    @property
    def _was_replaced(self) -> bool:
        """Whether a newer run has begun in the folder: it writes `run.json` first."""
        if self._version is None:
            return False
        now = stat_or_none(self._path)
        return (
            now is None
            or _version(now) != self._version
            or any(file.was_replaced for file in self.files)
        )

    def _open(self) -> None:
        found = stat_or_none(self._path)
        if self.facts is not None or found is None or not stat.S_ISREG(found.st_mode):
            return
        try:
            with self._path.open(encoding="utf-8") as file:
                self._version = _version(os.fstat(file.fileno()))
                facts = Facts.of(file.read())
        except FileNotFoundError:  # renamed just now, by a run that begins
            self._reset()
            return
        except OSError as error:
            raise unreadable_error(self._path, error) from None
        except ValueError as error:
            raise UsageError(
                str(self._path),
                f"was not written by a run ({error})",
                "give the folder of --edit-log-dir",
            ) from None
        earlier = earlier_segments(self.folder, facts)
        self.facts = facts
        self._segments = [*earlier, Segment.of(self.folder, facts)]
        self.replicas = [Replica(number) for number in range(facts.num_replicas)]
        self.resumed_at = [self._iteration_of(s.end) for s in earlier if s.end is not None]
        self.began_at = self._segments[0].began_at

    @property
    def _path(self) -> Path:
        return self.folder / RUN

    # ---- lines

    def _add_sync(self, segment: Segment, line: Mapping[str, Any]) -> None:
        if segment.keeps(as_count(line["iteration"]), sum(samples_of(line))):
            self.syncs.add(SyncRecord.of(line, self.syncs.num_replicas))

    def _add_loss(self, segment: Segment, line: Mapping[str, Any]) -> None:
        found = LossRecord.of(line)
        if math.isnan(found.loss) or not segment.keeps(found.iteration, found.samples):
            return
        place = self._x_of(segment, found.iteration, found.samples)
        if found.split is None:
            self.losses.add(place, found.loss)
            self.loss = found.loss
            return
        self.evaluations[to_one_line(f"{found.split} {found.name or ''}").strip()] = found
        if found.split == VALIDATION:
            self._validation[place] = found.loss

    def _add_replica_line(
        self, segment: Segment, replica: Replica, line: Mapping[str, Any]
    ) -> None:
        if "digest" in line:
            number = as_count(line["round"])
            if segment.end is None or number <= self.syncs.newest_round:
                self._compare(number, line["digest"], replica.number)
                replica.on_sync()
        elif "end" in line:
            replica.on_end(Ending.of(line))
        else:
            step = Iteration.of(line)
            if segment.keeps(step.iteration, step.samples_all):
                replica.add(step, self._x_of(segment, step.iteration, step.samples_all))

    def _x_of(self, segment: Segment, iteration: int, samples: int | None) -> int:
        """Return the x value of a line in charts."""
        if not self.is_plotted_by_samples:
            return iteration
        return iteration * (segment.facts.batch_size or 1) if samples is None else samples

    def _iteration_of(self, point: ResumePoint) -> int:
        """Return the iteration of a checkpoint, counted as in the lines of the runs."""
        facts = self.facts
        if facts is None or not facts.strategy.is_timed or not facts.batch_size:
            return point.iteration
        return point.samples // facts.batch_size

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- present state

    @property
    def validation(self) -> Bins:
        """Validation losses, by iteration or by samples like `losses`; the newest of each x."""
        bins = Bins()
        for place, loss in sorted(self._validation.items()):
            bins.add(place, loss)
        return bins

    @property
    def is_plotted_by_samples(self) -> bool:
        """Whether charts are by samples of all replicas, because these make unequal steps.

        Files of older versions do not have the samples.
        """
        facts = self.facts
        return facts is not None and facts.strategy.is_timed and facts.has_segment

    @property
    def has_unequal_steps(self) -> bool:
        """Whether replicas make unequal numbers of steps."""
        return self.facts is not None and self.facts.strategy.is_timed

    @property
    def has_one_loss_per_round(self) -> bool:
        """Whether `loss.jsonl` has one line for each round after the warm-up."""
        facts = self.facts
        return facts is not None and (facts.strategy.is_timed or facts.has_varying_rounds)

    @property
    def samples(self) -> int | None:
        """Samples consumed by all replicas under A-EDiT; None otherwise or where not known."""
        facts = self.facts
        if facts is None or not facts.strategy.is_timed:
            return None
        at_sync = sum(self.syncs.samples)
        if recorded := max((replica.samples_all for replica in self.replicas), default=0):
            return max(recorded, at_sync)
        # Older versions record it at a sync only.
        return at_sync + sum(replica.samples for replica in self.replicas) if at_sync else None

    @property
    def iteration(self) -> int:
        """Iteration of the furthest replica; under A-EDiT complete batches of all replicas."""
        samples, facts = self.samples, self.facts
        if samples is None or facts is None or not facts.batch_size:
            return max((replica.iteration for replica in self.replicas), default=0)
        if self._end_state == FINISHED and facts.train_iters:  # the last batch may be partial
            return facts.train_iters
        return min(samples // facts.batch_size, facts.train_iters or samples)

    @property
    def missing(self) -> list[int]:
        """Replicas without a file in the folder."""
        if self._current_segment is None:
            return []
        return [number for number, file in enumerate(self._current_segment.replicas)
                if stat_or_none(file.path) is None]  # fmt: skip

    @property
    def num_damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        return dict(self._damaged)

    @property
    def lines_lost(self) -> int:
        """Lines that could not be written."""
        return sum(replica.lines_lost for replica in self.replicas)

    @property
    def progress(self) -> float | None:
        """Share of the training that is done; None where its length is not known."""
        facts = self.facts
        if facts is None or not facts.train_iters:
            return None
        samples, iteration = self.samples, self.iteration
        is_past_warmup = bool(self.syncs.count) or iteration > facts.warmup_steps
        if not facts.strategy.is_timed or not is_past_warmup or iteration == facts.train_iters:
            return min(1.0, iteration / facts.train_iters)
        if samples is None or not facts.batch_size:
            return None
        return min(1.0, samples / (facts.train_iters * facts.batch_size))

    @property
    def num_with_speed(self) -> int:
        """Replicas whose present speed is known."""
        return sum(math.isfinite(replica.speed) for replica in self.replicas)

    @property
    def speed(self) -> float | None:
        """Present tokens per second of all replicas together; None where not known.

        Replicas whose speed is not known count as the mean of the others: all make equally many
        steps, unless they sync by time.
        """
        if self.facts is None or not self.num_with_speed:
            return None
        if self.facts.strategy.is_timed and self.num_with_speed < len(self.replicas):
            return None
        known = sum(r.speed for r in self.replicas if math.isfinite(r.speed))
        return known * len(self.replicas) / self.num_with_speed

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the end at the present speed; None where not known."""
        progress, facts = self.progress, self.facts
        if progress is None or facts is None or not self.speed:
            return None
        tokens = (facts.train_iters or 0) * (facts.batch_size or 0) * (facts.seq_length or 0)
        return (1.0 - progress) * tokens / self.speed if tokens else None

    @property
    def last_write_at(self) -> float | None:
        """Unix seconds at which a file was last written to."""
        found = map(stat_or_none, [self._path, *(file.path for file in self.files)])
        return max((each.st_mtime for each in found if each is not None), default=None)

    @property
    def silence(self) -> float:
        """Seconds since a file was last written to."""
        return max(0.0, self.read_at - (self.last_write_at or self.read_at))

    @property
    def ends(self) -> dict[int, Ending]:
        """End record of the newest run, of each replica that has written one."""
        return {r.number: r.end for r in self.replicas if r.end is not None}

    @property
    def failure(self) -> tuple[int, Ending] | None:
        """The replica that failed first, and its end record."""
        failed = [(number, end) for number, end in self.ends.items() if end.end == FAILED]
        return min(failed, key=lambda each: each[1].time, default=None)

    @property
    def _end_state(self) -> str | None:
        """How the newest run ended; None until all replicas with a file here have an end record."""
        ends, missing = self.ends, self.missing
        if self.failure is not None:
            return FAILED
        if not ends or any(r.number not in ends and r.number not in missing for r in self.replicas):
            return None
        return STOPPED if any(end.end == STOPPED for end in ends.values()) else FINISHED

    @property
    def state(self) -> str:
        """State of the training: one of `ENDS`, `WAITING`, `RUNNING` or `LOST`."""
        if self.facts is None:
            return WAITING
        if (ended := self._end_state) is not None:
            return ended
        # Runs of older versions write no end record.
        if not self.facts.has_segment and self.progress is not None and self.progress >= 1.0:
            return FINISHED
        longest = max((replica.step_seconds for replica in self.replicas), default=0.0)
        limit = max(SILENT_SECONDS, SILENT_STEPS * longest)
        return LOST if self.silence > limit else RUNNING

    @property
    def is_over(self) -> bool:
        """Whether the newest run has ended."""
        return self.state in ENDS

    @property
    def state_text(self) -> str:
        """The state with its reason."""
        state = self.state
        if state == LOST:
            return f"lost (no line for {duration(self.silence)})"
        if state == FAILED and self.failure is not None:
            number, end = self.failure
            return f"failed: {end.reason or f'replica {number}, exit code {end.exit_code}'}"
        if state == STOPPED:
            reasons = {end.reason for end in self.ends.values() if end.reason}
            return f"stopped ({', '.join(sorted(reasons))})" if reasons else state
        return state


def check_folder(folder: Path, *, may_be_missing: bool = False) -> None:
    """Check that the folder is one.

    Args:
        folder: `--edit-log-dir`.
        may_be_missing: accept a path that does not exist yet.

    Raises:
        UsageError: it is not a folder, or it cannot be read.
    """
    found = stat_or_none(folder)
    if found is None and may_be_missing:
        return
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise UsageError(str(folder), "is not a folder", "give the folder of --edit-log-dir")


def open_run(folder: Path) -> MonitoredRun:
    """Return the run in a folder.

    Raises:
        UsageError: the folder holds no run.
    """
    check_folder(folder)
    found = stat_or_none(folder / RUN)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return MonitoredRun(folder)


def _version(found: os.stat_result) -> tuple[int, int]:
    """Return a value that changes when a file is replaced."""
    return found.st_ino, found.st_mtime_ns
