"""Measure one run: start a training, follow it until enough is measured, and end it.

A mark is the time at which a step began; see `pretrain_slowed`. The time between two marks of a
replica covers complete steps: data, sleep, sync, log.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from frame.launch import Forks, Rank
from frame.readings import read_syncs

from .kinds import (
    IDEAL,
    MARKS_VARIABLE,
    MODEL,
    PLAN_VARIABLE,
    REPLICA_VARIABLE,
    SKIPPED_ROUNDS,
    SYNCING,
    WARMUP_STEPS,
    Job,
)

SCRIPT = Path(__file__).with_name("pretrain_slowed.py")
POLL_SECONDS = 0.25
FIRST_PORT = 27000
SKIPPED_STEPS = 5  # of kinds without rounds: the first are slow
_SYNC_FIELDS = ("round", "iteration", "inner_steps", "samples", "seconds")


type Span = tuple[int, int]  # the measured steps of a replica: from a mark to a later one


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        step_seconds: mean length of the measured steps, by replica.
        tokens_per_second: of all replicas together, each over its own steps.
        round_seconds: per measured round, by the marks of replica 0; empty without rounds.
        syncs: at the ends of these rounds, as replica 0 saw them.
        load: of the machine, one-minute average before and after.
    """

    scenario: str
    kind: str
    repeat: int
    step_seconds: list[float]
    tokens_per_second: float
    round_seconds: list[float]
    syncs: list[dict[str, Any]]
    load: list[float]

    @property
    def short(self) -> dict[str, Any]:
        """A row of OUTPUT."""
        names = ("scenario", "kind", "repeat", "tokens_per_second", "load")
        return {name: getattr(self, name) for name in names}


def read_marks(path: Path) -> list[float]:
    """Return all marks of a replica so far, without a line that is still being written."""
    complete, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return list(map(float, complete.splitlines()))


def spans_by_time(marks: Sequence[Sequence[float]], seconds: float) -> list[Span] | None:
    """Return the complete steps of each replica in one time span, the same for all replicas.

    It begins when all replicas have made their first steps. None before all have reached its end.
    """
    if any(len(own) <= SKIPPED_STEPS for own in marks):
        return None
    start = max(own[SKIPPED_STEPS] for own in marks)
    end = start + seconds
    if any(own[-1] < end for own in marks):
        return None
    found = [(bisect_left(own, start), bisect_right(own, end) - 1) for own in marks]
    if any(last <= first for first, last in found):
        raise ValueError(f"a step takes longer than {seconds} s, which is all that is measured")
    return found


def spans_by_syncs(
    marks: Sequence[Sequence[float]], syncs: Sequence[dict[str, Any]], rounds: int
) -> list[Span] | None:
    """Return the steps of each replica in `rounds` rounds, each with the sync at its end.

    None before these are over.
    """
    if len(syncs) < SKIPPED_ROUNDS + rounds:
        return None
    ends = (steps_before(syncs, SKIPPED_ROUNDS + n, len(marks)) for n in (0, rounds))
    found = list(zip(*ends, strict=True))
    return None if _is_incomplete(marks, found) else found


def _is_incomplete(marks: Sequence[Sequence[float]], spans: Sequence[Span]) -> bool:
    return any(len(own) <= last for own, (_, last) in zip(marks, spans, strict=True))


def steps_before(syncs: Sequence[dict[str, Any]], count: int, num_replicas: int) -> list[int]:
    """Return the number of steps of each replica until the end of the first `count` syncs."""
    rounds = [sync["inner_steps"][:num_replicas] for sync in syncs[:count]]
    return [WARMUP_STEPS + sum(steps) for steps in zip(*rounds, strict=True)]


def round_lengths(
    marks: Sequence[float], syncs: Sequence[dict[str, Any]], rounds: int
) -> list[float]:
    """Return the lengths of the measured rounds, by the marks of replica 0; empty without syncs."""
    counts = range(SKIPPED_ROUNDS, min(len(syncs), SKIPPED_ROUNDS + rounds) + 1)
    ends = [marks[steps_before(syncs, count, 1)[0]] for count in counts]
    return [after - before for before, after in pairwise(ends)]


def find_spans(
    job: Job, marks: Sequence[Sequence[float]], syncs: Sequence[dict[str, Any]]
) -> list[Span] | None:
    """Return the measured steps of all replicas; None before they are over."""
    if job.kind in SYNCING:
        return spans_by_syncs(marks, syncs, job.rounds)
    if job.kind == IDEAL and job.plan.is_random:  # with the same draws as EDiT
        spans = [job.edit_steps for _ in marks]
        return None if _is_incomplete(marks, spans) else spans
    return spans_by_time(marks, job.seconds)


def step_lengths(marks: Sequence[Sequence[float]], spans: Sequence[Span]) -> list[float]:
    """Return the mean length of the measured steps, by replica."""
    pairs = zip(marks, spans, strict=True)
    return [(own[last] - own[first]) / (last - first) for own, (first, last) in pairs]


class Bench:
    """Runs jobs one after another.

    Args:
        time_limit: seconds until a run is stopped.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._forks = Forks(FIRST_PORT, time_limit)

    def measure(self, job: Job, repeat: int) -> Measurement:
        """Run a job once.

        Raises:
            RunFailedError: it failed or took too long.
        """
        load, rounds, name = os.getloadavg()[0], job.rounds, job.plan.scenario
        with tempfile.TemporaryDirectory(prefix="stragglers-") as folder_name:
            folder = Path(folder_name)
            files = [folder / f"marks{replica}.txt" for replica in range(job.plan.num_replicas)]
            ranks = [_rank(job, replica, folder, file) for replica, file in enumerate(files)]

            def poll_steps() -> list[float] | None:
                marks = list(map(read_marks, files))
                spans = find_spans(job, marks, read_syncs(folder))
                return None if spans is None else step_lengths(marks, spans)

            with self._forks.training(
                f"{name}, {job.kind}", folder, ranks, apart=job.kind == IDEAL, one_machine=False
            ) as training:
                steps = training.until(poll_steps, limit=self._time_limit, poll=POLL_SECONDS)
            syncs = read_syncs(folder)
            measured = syncs[SKIPPED_ROUNDS : SKIPPED_ROUNDS + rounds]
            return Measurement(
                scenario=name,
                kind=job.kind,
                repeat=repeat,
                step_seconds=steps,
                tokens_per_second=sum(MODEL.tokens_per_replica / each for each in steps),
                round_seconds=round_lengths(read_marks(files[0]), syncs, rounds),
                syncs=[{field: sync[field] for field in _SYNC_FIELDS} for sync in measured],
                load=[load, os.getloadavg()[0]],
            )


def _rank(job: Job, replica: int, folder: Path, marks: Path) -> Rank:
    """Return the command of a replica, with its plan."""
    env = {
        PLAN_VARIABLE: job.plan.to_json(),
        REPLICA_VARIABLE: str(replica),
        MARKS_VARIABLE: str(marks),
    }
    return Rank(job.flags(str(folder)), env, SCRIPT)
