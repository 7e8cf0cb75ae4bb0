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

from megatron_edit.constants import MIN_TIMEOUT_SECONDS
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
    samples_of_all,
)
from megatron_edit.tools.monitor.facts import Facts, ResumePoint
from megatron_edit.tools.monitor.membership import HubJournal, MembershipHistory
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.segments import Segment, earlier_segments
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.pages.texts import duration

SILENT_SECONDS = 120.0
SILENT_STEPS = 10  # times the longest recent step of the slowest replica
SILENT_SYNCS = 4  # times the longest recent sync
FORWARD_SHARE = 0.5  # at most: of a batch of an evaluation in a step
WAITING, RUNNING, LOST = "waiting", "running", "lost"  # states other than `ENDS`


class MonitoredRun:
    """The contents so far of a training's event files, over all runs of the training.

    Args:
        folder: `--edit-log-dir`.
        journal: of the hub of an elastic run, if it is to be read, too.

    Attributes:
        folder: `--edit-log-dir`.
        journal: as given.
        facts: of the newest run; None until `run.json` exists.
        resumed_at: iterations at which the training was resumed, as far as the files of earlier
            runs exist.
        began_at: Unix seconds at which the first run began; None until `run.json` exists.
        losses: mean over the replicas, by iteration, or by samples of all replicas.
        loss: the newest of these losses.
        evaluations: the newest evaluation on each data set.
        syncs: all syncs.
        replicas: by number; of an elastic run all that have ever taken part, in order of their
            first appearance.
        membership: who took part in the syncs of an elastic run.
        drift: round and replica where a digest first differed from another replica's.
        read_at: Unix seconds of the last reading.
    """

    def __init__(self, folder: Path, journal: HubJournal | None = None) -> None:
        self.folder, self.journal = folder, journal
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
        self.membership = MembershipHistory()
        self.drift: tuple[int, int] | None = None
        self.read_at = time.time()
        self._numbers: dict[str, int] = {}  # of replicas, by name
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
        if self.journal is not None:
            self.journal.poll()
        for segment in self._segments:
            self._read(segment, on_bytes)
        del self._segments[:-1]  # earlier runs write no more
        if self._was_replaced:  # during the read: the lines read may belong to both runs
            self.poll(on_bytes)

    def _read(self, segment: Segment, on_bytes: Callable[[int], object]) -> None:
        segment.find_replicas()
        if segment is not self._current_segment:
            self._begin_segment(segment)

        def read(file: LineReader, add: Callable[[Mapping[str, Any]], None]) -> None:
            for record in file.read(on_bytes):
                try:
                    add(record)
                except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1
            if file.num_damaged:
                self._damaged[file.path.name] = file.num_damaged

        for name in segment.replicas if self._has_names(segment) else ():
            self._replica(name)
        read(segment.syncs, partial(self._add_sync, segment))
        read(segment.losses, partial(self._add_loss, segment))
        segment.add_replicas(self.membership.members)
        for name, file in segment.replicas.items():
            if name in self._numbers:  # not so where the newest run has fewer replicas
                read(file, partial(self._add_replica_line, segment, self._replica(name)))

    def _begin_segment(self, segment: Segment) -> None:
        """Begin a run: the next lines belong to it."""
        self._current_segment, facts = segment, segment.facts
        self.syncs.resume(facts.num_replicas)
        self.membership.begin_run()
        for replica in self.replicas:
            replica.resume(facts.warmup_steps, facts.last_local_step)

    def _has_names(self, segment: Segment) -> bool:
        """Whether replicas are known by their names in a run: it or the newest one is elastic."""
        return self.is_elastic or segment.facts.is_elastic

    def _replica(self, name: str) -> Replica:
        """Return a replica by name; a new one is added."""
        if name not in self._numbers:
            self._numbers[name] = len(self.replicas)
            replica = Replica(len(self.replicas), name)
            if self._current_segment is not None:
                facts = self._current_segment.facts
                replica.resume(facts.warmup_steps, facts.last_local_step)
            self.replicas.append(replica)
            self.syncs.num_columns = len(self.replicas)
        return self.replicas[self._numbers[name]]

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
        for number in () if facts.is_elastic else range(facts.num_replicas):
            self._replica(str(number))
        self.resumed_at = [self._iteration_of(s.end) for s in earlier if s.end is not None]
        self.began_at = self._segments[0].began_at

    @property
    def _path(self) -> Path:
        return self.folder / RUN

    # ---- lines

    def _add_sync(self, segment: Segment, line: Mapping[str, Any]) -> None:
        if not segment.keeps(as_count(line["iteration"]), samples_of_all(line)):
            return
        sync = SyncRecord.of(line, segment.facts.num_replicas)
        if not self._has_names(segment):
            self.syncs.add(sync)
            return
        if segment.facts.is_elastic and not sync.members:
            raise ValueError("no members")
        names = sync.members or tuple(map(str, range(segment.facts.num_replicas)))
        self.syncs.add(sync, [self._replica(name).number for name in names])
        if sync.members:
            self.membership.add(sync, self.syncs.elapsed)

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
                if segment.facts.is_elastic and replica.was_restarted(step):
                    replica.resume(segment.facts.warmup_steps, segment.facts.last_local_step)
                replica.add(step, self._x_of(segment, step.iteration, step.samples_all))

    def _x_of(self, segment: Segment, iteration: int, samples: int | None) -> int:
        """Return the x value of a line in charts."""
        if not self.is_plotted_by_samples:
            return iteration
        return iteration * (segment.facts.batch_size or 1) if samples is None else samples

    def _iteration_of(self, point: ResumePoint) -> int:
        """Return the iteration of a checkpoint, counted as in the lines of the runs."""
        facts = self.facts
        if facts is None or not facts.has_unequal_steps or not facts.batch_size:
            return point.iteration
        return point.samples // facts.batch_size

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- present state

    @property
    def is_elastic(self) -> bool:
        """Whether the newest run has a hub."""
        return self.facts is not None and self.facts.is_elastic

    @property
    def members(self) -> list[Replica]:
        """Replicas that take part now.

        In an elastic run the members of its newest sync, before it all that have a file.
        """
        if self.facts is None:
            return []
        if not self.facts.is_elastic:
            return self.replicas[: self.facts.num_replicas]
        segment = self._current_segment
        names = self.membership.members or (segment.replicas if segment is not None else ())
        return [self.replicas[self._numbers[name]] for name in names if name in self._numbers]

    def name_of(self, number: int) -> str:
        """Return the name of a replica; an earlier run may have had more than the newest."""
        return self.replicas[number].name if number < len(self.replicas) else str(number)

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
        return facts is not None and facts.has_unequal_steps and facts.has_segment

    @property
    def has_unequal_steps(self) -> bool:
        """Whether replicas make unequal numbers of steps."""
        return self.facts is not None and self.facts.has_unequal_steps

    @property
    def has_one_loss_per_round(self) -> bool:
        """Whether `loss.jsonl` has one line for each round after the warm-up."""
        facts = self.facts
        return facts is not None and (facts.has_unequal_steps or facts.has_varying_rounds)

    @property
    def samples(self) -> int | None:
        """Samples consumed by all replicas where their steps are unequal.

        None otherwise, or where not known.
        """
        facts = self.facts
        if facts is None or not facts.has_unequal_steps:
            return None
        at_sync = self.syncs.samples
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
        files = self._current_segment.replicas
        return [r.number for r in self.members
                if r.name not in files or stat_or_none(files[r.name].path) is None]  # fmt: skip

    @property
    def num_damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        journal = self.journal.file if self.journal is not None else None
        if journal is None or not journal.num_damaged:
            return dict(self._damaged)
        return {**self._damaged, journal.path.name: journal.num_damaged}

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
        if not facts.has_unequal_steps or not is_past_warmup or iteration == facts.train_iters:
            return min(1.0, iteration / facts.train_iters)
        if samples is None or not facts.batch_size:
            return None
        return min(1.0, samples / (facts.train_iters * facts.batch_size))

    @property
    def num_with_speed(self) -> int:
        """Replicas whose present speed is known."""
        return sum(math.isfinite(replica.speed) for replica in self.members)

    @property
    def speed(self) -> float | None:
        """Present tokens per second of all replicas together; None where not known.

        Replicas whose speed is not known count as the mean of the others: all make equally many
        steps, unless they sync by time.
        """
        if self.facts is None or not self.num_with_speed:
            return None
        members = self.members
        if self.facts.strategy.is_timed and self.num_with_speed < len(members):
            return None
        known = sum(r.speed for r in members if math.isfinite(r.speed))
        return known * len(members) / self.num_with_speed

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
        """End record of the newest run, of each present replica that has written one."""
        return {r.number: r.end for r in self.members if r.end is not None}

    @property
    def failure(self) -> tuple[int, Ending] | None:
        """The replica that failed first, and its end record.

        An elastic run goes on without a replica that fails after the first sync.
        """
        ends = self.ends
        if self.is_elastic and self.syncs.count:
            has_finished = any(end.end == FINISHED for end in ends.values())
            if has_finished or not self._has_ended:
                return None
        failed = [(number, end) for number, end in ends.items() if end.end == FAILED]
        return min(failed, key=lambda each: each[1].time, default=None)

    @property
    def _has_ended(self) -> bool:
        """Whether all replicas with a file here have an end record.

        In an elastic run some of them may have been killed: it has also ended when the others have
        an end record and nobody has written for a long time.
        """
        ends, missing = self.ends, self.missing
        if not ends:
            return False
        if all(r.number in ends or r.number in missing for r in self.members):
            return True
        return self.is_elastic and self.silence > SILENT_SECONDS

    @property
    def _end_state(self) -> str | None:
        """How the newest run ended; None before its end."""
        if self.failure is not None:
            return FAILED
        if not self._has_ended:
            return None
        found = {end.end for end in self.ends.values()}
        if self.is_elastic and FINISHED in found:
            return FINISHED
        return STOPPED if STOPPED in found else FINISHED

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
        return LOST if self.silence > self.longest_silence else RUNNING

    @property
    def longest_silence(self) -> float:
        """Seconds without a line that a running training may take: for steps, syncs, evaluations.

        Start-up and the first step are as long as replicas wait for each other.
        """
        step = max((replica.step_seconds for replica in self.members), default=0.0)
        if not step or self.facts is None:
            return MIN_TIMEOUT_SECONDS
        sync = max((each.total for each in self.syncs.recent), default=0.0)
        evaluation = FORWARD_SHARE * step * self.facts.eval_iters
        return max(SILENT_SECONDS, SILENT_STEPS * step, SILENT_SYNCS * sync, evaluation)

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
            whose = f"replica {self.name_of(number)}"
            return f"failed: {end.reason or f'{whose}, exit code {end.exit_code}'}"
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


def open_run(folder: Path, journal: HubJournal | None = None) -> MonitoredRun:
    """Return the run in a folder.

    Args:
        folder: `--edit-log-dir`.
        journal: of the run's hub, if it is to be read, too.

    Raises:
        UsageError: the folder holds no run.
    """
    check_folder(folder)
    found = stat_or_none(folder / RUN)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return MonitoredRun(folder, journal)


def _version(found: os.stat_result) -> tuple[int, int]:
    """Return a value that changes when a file is replaced."""
    return found.st_ino, found.st_mtime_ns
