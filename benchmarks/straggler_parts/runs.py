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


@dataclass(frozen=True)
class Stretch:
    """The measured steps of a replica: from mark `first` to mark `last`, counted from 0.

    Attributes:
        seconds: between these marks.
    """

    first: int
    last: int
    seconds: float

    @classmethod
    def between(cls, marks: Sequence[float], first: int, last: int) -> Stretch:
        """Return the steps first ... last - 1."""
        return cls(first, last, marks[last] - marks[first])

    @property
    def step_seconds(self) -> float:
        """Mean length of a step."""
        return self.seconds / (self.last - self.first)


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one run.

    Attributes:
        stretches: by replica.
        tokens_per_second: of all replicas together.
        round_seconds: per measured round, by the marks of replica 0; empty without rounds.
        syncs: at the ends of these rounds, as replica 0 saw them.
        load: of the machine, one-minute average before and after.
    """

    scenario: str
    kind: str
    repeat: int
    stretches: list[Stretch]
    tokens_per_second: float
    round_seconds: list[float]
    syncs: list[dict[str, Any]]
    load: list[float]

    @property
    def short(self) -> dict[str, Any]:
        """A row of OUTPUT."""
        return {
            "scenario": self.scenario,
            "kind": self.kind,
            "repeat": self.repeat,
            "tokens_per_second": self.tokens_per_second,
            "load": self.load,
        }

    @property
    def slowest_step(self) -> float:
        """Mean length of a step of the slowest replica."""
        return max(stretch.step_seconds for stretch in self.stretches)


def read_marks(path: Path) -> list[float]:
    """Return all marks of a replica so far, without a line that is still being written."""
    complete, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return list(map(float, complete.splitlines()))


def stretches_by_time(marks: Sequence[Sequence[float]], seconds: float) -> list[Stretch] | None:
    """Return the complete steps of each replica in one time span, the same for all replicas.

    It begins when all replicas have made their first steps. None before all have reached its end.
    """
    if any(len(own) <= SKIPPED_STEPS for own in marks):
        return None
    start = max(own[SKIPPED_STEPS] for own in marks)
    end = start + seconds
    if any(own[-1] < end for own in marks):
        return None
    found = []
    for own in marks:
        first, last = bisect_left(own, start), bisect_right(own, end) - 1
        if last <= first:
            raise ValueError(f"a step takes longer than {seconds} s, which is all that is measured")
        found.append(Stretch.between(own, first, last))
    return found


def stretches_by_steps(
    marks: Sequence[Sequence[float]], first: int, last: int
) -> list[Stretch] | None:
    """Return the steps first ... last - 1 of every replica; None before these are over."""
    if any(len(own) <= last for own in marks):
        return None
    return [Stretch.between(own, first, last) for own in marks]


def stretches_by_syncs(
    marks: Sequence[Sequence[float]], syncs: Sequence[dict[str, Any]], rounds: int
) -> list[Stretch] | None:
    """Return the steps of each replica in `rounds` rounds, each with the sync at its end.

    None before these are over.
    """
    if len(syncs) < SKIPPED_ROUNDS + rounds:
        return None
    firsts = steps_before(syncs, SKIPPED_ROUNDS, len(marks))
    lasts = steps_before(syncs, SKIPPED_ROUNDS + rounds, len(marks))
    if any(len(own) <= last for own, last in zip(marks, lasts, strict=True)):
        return None
    return [Stretch.between(*three) for three in zip(marks, firsts, lasts, strict=True)]


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


def tokens_per_second(stretches: Sequence[Stretch], tokens_per_step: int) -> float:
    """Return the total speed of all replicas, each over its own stretch."""
    return sum(tokens_per_step / stretch.step_seconds for stretch in stretches)


def find_stretches(
    job: Job, marks: Sequence[Sequence[float]], syncs: Sequence[dict[str, Any]]
) -> list[Stretch] | None:
    """Return the measured stretches of a job; None before they are complete."""
    if job.kind in SYNCING:
        return stretches_by_syncs(marks, syncs, job.scenario.rounds)
    if job.kind == IDEAL and job.plan.is_random:
        return stretches_by_steps(marks, *job.edit_steps)  # with the same draws
    return stretches_by_time(marks, job.seconds)


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
        load, rounds, name = os.getloadavg()[0], job.scenario.rounds, job.scenario.name
        with tempfile.TemporaryDirectory(prefix="stragglers-") as folder_name:
            folder = Path(folder_name)
            files = [folder / f"marks{replica}.txt" for replica in range(job.num_replicas)]
            ranks = [_rank(job, replica, folder, file) for replica, file in enumerate(files)]

            def poll_stretches() -> list[Stretch] | None:
                return find_stretches(job, list(map(read_marks, files)), read_syncs(folder))

            with self._forks.training(
                f"{name}, {job.kind}", folder, ranks, apart=job.kind == IDEAL, one_machine=False
            ) as training:
                stretches = training.until(
                    poll_stretches, limit=self._time_limit, poll=POLL_SECONDS
                )
            syncs = read_syncs(folder)
            measured = syncs[SKIPPED_ROUNDS : SKIPPED_ROUNDS + rounds]
            return Measurement(
                scenario=name,
                kind=job.kind,
                repeat=repeat,
                stretches=stretches,
                tokens_per_second=tokens_per_second(stretches, job.tokens_per_step),
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
