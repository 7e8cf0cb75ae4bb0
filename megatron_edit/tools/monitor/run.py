"""The folder of a training's event files, read as a whole, and again as they grow."""

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

from megatron_edit.errors import UsageError, on_one_line
from megatron_edit.observe.line_files import LineReader, status, unreadable
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
    samples_of,
    whole,
)
from megatron_edit.tools.monitor.facts import Facts, ResumePoint
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.segments import Segment, earlier_segments
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.pages.texts import duration

SILENT_SECONDS = 120.0
SILENT_STEPS = 10  # of the slowest replica's longest steps
WAITING, RUNNING, LOST = "waiting", "running", "lost"  # states beside `ENDS`


class MonitoredRun:
    """Everything that the event files of a training say, so far, of all runs it was resumed in.

    Args:
        folder: `--edit-log-dir`.

    Attributes:
        folder: the same.
        facts: of the newest run; None until `run.json` is there.
        resumed_at: iterations at which the training was resumed, as far as the files before are
            there.
        began_at: Unix seconds at which the first run began; None until `run.json` is there.
        losses: mean over the replicas, by iteration, or by samples of all replicas.
        loss: the newest of them.
        evaluations: the newest evaluation on each set of data.
        syncs: all of them.
        replicas: by number.
        drift: round and replica where a digest first differed from another replica's.
        read_at: Unix seconds of the last reading.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin()

    def _begin(self) -> None:
        self.facts: Facts | None = None
        self.resumed_at: list[int] = []
        self.began_at: float | None = None
        self.losses, self.loss = Bins(), math.nan
        self._validation: dict[int, float] = {}  # by place; the end of training evaluates again
        self.evaluations: dict[str, LossRecord] = {}
        self.syncs = Syncs(0)
        self.replicas: list[Replica] = []
        self.drift: tuple[int, int] | None = None
        self.read_at = time.time()
        self._digests: dict[int, str] = {}
        self._segments: list[Segment] = []
        self._entered: Segment | None = None
        self._damaged: Counter[str] = Counter()
        self._version: tuple[int, int] | None = None

    @property
    def files(self) -> tuple[LineReader, ...]:
        """Those of the newest run, without `run.json`."""
        return self._segments[-1].files if self._segments else ()

    def unread_bytes(self) -> int:
        """What there is to read. It looks for `run.json`, too.

        Raises:
            UsageError: there is a `run.json` that is none of ours, or a file cannot be read.
        """
        self._open()
        return sum(file.unread_bytes for segment in self._segments for file in segment.files)

    def poll(self, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        """Read what has come since the last time; a newer run in the folder is read from its start.

        Args:
            on_bytes: told how many bytes were read, now and then.

        Raises:
            UsageError: there is a `run.json` that is none of ours, or a file cannot be read.
        """
        if self._was_replaced:
            self._begin()
        self._open()
        self.read_at = time.time()
        for segment in self._segments:
            self._read(segment, on_bytes)
        del self._segments[:-1]  # earlier runs write no more
        if self._was_replaced:  # while it was read: what has been read may be of both
            self.poll(on_bytes)

    def _read(self, segment: Segment, on_bytes: Callable[[int], object]) -> None:
        if segment is not self._entered:
            self._enter(segment)
        takers: list[tuple[LineReader, Callable[[Mapping[str, Any]], None]]] = [
            (segment.syncs, partial(self._take_sync, segment)),
            (segment.losses, partial(self._take_loss, segment)),
            *((file, partial(self._take_line, segment, replica))
              for replica, file in zip(self.replicas, segment.replicas, strict=False)),
        ]  # fmt: skip
        for file, take in takers:
            for record in file.read(on_bytes):
                try:
                    take(record)
                except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1
            if file.num_damaged:
                self._damaged[file.path.name] = file.num_damaged

    def _enter(self, segment: Segment) -> None:
        """The next lines are of this run."""
        self._entered, facts = segment, segment.facts
        self.syncs.resume(facts.num_replicas)
        for replica in self.replicas[: facts.num_replicas]:
            replica.resume(facts.warmup_steps, facts.last_local_step)

    @property
    def _was_replaced(self) -> bool:
        """Whether a newer run has begun in the folder: `run.json` is the first that it writes."""
        if self._version is None:
            return False
        now = status(self._path)
        return (
            now is None
            or _version(now) != self._version
            or any(file.was_replaced for file in self.files)
        )

    def _open(self) -> None:
        found = status(self._path)
        if self.facts is not None or found is None or not stat.S_ISREG(found.st_mode):
            return
        try:
            with self._path.open(encoding="utf-8") as file:
                self._version = _version(os.fstat(file.fileno()))
                facts = Facts.of(file.read())
        except FileNotFoundError:  # renamed just now, by a run that begins
            self._begin()
            return
        except OSError as error:
            raise unreadable(self._path, error) from None
        except ValueError as error:
            raise UsageError(
                str(self._path),
                f"is not what a run writes ({error})",
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

    def _take_sync(self, segment: Segment, line: Mapping[str, Any]) -> None:
        if segment.keeps(whole(line["iteration"]), sum(samples_of(line))):
            self.syncs.add(SyncRecord.of(line, self.syncs.num_replicas))

    def _take_loss(self, segment: Segment, line: Mapping[str, Any]) -> None:
        found = LossRecord.of(line)
        if math.isnan(found.loss) or not segment.keeps(found.iteration, found.samples):
            return
        place = self._place(segment, found.iteration, found.samples)
        if found.split is None:
            self.losses.add(place, found.loss)
            self.loss = found.loss
            return
        self.evaluations[on_one_line(f"{found.split} {found.name or ''}").strip()] = found
        if found.split == VALIDATION:
            self._validation[place] = found.loss

    def _take_line(self, segment: Segment, replica: Replica, line: Mapping[str, Any]) -> None:
        if "digest" in line:
            number = whole(line["round"])
            if segment.end is None or number <= self.syncs.newest_round:
                self._compare(number, line["digest"], replica.number)
                replica.on_sync()
        elif "end" in line:
            replica.on_end(Ending.of(line))
        else:
            step = Iteration.of(line)
            if segment.keeps(step.iteration, step.samples_all):
                replica.add(step, self._place(segment, step.iteration, step.samples_all))

    def _place(self, segment: Segment, iteration: int, samples: int | None) -> int:
        """Where a line stands in pictures."""
        if not self.is_by_samples:
            return iteration
        return iteration * (segment.facts.batch_size or 1) if samples is None else samples

    def _iteration_of(self, point: ResumePoint) -> int:
        """The same number as in the lines of the runs."""
        facts = self.facts
        if facts is None or not facts.strategy.is_timed or not facts.batch_size:
            return point.iteration
        return point.samples // facts.batch_size

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- where it is

    @property
    def validation(self) -> Bins:
        """Validation losses, by iteration or by samples like `losses`; the newest of each place."""
        bins = Bins()
        for place, loss in sorted(self._validation.items()):
            bins.add(place, loss)
        return bins

    @property
    def is_by_samples(self) -> bool:
        """Whether pictures are by samples of all replicas, as these make different steps.

        Files of older versions do not say them.
        """
        facts = self.facts
        return facts is not None and facts.strategy.is_timed and facts.has_segment

    @property
    def has_own_steps(self) -> bool:
        """Whether replicas make different numbers of steps."""
        return self.facts is not None and self.facts.strategy.is_timed

    @property
    def has_one_loss_per_round(self) -> bool:
        """Whether `loss.jsonl` has one line for each round after the warm-up."""
        facts = self.facts
        return facts is not None and (facts.strategy.is_timed or facts.has_varying_rounds)

    @property
    def samples(self) -> int | None:
        """Consumed by all replicas, where these tell the progress; None where it is not known."""
        facts = self.facts
        if facts is None or not facts.strategy.is_timed:
            return None
        at_sync = sum(self.syncs.samples)
        if told := max((replica.samples_all for replica in self.replicas), default=0):
            return max(told, at_sync)
        # Older versions say it at a sync only.
        return at_sync + sum(replica.samples for replica in self.replicas) if at_sync else None

    @property
    def iteration(self) -> int:
        """Of the furthest replica; under A-EDiT whole batches of all replicas."""
        samples, facts = self.samples, self.facts
        if samples is None or facts is None or not facts.batch_size:
            return max((replica.iteration for replica in self.replicas), default=0)
        if self._ended == FINISHED and facts.train_iters:  # a rest may make no whole batch
            return facts.train_iters
        return min(samples // facts.batch_size, facts.train_iters or samples)

    @property
    def missing(self) -> list[int]:
        """Replicas without a file here."""
        if self._entered is None:
            return []
        return [number for number, file in enumerate(self._entered.replicas)
                if status(file.path) is None]  # fmt: skip

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
        is_apart = bool(self.syncs.count) or iteration > facts.warmup_steps
        if not facts.strategy.is_timed or not is_apart or iteration == facts.train_iters:
            return min(1.0, iteration / facts.train_iters)
        if samples is None or not facts.batch_size:
            return None
        return min(1.0, samples / (facts.train_iters * facts.batch_size))

    @property
    def num_heard(self) -> int:
        """Replicas whose present speed is known."""
        return sum(math.isfinite(replica.speed) for replica in self.replicas)

    @property
    def speed(self) -> float | None:
        """Tokens per second of all replicas together, at present; None where it cannot be told.

        Replicas that are not heard here count as the mean of the others: all make equally many
        steps, unless they meet by the clock.
        """
        if self.facts is None or not self.num_heard:
            return None
        if self.facts.strategy.is_timed and self.num_heard < len(self.replicas):
            return None
        heard = sum(r.speed for r in self.replicas if math.isfinite(r.speed))
        return heard * len(self.replicas) / self.num_heard

    @property
    def remaining_seconds(self) -> float | None:
        """At the present speed; None where it cannot be told."""
        progress, facts = self.progress, self.facts
        if progress is None or facts is None or not self.speed:
            return None
        tokens = (facts.train_iters or 0) * (facts.batch_size or 0) * (facts.seq_length or 0)
        return (1.0 - progress) * tokens / self.speed if tokens else None

    @property
    def news_at(self) -> float | None:
        """Unix seconds at which a file was last written to."""
        found = map(status, [self._path, *(file.path for file in self.files)])
        return max((each.st_mtime for each in found if each is not None), default=None)

    @property
    def silence(self) -> float:
        """Seconds without anything new."""
        return max(0.0, self.read_at - (self.news_at or self.read_at))

    @property
    def ends(self) -> dict[int, Ending]:
        """How the newest run ended, by replica, as far as it has."""
        return {r.number: r.end for r in self.replicas if r.end is not None}

    @property
    def failure(self) -> tuple[int, Ending] | None:
        """The replica that failed first, and how."""
        failed = [(number, end) for number, end in self.ends.items() if end.end == FAILED]
        return min(failed, key=lambda each: each[1].time, default=None)

    @property
    def _ended(self) -> str | None:
        """How the newest run ended; None until all replicas that are seen here have said so."""
        ends, missing = self.ends, self.missing
        if self.failure is not None:
            return FAILED
        if not ends or any(r.number not in ends and r.number not in missing for r in self.replicas):
            return None
        return STOPPED if any(end.end == STOPPED for end in ends.values()) else FINISHED

    @property
    def state(self) -> str:
        """What has become of the training: one of `ENDS`, `WAITING`, `RUNNING` or `LOST`."""
        if self.facts is None:
            return WAITING
        if (ended := self._ended) is not None:
            return ended
        # Runs of older versions do not write how they ended.
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
        """The state, and why."""
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


def check_folder(folder: Path, *, may_come: bool = False) -> None:
    """Whether there is a folder.

    Args:
        folder: `--edit-log-dir`.
        may_come: it need not be there yet.

    Raises:
        UsageError: it is none, or nobody can tell.
    """
    found = status(folder)
    if found is None and may_come:
        return
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise UsageError(str(folder), "is not a folder", "give the folder of --edit-log-dir")


def open_run(folder: Path) -> MonitoredRun:
    """A folder that holds a run.

    Raises:
        UsageError: it does not.
    """
    check_folder(folder)
    found = status(folder / RUN)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return MonitoredRun(folder)


def _version(found: os.stat_result) -> tuple[int, int]:
    """What a file that is written anew has another one of."""
    return found.st_ino, found.st_mtime_ns
