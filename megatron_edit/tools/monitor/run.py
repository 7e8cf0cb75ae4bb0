"""The folder of a run's event files, read as a whole, and again as they grow."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_edit.errors import UsageError
from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.lines import LineFile, status, unreadable
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.series import Bins
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.monitor.values import finite, whole

SILENT_SECONDS = 120.0
SILENT_STEPS = 10  # of the slowest replica's longest steps
State = Literal["waiting", "running", "silent", "finished"]


class MonitoredRun:
    """Everything that the event files of a run say, so far.

    Args:
        folder: `--edit-log-dir`.

    Attributes:
        folder: the same.
        facts: None until `run.json` is there.
        losses: mean over the replicas, by iteration.
        loss: the newest of them.
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
        self.losses, self.loss = Bins(), math.nan
        self.syncs = Syncs(0)
        self.replicas: list[Replica] = []
        self.drift: tuple[int, int] | None = None
        self.read_at = time.time()
        self._digests: dict[int, str] = {}
        self._files: dict[str, LineFile] = {}
        self._version: tuple[int, int] | None = None

    @property
    def files(self) -> list[LineFile]:
        """All but `run.json`."""
        return list(self._files.values())

    def unread_bytes(self) -> int:
        """What there is to read. It looks for `run.json`, too.

        Raises:
            UsageError: there is a `run.json` that is none of ours, or a file cannot be read.
        """
        self._open()
        return sum(file.unread_bytes for file in self.files)

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
        for name, file in self._files.items():
            take = self._taker(name)
            for record in file.read(on_bytes):
                try:
                    take(record)
                except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1
        if self._was_replaced:  # while it was read: what has been read may be of both
            self.poll(on_bytes)

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
                self.facts = Facts.of(file.read())
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
        total = self.facts.num_replicas
        self.syncs = Syncs(total)
        self.replicas = [Replica(number, self.facts.warmup_steps) for number in range(total)]
        names = ["sync.jsonl", "loss.jsonl", *(f"replica-{r}.jsonl" for r in range(total))]
        self._files = {name: LineFile(self.folder / name) for name in names}

    @property
    def _path(self) -> Path:
        return self.folder / "run.json"

    def _taker(self, name: str) -> Callable[[Mapping[str, Any]], None]:
        if name == "sync.jsonl":
            return self.syncs.add
        if name == "loss.jsonl":
            return self._take_loss
        replica = self.replicas[int(name.partition("-")[2].partition(".")[0])]

        def take(line: Mapping[str, Any]) -> None:
            if "end" in line:
                return
            if "digest" in line:
                self._compare(whole(line["round"]), line["digest"], replica.number)
                replica.on_sync()
            else:
                replica.add(line)

        return take

    def _take_loss(self, line: Mapping[str, Any]) -> None:
        if "validation_loss" in line:
            return
        if line["loss"] is not None:
            iteration, loss = whole(line["iteration"]), finite(line["loss"])
            self.losses.add(iteration, loss)
            self.loss = loss

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- where it is

    @property
    def iteration(self) -> int:
        """The furthest replica's; where replicas run at their own speeds, whole global batches."""
        furthest = max((replica.iteration for replica in self.replicas), default=0)
        facts, samples = self.facts, self._samples_of_all
        if facts is None or not facts.strategy.is_timed or samples is None or not facts.batch_size:
            return furthest
        return min(samples // facts.batch_size, facts.train_iters or samples)

    @property
    def _samples_of_all(self) -> int | None:
        """Consumed by all replicas. Older event files say it only at a sync: None before one."""
        told = max((replica.samples_all for replica in self.replicas), default=0)
        if told:
            return told
        if not self.syncs.count:
            return None
        return sum(self.syncs.samples) + sum(replica.samples for replica in self.replicas)

    @property
    def missing(self) -> list[int]:
        """Replicas without a file here."""
        return [r.number for r in self.replicas
                if status(self._files[f"replica-{r.number}.jsonl"].path) is None]  # fmt: skip

    @property
    def num_damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        return {name: f.num_damaged for name, f in self._files.items() if f.num_damaged}

    @property
    def progress(self) -> float | None:
        """Share of the training that is done; None where its length is not known."""
        facts = self.facts
        if facts is None or not facts.train_iters:
            return None
        is_apart = self.syncs.count > 0 or self.iteration > facts.warmup_steps
        if not facts.strategy.is_timed or not is_apart:
            return min(1.0, self.iteration / facts.train_iters)
        done = self._samples_of_all
        if not facts.batch_size or done is None:
            return None
        return min(1.0, done / (facts.train_iters * facts.batch_size))

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
    def state(self) -> State:
        """What is known of the training's life: nobody writes down its end."""
        if self.facts is None:
            return "waiting"
        if self.progress is not None and self.progress >= 1.0:
            return "finished"
        longest = max((replica.step_seconds for replica in self.replicas), default=0.0)
        limit = max(SILENT_SECONDS, SILENT_STEPS * longest)
        return "silent" if self.silence > limit else "running"


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
    found = status(folder / "run.json")
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return MonitoredRun(folder)


def _version(found: os.stat_result) -> tuple[int, int]:
    """What a file that is written anew has another one of."""
    return found.st_ino, found.st_mtime_ns
