"""Event files: JSON Lines under `--edit-log-dir`, each with one writer.

| file | writer |
|---|---|
| run.json, sync.jsonl, loss.jsonl | the writer rank of replica 0 |
| replica-<r>.jsonl | the writer rank of replica r |

Files of an earlier run are renamed when a run begins, before anything is written; those of one run
get one number.
A full or missing disk never ends a training: there is one warning, lines wait in memory
(`line_files`), and the number of lost lines is reported at the end.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megatron_edit.atomic_files import write_atomic
from megatron_edit.comm.placement import Placement
from megatron_edit.constants import LOW_CLIP, WATCHED_SYNCS
from megatron_edit.engine import SyncReport
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.console import say, warn
from megatron_edit.observe.line_files import MAX_WAITING_BYTES, LineWriter
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.metrics import digest_line, loss_rejections, sync_line, sync_summary
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

_REPLICA = re.compile(r"replica-.+\.jsonl")
_RENAMED = re.compile(r"(?:run|sync|loss|replica-.+)\.(\d+)\.jsonl?")


class SyncTimers(Protocol):
    """The host's own timers."""

    def add_sync(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of a sync (`SyncReport.seconds`)."""


class Roles(Protocol):
    """Knows which replica writes what only one may write."""

    @property
    def is_leader(self) -> bool:
        """Whether that is this one."""

    @property
    def members(self) -> Sequence[str]:
        """Names of the replicas."""


class GlobalProgress(Protocol):
    """Progress of all replicas together, where rounds are timed (A-EDiT)."""

    @property
    def samples(self) -> int:
        """Samples consumed by all replicas so far, as known to this one."""

    def iteration_at(self, samples: int) -> int:
        """Return the complete global batches once all replicas have consumed `samples`."""


class EventLog:
    """Writes the event files and the console lines of one rank.

    Args:
        log_dir: `--edit-log-dir`, which must exist; None for console lines only.
        placement: determines which files this rank writes.
        name: of the replica, in an elastic run.

    Attributes:
        segment_number: of this run in the folder, from 1; its files get it when a later run renames
            them.
    """

    def __init__(
        self,
        log_dir: Path | None,
        placement: Placement,
        name: str | None = None,
    ) -> None:
        self._placement = placement
        self._name = str(placement.replica) if name is None else name
        self._own_file = replica_file(self._name)
        self._membership: Roles | None = None
        self._dir = log_dir if placement.is_writer else None
        self._files: dict[str, LineWriter] = {}
        # Read here, used in `begin`: replicas synchronize in between, so that all get the same one.
        self._number_of_earlier = 0 if self._dir is None else next_number(self._dir)
        is_earlier_there = self._dir is not None and (self._dir / RUN).exists()
        self.segment_number = self._number_of_earlier + is_earlier_there
        self._run: dict[str, Any] | None = None  # content of run.json, from `begin` on
        self._is_header_written = False
        self._is_folder_ready = True
        # Samples of all replicas up to a step, and of the step, for losses that are known later.
        self._counts: dict[int, tuple[int, int]] = {}
        self._lines: list[tuple[str, Mapping[str, Any]]] = []  # since the last flush, by file
        self._ending: Ending | None = None
        self._has_failed = False
        self._timers: SyncTimers | None = None
        self._listeners: list[Listener] = []
        self._global_progress: GlobalProgress | None = None
        self._health: deque[tuple[float, float]] = deque(maxlen=WATCHED_SYNCS)

    @property
    def _is_first_replica(self) -> bool:
        """Whether this replica writes the files that only one may write."""
        if self._membership is not None:
            return self._membership.is_leader
        return self._placement.replica == 0

    @property
    def _all_files(self) -> set[str] | None:
        """Files of all replicas of the run, where this one writes the files of the run, too."""
        if not self._is_first_replica:
            return None
        numbers = range(self._placement.num_replicas)
        names = numbers if self._membership is None else self._membership.members
        return {replica_file(name) for name in names}

    def follow(self, membership: Roles) -> None:
        """Let the leader of an elastic run write the files that only one may write.

        Args:
            membership: knows which replica that is.
        """
        self._membership = membership

    def add_listener(self, listener: Listener) -> None:
        """Also pass records on, from now on.

        Args:
            listener: receives them; it is closed with the event files.
        """
        self._listeners.append(listener)

    def use_global_progress(self, progress: GlobalProgress) -> None:
        """Count iterations in complete global batches of all replicas (timed rounds).

        Args:
            progress: of all replicas.
        """
        self._global_progress = progress

    def connect_timers(self, timers: SyncTimers) -> None:
        """Also add the seconds of syncs to the host's timers, from now on.

        Args:
            timers: the host's.
        """
        self._timers = timers

    def begin(self, run: Mapping[str, Any], *, is_joining: bool = False) -> None:
        """Rename an earlier run's files of this rank, and write `run.json`.

        Args:
            run: its content; only replica 0 writes it.
            is_joining: whether this replica joins a run that others have begun: it goes on in the
                files that are there.
        """
        if self._dir is None:
            return
        self._run = dict(run)
        self._is_header_written = is_joining
        self._is_folder_ready = is_joining
        self.flush()

    def on_iteration(self, iteration: Iteration) -> None:
        """Record a finished inner iteration."""
        self._append(self._own_file, iteration.line())
        for listener in self._listeners:
            listener.on_iteration(iteration)
        self.flush()

    def on_sync(self, report: SyncReport) -> None:
        """Record a finished sync."""
        if self._global_progress is not None:
            step = self._global_progress.iteration_at(report.samples_of_all)
            report = replace(report, step=step)
        if self._timers is not None:
            self._timers.add_sync(report.seconds)
        self._append(self._own_file, digest_line(report))
        if self._is_first_replica:
            self._append(SYNCS, sync_line(report))
        for listener in self._listeners:
            listener.on_sync(report)
        if self._is_first_replica and self._placement.is_writer:
            if not report.decision.is_synchronous:  # a step, which has Megatron's line
                say(sync_summary(report))
            for line in loss_rejections(report):
                say(line)
            self._watch_health(report)
        self.flush()

    def count_samples(self, step: int, samples: int, batch: int) -> None:
        """Store the samples consumed by all replicas after a step, before its loss is known.

        Args:
            step: 0 at the start of a run.
            samples: consumed so far.
            batch: samples of one step of all replicas.
        """
        if self._is_first_replica and self._dir is not None:
            self._counts[step] = samples, batch

    def on_losses(
        self, first_step: int, losses: Sequence[float], samples: int | None = None
    ) -> None:
        """Record mean losses over the replicas, of steps `first_step`, `first_step` + 1, ...

        Args:
            first_step: of the first loss.
            losses: one for each step, or one for a whole round.
            samples: consumed by all replicas at the end of that round; None where each step has its
                loss, and `count_samples` was called for it.
        """
        if (count := self._global_progress) is not None:  # of a warm-up step, or of a round's end
            samples = count.samples if samples is None else samples
            first_step = count.iteration_at(samples)
        if self._is_first_replica:
            for step, loss in enumerate(losses, start=first_step):
                total = self._take_count(step) if samples is None else samples
                self._append(LOSSES, LossRecord(step, total, None, loss).line())
        for listener in self._listeners:
            listener.on_losses(first_step, losses)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of all replicas."""
        if self._is_first_replica:
            self._append(LOSSES, evaluation.line())
            self.flush()
        for listener in self._listeners:
            listener.on_evaluation(evaluation)

    def on_end(self, ending: Ending) -> None:
        """Store how training ended; `close` writes it."""
        self._ending = ending
        for listener in self._listeners:
            listener.on_end(ending)

    def on_choice(self, choice: AutoChoice, last_local_step: int, *, is_resumed: bool) -> None:
        """Print the chosen settings and why, and add them to `run.json`.

        Args:
            choice: of the settings of the rounds.
            last_local_step: before the final synchronous phase, or of the training.
            is_resumed: whether a checkpoint had it.
        """
        if self._placement.is_writer:
            for line in choice.lines():
                say(f"{line} (of the checkpoint)" if is_resumed else line)
        if self._run is not None:
            self._run.setdefault("choices", []).append(choice.as_json())
            self._run["training"]["last_local_step"] = last_local_step
            self._is_header_written = False
            self.flush()

    def on_message(self, text: str) -> None:
        """Print a line: on the console for replica 0, else in the replica's own file."""
        if self._placement.is_writer:
            say(text)

    def on_local_message(self, text: str) -> None:
        """Print a warning about this rank on the console, whatever its replica."""
        warn(f"replica {self._name} rank {self._placement.rank}: {text}")

    def flush(self) -> None:
        """Write all lines so far to disk. Lines that cannot be written now wait."""
        if self._dir is None:
            return
        lines, self._lines = self._lines, []
        for name, line in lines:
            self._writer_of(name).append(line)
        if self._run is not None and not self._attempt(self._prepare_folder):
            return  # nothing is written before an earlier run's files are renamed
        for file in self._files.values():
            self._attempt(file.flush)

    def close(self) -> None:
        """Close all files and listeners, and report how many lines were lost. Idempotent."""
        self.flush()
        if self._dir is not None and self._run is not None and self._ending is not None:
            self._writer_of(self._own_file).append(self._ending.line(self.num_lost), is_last=True)
            self._ending = None
            self.flush()
        if lost := self.num_lost:
            self.on_local_message(f"{lost} lines of event files in {self._dir} were lost")
        for file in self._files.values():
            file.close()
        self._files.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    @property
    def num_lost(self) -> int:
        """Lines of this rank that were dropped or are not written yet."""
        return sum(file.num_dropped + file.num_waiting for file in self._files.values())

    def _take_count(self, step: int) -> int | None:
        """Return the count of a step and drop those of earlier steps; None if there is none.

        Steps before a resume were counted by another process: they are extrapolated.
        """
        self._counts = {known: n for known, n in self._counts.items() if known >= step}
        if not self._counts:
            return None
        first = min(self._counts)
        samples, batch = self._counts[first]
        return samples - (first - step) * batch

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self._dir is not None:
            self._lines.append((name, line))

    def _writer_of(self, name: str) -> LineWriter:
        assert self._dir is not None, "no folder to write to"
        if name not in self._files:
            self._files[name] = LineWriter(self._dir / name)
        return self._files[name]

    def _prepare_folder(self) -> None:
        """Rename an earlier run's files, once; write `run.json`, again if it has changed or was
        deleted.

        Raises:
            OSError: this is not possible now.
        """
        assert self._dir is not None and self._run is not None, "no folder to prepare"
        needed = self._dir / RUN if self._is_first_replica else self._dir
        if self._is_folder_ready and self._is_header_written and needed.exists():
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        if not self._is_folder_ready:
            old = files_to_move(self._dir, self._own_file, self._all_files)
            move_aside(old, self._number_of_earlier)
        if self._is_first_replica:
            text = json.dumps(self._run, indent=2, sort_keys=True, default=str) + "\n"
            write_atomic(self._dir / RUN, text)
        self._is_header_written = True
        self._is_folder_ready = True

    def _attempt(self, write: Callable[[], None]) -> bool:
        """Call `write` and return whether it succeeded; the first failure is reported."""
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
        """Warn of weights that are nearly one-hot, or of a clip that always applies."""
        effective = effective_replicas(report.decision.weights).median().item()
        self._health.append((effective, report.clip.nan_to_num(1.0).median().item()))
        if len(self._health) < WATCHED_SYNCS or report.round % WATCHED_SYNCS:
            return
        half = len(report.inner_steps) / 2
        if all(seen < half for seen, _ in self._health):
            say(
                f"WARNING: for {WATCHED_SYNCS} syncs the median unit has had fewer than {half:g} "
                f"effective replicas; give a higher --edit-weight-temperature, or auto, or look at "
                "the anomalies"
            )
        if all(clip < LOW_CLIP for _, clip in self._health):
            say(
                f"WARNING: for {WATCHED_SYNCS} syncs the median unit was clipped below "
                f"{LOW_CLIP:g}; raise --edit-clip, or lower the learning rate"
            )


def next_number(folder: Path) -> int:
    """Return the smallest number above those of all files that were renamed so far."""
    if not folder.is_dir():  # deleted just now; the log makes it again
        return 1
    found = (_RENAMED.fullmatch(path.name) for path in folder.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def files_to_move(folder: Path, own_file: str, all_files: Collection[str] | None) -> list[Path]:
    """Return the files that this rank must move aside, in this order: its own and orphaned ones.

    `run.json` is the last: once a reader finds a new one, all older files of its writer are moved.

    Args:
        folder: `--edit-log-dir`.
        own_file: of this rank's replica.
        all_files: of all replicas, where this rank writes the files of the run, too; else None.
    """
    mine = folder / own_file
    if all_files is None:
        return [mine]
    unused = [path for path in folder.iterdir() if _REPLICA.fullmatch(path.name)
              and path.name not in all_files and not _RENAMED.fullmatch(path.name)]  # fmt: skip
    return [folder / SYNCS, folder / LOSSES, mine, *unused, folder / RUN]


def move_aside(paths: Iterable[Path], number: int) -> None:
    """Rename existing files to `sync.<number>.jsonl` and so on; nothing is overwritten."""
    for path in paths:
        free = number
        while (old := path.with_suffix(f".{free}{path.suffix}")).exists():
            free += 1
        if path.exists():
            path.rename(old)
