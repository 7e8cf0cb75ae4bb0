"""The folder of a run's event files, read as a whole, and again as they grow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES, Strategy
from megatron_edit.monitor.lines import LineFile
from megatron_edit.monitor.replicas import Replica
from megatron_edit.monitor.series import Bins
from megatron_edit.monitor.syncs import Syncs

SILENT_SECONDS = 120.0
SILENT_STEPS = 10  # of the slowest replica's longest steps
State = Literal["waiting", "running", "silent", "finished"]


@dataclass(frozen=True)
class Facts:
    """What `run.json` says. Sizes are None where an older version wrote it.

    Attributes:
        config: every setting.
        topology: replicas, ranks, device, host.
        versions: of what has a part in the numbers.
        argv: the command line.
        train_iters: `--train-iters`.
        batch_size: global.
        seq_length: tokens of a sample.
        inside_bytes: of one step inside a replica.
    """

    config: Mapping[str, Any]
    topology: Mapping[str, Any]
    versions: Mapping[str, str]
    argv: tuple[str, ...]
    train_iters: int | None
    batch_size: int | None
    seq_length: int | None
    inside_bytes: float | None

    @classmethod
    def of(cls, text: str) -> Facts:
        """From the file.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it is none of ours.
        """
        found = json.loads(text)
        sizes = found.get("training", {})
        facts = cls(
            found["config"], found["topology"], found["versions"], tuple(found["argv"]),
            *(sizes.get(name) for name in ("train_iters", "global_batch_size", "seq_length",
                                           "inside_bytes_per_step")),
        )  # fmt: skip
        if facts.num_replicas < 1 or facts.strategy is None or facts.warmup_steps < 0:
            raise ValueError("no topology of ours")
        return facts

    @property
    def num_replicas(self) -> int:
        """N."""
        return int(self.topology["num_replicas"])

    @property
    def warmup_steps(self) -> int:
        """W; 0 where the warm-up never ends."""
        return 0 if self.strategy.endless_warmup else int(self.config["warmup_steps"])

    @property
    def strategy(self) -> Strategy:
        """The rule of synchronisation."""
        return STRATEGIES[self.config["strategy"]]


class Run:
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

    @property
    def files(self) -> list[LineFile]:
        """All but `run.json`."""
        return list(self._files.values())

    def unread_bytes(self) -> int:
        """What there is to read. It looks for `run.json`, too."""
        self._open()
        return sum(file.unread_bytes for file in self.files)

    def poll(self, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        """Read what has come since the last time; a newer run in the folder is read from its start.

        Args:
            on_bytes: told how many bytes were read, now and then.

        Raises:
            UsageError: there is a `run.json`, and it is none of ours.
        """
        if any(file.was_replaced for file in self.files):
            self._begin()
        self._open()
        self.read_at = time.time()
        for name, file in self._files.items():
            take = self._taker(name)
            for record in file.read(on_bytes):
                try:
                    take(record)
                except (KeyError, TypeError, ValueError, IndexError):
                    file.num_damaged += 1

    def _open(self) -> None:
        path = self.folder / "run.json"
        if self.facts is not None or not path.is_file():
            return
        try:
            self.facts = Facts.of(path.read_text(encoding="utf-8"))
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise UsageError(
                str(path),
                f"is not what a run writes ({error})",
                "give the folder of --edit-log-dir",
            ) from None
        count = self.facts.num_replicas
        self.syncs = Syncs(count)
        self.replicas = [Replica(number, self.facts.warmup_steps) for number in range(count)]
        names = ["sync.jsonl", "loss.jsonl", *(f"replica-{r}.jsonl" for r in range(count))]
        self._files = {name: LineFile(self.folder / name) for name in names}

    def _taker(self, name: str) -> Callable[[Mapping[str, Any]], None]:
        if name == "sync.jsonl":
            return self.syncs.add
        if name == "loss.jsonl":
            return self._take_loss
        replica = self.replicas[int(name.partition("-")[2].partition(".")[0])]

        def take(line: Mapping[str, Any]) -> None:
            if "digest" in line:
                self._compare(int(line["round"]), line["digest"], replica.number)
                replica.on_sync()
            else:
                replica.add(line)

        return take

    def _take_loss(self, line: Mapping[str, Any]) -> None:
        if line["loss"] is not None:
            self.losses.add(int(line["iteration"]), float(line["loss"]))
            self.loss = float(line["loss"])

    def _compare(self, number: int, digest: str | None, replica: int) -> None:
        if digest is None:
            return
        if self._digests.setdefault(number, digest) != digest and self.drift is None:
            self.drift = number, replica

    # ---- where it is

    @property
    def iteration(self) -> int:
        """The furthest replica's."""
        return max((replica.iteration for replica in self.replicas), default=0)

    @property
    def missing(self) -> list[int]:
        """Replicas without a file here."""
        return [r.number for r in self.replicas if not self._files[f"replica-{r.number}.jsonl"]
                .path.exists()]  # fmt: skip

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
        if facts.strategy.is_timed and self.syncs.count:  # replicas count steps of their own
            if not facts.batch_size:
                return None
            done = sum(self.syncs.samples) + sum(replica.samples for replica in self.replicas)
            return min(1.0, done / (facts.train_iters * facts.batch_size))
        return min(1.0, self.iteration / facts.train_iters)

    @property
    def speed(self) -> float:
        """Tokens per second of all replicas together, at present."""
        return sum(r.speed for r in self.replicas if math.isfinite(r.speed))

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
        paths = [self.folder / "run.json", *(file.path for file in self.files)]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=None)

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


def open_run(folder: Path) -> Run:
    """A folder that holds a run.

    Raises:
        UsageError: it does not.
    """
    if not folder.is_dir():
        raise UsageError(str(folder), "is no folder", "give the folder of --edit-log-dir")
    if not (folder / "run.json").is_file():
        raise UsageError(
            str(folder), "holds no run.json", "give the folder of --edit-log-dir of a run"
        )
    return Run(folder)
