"""One measurement: start a training, follow it until enough is measured, and end it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from frame.launch import REPOSITORY, Forks, Rank

from megatron_edit.tools.compare.console_log import read_json_lines

from .kinds import IDEAL, SKIPPED_ROUNDS, SYNCING, Job
from .plan import MARKS_VARIABLE, PLAN_VARIABLE, REPLICA_VARIABLE
from .readings import (
    Mark,
    Measurement,
    Stretch,
    read_marks,
    rounds_of,
    short_sync,
    stretches_by_steps,
    stretches_by_syncs,
    stretches_by_time,
    tokens_per_second,
)

SCRIPT = Path(__file__).with_name("pretrain_slowed.py")
POLL_SECONDS = 0.25
FIRST_PORT = 27000


@dataclass(frozen=True)
class Notes:
    """What the replicas of a job note in a folder."""

    job: Job
    folder: Path

    def marks_file(self, replica: int) -> Path:
        """Where a replica notes when its steps begin."""
        return self.folder / f"marks{replica}.txt"

    def marks(self) -> list[list[Mark]]:
        """Of all replicas, so far."""
        return [read_marks(self.marks_file(replica)) for replica in range(self.job.num_replicas)]

    def syncs(self) -> list[dict[str, object]]:
        """So far; none of kinds without rounds."""
        return [short_sync(line) for line in read_json_lines(self.folder / "sync.jsonl")]

    def stretches(self) -> list[Stretch] | None:
        """What is to be measured, once it is all there."""
        job, marks = self.job, self.marks()
        if job.kind in SYNCING:
            return stretches_by_syncs(marks, self.syncs(), job.scenario.rounds)
        if job.kind == IDEAL and job.plan.is_random:
            return stretches_by_steps(marks, *job.edit_steps)  # with the same draws
        return stretches_by_time(marks, job.seconds)

    def rank(self, replica: int, package: Path) -> Rank:
        """What a replica runs: the script, and its part in the plan."""
        env = {
            PLAN_VARIABLE: self.job.plan.to_json(),
            REPLICA_VARIABLE: str(replica),
            MARKS_VARIABLE: str(self.marks_file(replica)),
        }
        return Rank(self.job.flags(str(self.folder)), env, SCRIPT, package=package)


class Bench:
    """Runs jobs one after another.

    Args:
        time_limit: seconds until a single run is given up.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._forks = Forks(FIRST_PORT, time_limit)

    def measure(self, job: Job, repeat: int, package: Path = REPOSITORY) -> Measurement:
        """Run a job once, with the package in a folder.

        Raises:
            RunFailedError: it failed or took too long.
        """
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="stragglers-") as name:
            notes = Notes(job, Path(name))
            stretches = self._run(notes, package)
            syncs = notes.syncs()
            rounds = job.scenario.rounds
            return Measurement(
                scenario=job.scenario.name,
                kind=job.kind,
                repeat=repeat,
                stretches=stretches,
                tokens_per_second=tokens_per_second(stretches, job.tokens_per_step),
                round_seconds=rounds_of(notes.marks()[0], syncs, rounds),
                syncs=syncs[SKIPPED_ROUNDS : SKIPPED_ROUNDS + rounds],
                load=[load, os.getloadavg()[0]],
            )

    def _run(self, notes: Notes, package: Path) -> list[Stretch]:
        job = notes.job
        ranks = [notes.rank(replica, package) for replica in range(job.num_replicas)]
        apart = job.kind == IDEAL
        with self._forks.training(
            f"{job.scenario.name}, {job.kind}", notes.folder, ranks, apart=apart, one_machine=False
        ) as training:
            return training.until(notes.stretches, limit=self._time_limit, poll=POLL_SECONDS)
