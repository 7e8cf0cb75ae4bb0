"""The state of a training, from all of its event files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_edit.constants import MIN_TIMEOUT_SECONDS
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.observe.line_files import stat_or_none
from megatron_edit.observe.records import (
    ENDS,
    FAILED,
    FINISHED,
    LOSSES,
    RUN,
    STOPPED,
    SYNCS,
    VALIDATION,
    Ending,
    LossRecord,
    SyncRecord,
    replica_file,
)
from megatron_edit.tools.monitor.files import (
    EventFile,
    Facts,
    ResumePoint,
    Segment,
    parse_replica_line,
    paths_in,
    read_run_json,
    read_segments,
)
from megatron_edit.tools.monitor.membership import HubJournal, MembershipHistory
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.pages.charts import Curve
from megatron_edit.tools.pages.texts import duration

SILENT_SECONDS = 120.0  # after end records of other replicas
SILENT_STEPS = 100  # times the longest recent step: also for an evaluation
WAITING, RUNNING, LOST = "waiting", "running", "lost"  # states other than `ENDS`


class MonitoredRun:
    """The contents of a training's event files, over all runs of the training.

    Args:
        folder: `--edit-log-dir`.
        journal: of the hub of an elastic run, if it is to be read, too.

    Attributes:
        resumed_at: iterations at which the training was resumed, as far as the files of earlier
            runs exist.
        began_at: Unix seconds at which the first run began.
        evaluations: the newest evaluation on each data set.
        replicas: by number; all that have ever taken part.
        silence: seconds since a file was last written to.
    """

    def __init__(self, folder: Path, journal: HubJournal | None = None) -> None:
        self.folder, self.journal = folder, journal
        self._files: dict[str, EventFile[Any]] = {}
        self._text: str | None = None  # of `run.json`
        self._clear()

    def _clear(self) -> None:
        self._facts: Facts | None = None
        self.resumed_at: list[int] = []
        self.began_at = self.read_at = time.time()
        self.silence = 0.0
        self._losses: dict[float, float] = {}
        self._validation: dict[float, float] = {}  # the end of training evaluates again
        self.evaluations: dict[str, LossRecord] = {}
        self.syncs = Syncs()
        self.replicas: list[Replica] = []
        self.membership = MembershipHistory()
        self._numbers: dict[str, int] = {}  # of replicas, by name
        self._newest: list[str] = []  # replicas of the newest run

    @property
    def has_begun(self) -> bool:
        """Whether there is a `run.json`."""
        return self._facts is not None

    @property
    def facts(self) -> Facts:
        """The facts of the newest run, which must have begun."""
        assert self._facts is not None, "no run.json yet"
        return self._facts

    def poll(self) -> None:
        """Read the files, of which only new lines are parsed.

        Raises:
            UsageError: `run.json` was not written by this package, or a file cannot be read.
        """
        path = self.folder / RUN
        text = read_run_json(path)
        if text != self._text:  # another run, or a choice of `--edit-auto`
            self._files.clear()
        self._text = text
        self._clear()
        if self.journal is not None:
            self.journal.records()
        if text is None:
            return
        try:
            self._facts = Facts.of(text)
        except ValueError as error:
            rule = f"was not written by a run ({error})"
            raise UsageError(str(path), rule, "give the folder of --edit-log-dir") from None
        if self.journal is not None and not self.is_elastic:
            raise UsageError("--state-dir", "is of no use: this run has no hub", "leave it out")
        segments = read_segments(self.folder, self.facts)
        for segment in segments:
            self._add_segment(segment)
        self.resumed_at = [self._iteration_of(each.end) for each in segments if each.end]
        first = stat_or_none(self.folder / f"run{segments[0].middle}.json")
        self.began_at = self.read_at if first is None else first.st_mtime
        found = [stat_or_none(each) for each in paths_in(self.folder) if ".json" in each.name]
        newest = max((each.st_mtime for each in found if each is not None), default=self.read_at)
        self.silence = max(0.0, self.read_at - newest)

    # ---- lines

    def _add_segment(self, segment: Segment) -> None:
        facts = segment.facts
        # In an elastic run a line without members is invalid.
        size = 0 if facts.is_elastic else facts.num_replicas
        names = [str(number) for number in range(size)]
        self.syncs.start_run()
        self.membership.start_run()
        for name in names:
            self._replica(name)
        for sync in self._read(SYNCS, segment, partial(SyncRecord.of, num_replicas=size)):
            if segment.keeps(sync.iteration, sync.samples_all):
                columns = [self._replica(name).number for name in sync.members or names]
                self.syncs.add(sync, columns, is_local=facts.has_local_steps(sync.iteration))
                if sync.members:
                    self.membership.add(sync)
        for record in self._read(LOSSES, segment, LossRecord.of):
            if not math.isnan(record.loss) and segment.keeps(record.iteration, record.samples):
                self._add_loss(segment, record)
        if facts.is_elastic:
            in_folder = segment.replicas_in(self.folder)
            names = list(dict.fromkeys([*in_folder, *self.membership.members]))
        for name in names:
            self._add_replica_lines(segment, self._replica(name))
        self._newest = names

    def _read[Record](
        self, name: str, segment: Segment, parse: Callable[[dict[str, Any]], Record]
    ) -> list[Record]:
        """Return the records of a file of a run, given its name without a number."""
        name = f"{name.removesuffix('.jsonl')}{segment.middle}.jsonl"
        if name not in self._files:
            self._files[name] = EventFile(self.folder / name, parse)
        return self._files[name].records()

    def _replica(self, name: str) -> Replica:
        """Return a replica by name; a new one is added."""
        if name not in self._numbers:
            self._numbers[name] = len(self.replicas)
            self.replicas.append(Replica(len(self.replicas), name))
            self.replicas[-1].start_process()
        return self.replicas[self._numbers[name]]

    def _add_loss(self, segment: Segment, record: LossRecord) -> None:
        place = self._place_of(segment, record.iteration, record.samples)
        if record.split is None:
            self._losses[place] = record.loss
            return
        self.evaluations[to_one_line(f"{record.split} {record.name or ''}").strip()] = record
        if record.split == VALIDATION:
            self._validation[place] = record.loss

    def _add_replica_lines(self, segment: Segment, replica: Replica) -> None:
        replica.start_process()
        for record in self._read(replica_file(replica.name), segment, parse_replica_line):
            if isinstance(record, Ending):
                replica.add(record)
            elif record and segment.keeps(record.iteration, record.samples_all):
                replica.add(record, self._place_of(segment, record.iteration, record.samples_all))

    def _place_of(self, segment: Segment, iteration: int, samples: int | None) -> int:
        """Return the place of a line on the x axis."""
        if not self.facts.has_unequal_steps:
            return iteration
        return iteration * segment.facts.batch_size if samples is None else samples

    def _iteration_of(self, point: ResumePoint) -> int:
        """Return the iteration of a checkpoint, counted as in the lines of the runs."""
        if self.facts.has_unequal_steps:
            return point.samples // self.facts.batch_size
        return point.iteration

    # ---- present state

    @property
    def is_elastic(self) -> bool:
        """Whether the newest run has begun, with a hub."""
        return self._facts is not None and self._facts.is_elastic

    @property
    def members(self) -> list[Replica]:
        """Replicas that take part now: of the newest sync, before it all that have a file."""
        return [self._replica(name) for name in self.membership.members or self._newest]

    @property
    def losses(self) -> Curve:
        """Training losses, mean over the replicas, by place on the x axis."""
        return _curve(self._losses)

    @property
    def validation(self) -> Curve:
        """Validation losses by place on the x axis."""
        return _curve(self._validation)

    @property
    def latest_loss(self) -> float:
        """The newest mean loss over the replicas, else the mean of the known newest losses."""
        if self._losses:
            return next(reversed(self._losses.values()))
        known = [replica.loss for replica in self.members if math.isfinite(replica.loss)]
        return sum(known) / len(known) if known else math.nan

    @property
    def samples(self) -> int | None:
        """Samples consumed by all replicas where their steps are unequal.

        None otherwise, or where not known.
        """
        if self._facts is None or not self._facts.has_unequal_steps:
            return None
        at_sync = self.syncs.records[-1].samples_all if self.syncs.count else 0
        return max([at_sync, *(replica.samples_all for replica in self.replicas)]) or None

    @property
    def iteration(self) -> int:
        """Iteration of the furthest replica; under A-EDiT complete batches of all replicas."""
        samples = self.samples
        if samples is None:
            return max((replica.iteration for replica in self.replicas), default=0)
        if self._end_state == FINISHED:  # the last batch may be partial
            return self.facts.train_iters
        return min(samples // self.facts.batch_size, self.facts.train_iters)

    @property
    def tokens(self) -> int:
        """Tokens consumed by all replicas so far."""
        samples = self.samples or self.iteration * self.facts.batch_size
        return samples * self.facts.seq_length

    @property
    def progress(self) -> float | None:
        """Share of the training that is done; None where it is not known."""
        if self._facts is None or not self._facts.train_iters:
            return None
        facts, iteration, samples = self._facts, self.iteration, self.samples
        if facts.has_unequal_steps and samples is None and iteration > facts.warmup_steps:
            return None  # lines of version 0.1 before a sync
        if samples is None or iteration == facts.train_iters:
            return min(1.0, iteration / facts.train_iters)
        return min(1.0, samples / (facts.train_iters * facts.batch_size))

    @property
    def missing(self) -> list[Replica]:
        """Replicas without a file in the folder."""
        return [replica for replica in self.members
                if stat_or_none(self.folder / replica_file(replica.name)) is None]  # fmt: skip

    @property
    def num_damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        files: list[EventFile[Any]] = list(self._files.values())
        if self.journal is not None:
            files.append(self.journal)
        return {each.path.name: each.num_damaged for each in files if each.num_damaged}

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
        """Seconds to the end at the present speed; None where not known or over."""
        if self.state != RUNNING or self.progress is None or not self.speed:
            return None
        tokens = self.facts.train_iters * self.facts.batch_tokens
        return (1.0 - self.progress) * tokens / self.speed

    @property
    def longest_silence(self) -> float:
        """Seconds without a line that a running training may take."""
        step = max((replica.step_seconds for replica in self.members), default=0.0)
        return max(MIN_TIMEOUT_SECONDS, SILENT_STEPS * step)

    # ---- state

    @property
    def failure(self) -> tuple[Replica, Ending] | None:
        """The replica that failed first, and its end record.

        An elastic run goes on without a replica that fails after the first sync.
        """
        ends = [(replica, replica.end) for replica in self.members if replica.end is not None]
        if self.is_elastic and self.syncs.count:
            has_finished = any(end.end == FINISHED for _, end in ends)
            if has_finished or not self._has_ended:
                return None
        failed = [each for each in ends if each[1].end == FAILED]
        return min(failed, key=lambda each: each[1].time, default=None)

    @property
    def _has_ended(self) -> bool:
        """Whether all replicas with a file here have an end record.

        In an elastic run some of them may have been killed: it has also ended when the others have
        an end record and nobody has written for a long time.
        """
        if not any(replica.end for replica in self.members):
            return False
        missing = self.missing
        if all(replica.end or replica in missing for replica in self.members):
            return True
        return self.is_elastic and self.silence > SILENT_SECONDS

    @property
    def _end_state(self) -> str | None:
        """How the newest run ended; None before its end."""
        if self.failure is not None:
            return FAILED
        if not self._has_ended:
            return None
        found = {replica.end.end for replica in self.members if replica.end}
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
        if not self._facts.has_ends and self.progress == 1.0:
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
            replica, end = self.failure
            return f"failed: {end.reason or f'replica {replica.name}, exit code {end.exit_code}'}"
        if state == STOPPED:
            reasons = {r.end.reason for r in self.members if r.end and r.end.reason}
            return f"stopped ({', '.join(sorted(reasons))})" if reasons else state
        return state


def _curve(values: dict[float, float]) -> Curve:
    return np.array([*values], dtype=np.float64), np.array([*values.values()], dtype=np.float64)
