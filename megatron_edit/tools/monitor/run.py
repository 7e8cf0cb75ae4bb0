"""The event files of a training, read once and again as they grow."""

from __future__ import annotations

import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
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
from megatron_edit.tools.monitor.syncs import Bins, Syncs
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
        resumed_at: iterations at which the training was resumed, as far as the files of earlier
            runs exist.
        began_at: Unix seconds at which the first run began; None until `run.json` exists.
        losses: mean over the replicas, by iteration, or by samples of all replicas.
        loss: the newest of these losses.
        evaluations: the newest evaluation on each data set.
        replicas: by number; of an elastic run all that have ever taken part.
        drift: round and replica where a digest first differed from another replica's.
    """

    def __init__(self, folder: Path, journal: HubJournal | None = None) -> None:
        self.folder, self.journal = folder, journal
        self._reset()

    def _reset(self) -> None:
        self._facts: Facts | None = None
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
        self._segment: Segment | None = None  # the one being read, or read last
        self._damaged: Counter[str] = Counter()
        self._version: tuple[int, int] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a `run.json`."""
        return self._facts is not None

    @property
    def facts(self) -> Facts:
        """The facts of the newest run, which must have begun."""
        assert self._facts is not None, "no run.json yet"
        return self._facts

    def unread_bytes(self) -> int:
        """Return how many bytes can be read now. Opens `run.json` if it exists.

        Raises:
            UsageError: `run.json` was not written by this package, or a file cannot be read.
        """
        self._open()
        return sum(file.unread_bytes for segment in self._segments for file in segment.files)

    def poll(self, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        """Read the new lines; read a newer run in the folder from its start.

        `on_bytes` is called now and then with the number of bytes just read.

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
        if segment is not self._segment:  # the next lines belong to another run
            self._segment = segment
            self.syncs.resume(segment.facts.num_replicas)
            self.membership.begin_run()
            for replica in self.replicas:
                self._resume(replica, segment)

        def read(file: LineReader, add: Callable[..., None], *more: Replica) -> None:
            for record in file.read(on_bytes):
                try:
                    add(segment, record, *more)
                except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1
            if file.num_damaged:
                self._damaged[file.path.name] = file.num_damaged

        for name in segment.replicas if self._has_names(segment) else ():
            self._replica(name)
        read(segment.syncs, self._add_sync)
        read(segment.losses, self._add_loss)
        segment.add_replicas(self.membership.members)
        for name, file in segment.replicas.items():
            if name in self._numbers:  # not so where the newest run has fewer replicas
                read(file, self._add_replica_line, self._replica(name))

    def _resume(self, replica: Replica, segment: Segment) -> None:
        replica.resume(segment.facts.warmup_steps, segment.facts.last_local_step)

    def _has_names(self, segment: Segment) -> bool:
        """Whether replicas are known by their names in a run: it or the newest one is elastic."""
        return self.facts.is_elastic or segment.facts.is_elastic

    def _replica(self, name: str) -> Replica:
        """Return a replica by name; a new one is added."""
        if name not in self._numbers:
            self._numbers[name] = len(self.replicas)
            replica = Replica(len(self.replicas), name)
            if self._segment is not None:
                self._resume(replica, self._segment)
            self.replicas.append(replica)
            self.syncs.num_columns = len(self.replicas)
        return self.replicas[self._numbers[name]]

    @property
    def _was_replaced(self) -> bool:
        """Whether a newer run has begun in the folder: it writes `run.json` first."""
        if self._version is None:
            return False
        now = stat_or_none(self._path)
        files = self._segments[-1].files if self._segments else ()
        return now is None or _version(now) != self._version or any(f.was_replaced for f in files)

    def _open(self) -> None:
        found = stat_or_none(self._path)
        if self.has_begun or found is None or not stat.S_ISREG(found.st_mode):
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
        self._facts = facts
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
        self, segment: Segment, line: Mapping[str, Any], replica: Replica
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
                    self._resume(replica, segment)
                replica.add(step, self._x_of(segment, step.iteration, step.samples_all))

    def _x_of(self, segment: Segment, iteration: int, samples: int | None) -> int:
        """Return the x value of a line in charts."""
        if not self.facts.is_plotted_by_samples:
            return iteration
        return iteration * (segment.facts.batch_size or 1) if samples is None else samples

    def _iteration_of(self, point: ResumePoint) -> int:
        """Return the iteration of a checkpoint, counted as in the lines of the runs."""
        if not self.facts.has_unequal_steps or not self.facts.batch_size:
            return point.iteration
        return point.samples // self.facts.batch_size

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- present state

    @property
    def is_elastic(self) -> bool:
        """Whether the newest run has begun, with a hub."""
        return self._facts is not None and self._facts.is_elastic

    @property
    def members(self) -> list[Replica]:
        """Replicas that take part now.

        In an elastic run the members of its newest sync, before it all that have a file.
        """
        if not self.has_begun:
            return []
        if not self.is_elastic:
            return self.replicas[: self.facts.num_replicas]
        names = self.membership.members or (self._segment.replicas if self._segment else ())
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
    def latest_loss(self) -> float:
        """The newest mean loss over the replicas, else the mean of the known newest losses."""
        if math.isfinite(self.loss):
            return self.loss
        known = [replica.loss for replica in self.members if math.isfinite(replica.loss)]
        return sum(known) / len(known) if known else math.nan

    @property
    def samples(self) -> int | None:
        """Samples consumed by all replicas where their steps are unequal.

        None otherwise, or where not known.
        """
        if self._facts is None or not self._facts.has_unequal_steps:
            return None
        at_sync = self.syncs.samples
        if recorded := max((replica.samples_all for replica in self.replicas), default=0):
            return max(recorded, at_sync)
        # Older versions record it at a sync only.
        return at_sync + sum(replica.samples for replica in self.replicas) if at_sync else None

    @property
    def iteration(self) -> int:
        """Iteration of the furthest replica; under A-EDiT complete batches of all replicas."""
        samples = self.samples
        if samples is None or not self.facts.batch_size:
            return max((replica.iteration for replica in self.replicas), default=0)
        total = self.facts.train_iters
        if self._end_state == FINISHED and total:  # the last batch may be partial
            return total
        return min(samples // self.facts.batch_size, total or samples)

    @property
    def tokens(self) -> float | None:
        """Tokens consumed by all replicas so far; None where not known."""
        facts, samples = self.facts, self.samples
        if not facts.batch_size or not facts.seq_length:
            return None
        samples = self.iteration * facts.batch_size if samples is None else samples
        return float(samples * facts.seq_length)

    @property
    def progress(self) -> float | None:
        """Share of the training that is done; None where its length is not known."""
        if self._facts is None or not self._facts.train_iters:
            return None
        facts, total = self._facts, self._facts.train_iters
        samples, iteration = self.samples, self.iteration
        is_past_warmup = bool(self.syncs.count) or iteration > facts.warmup_steps
        if not facts.has_unequal_steps or not is_past_warmup or iteration == total:
            return min(1.0, iteration / total)
        if samples is None or not facts.batch_size:
            return None
        return min(1.0, samples / (total * facts.batch_size))

    @property
    def missing(self) -> list[int]:
        """Replicas without a file in the folder."""
        files = self._segment.replicas if self._segment is not None else {}
        return [r.number for r in self.members if self._segment is not None
                and (r.name not in files or stat_or_none(files[r.name].path) is None)]  # fmt: skip

    @property
    def num_damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        journal = self.journal.file if self.journal is not None else None
        if journal is None or not journal.num_damaged:
            return dict(self._damaged)
        return {**self._damaged, journal.path.name: journal.num_damaged}

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
        members, known = self.members, self.num_with_speed
        if not known or (self.facts.strategy.is_timed and known < len(members)):
            return None
        total = sum(r.speed for r in members if math.isfinite(r.speed))
        return total * len(members) / known

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the end at the present speed; None where not known."""
        if self.progress is None or not self.speed or not self.facts.batch_tokens:
            return None
        tokens = (self.facts.train_iters or 0) * self.facts.batch_tokens
        return (1.0 - self.progress) * tokens / self.speed

    @property
    def silence(self) -> float:
        """Seconds since a file was last written to."""
        files = self._segments[-1].files if self._segments else ()
        found = map(stat_or_none, [self._path, *(file.path for file in files)])
        newest = max((each.st_mtime for each in found if each is not None), default=self.read_at)
        return max(0.0, self.read_at - newest)

    @property
    def longest_silence(self) -> float:
        """Seconds without a line that a running training may take: for steps, syncs, evaluations.

        Start-up and the first step are as long as replicas wait for each other.
        """
        step = max((replica.step_seconds for replica in self.members), default=0.0)
        if not step:
            return MIN_TIMEOUT_SECONDS
        sync = max((each.total for each in self.syncs.recent), default=0.0)
        evaluation = FORWARD_SHARE * step * self.facts.eval_iters
        return max(SILENT_SECONDS, SILENT_STEPS * step, SILENT_SYNCS * sync, evaluation)

    # ---- state

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
        if self._facts is None:
            return WAITING
        if (ended := self._end_state) is not None:
            return ended
        # Runs of older versions write no end record.
        if not self._facts.has_segment and self.progress is not None and self.progress >= 1.0:
            return FINISHED
        return LOST if self.silence > self.longest_silence else RUNNING

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
    """Check that the folder is one; a missing one may be accepted.

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
