"""Reading of event files: `run.json`, the lines of the other files, and the runs of a training.

A run renames the files of an earlier run in the folder (`run.1.json`, `sync.1.jsonl`, ...), and
records in `run.json` which checkpoint it resumed from.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.constants import FIXED, REPLICA_NAME
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.method.auto import chosen_of
from megatron_edit.method.strategy import STRATEGIES, Strategy
from megatron_edit.observe.line_files import (
    LineReader,
    last_record,
    stat_or_none,
    unreadable_error,
)
from megatron_edit.observe.records import Ending, Iteration, as_count, as_number, samples_of_all

_RENAMED = re.compile(r"run\.(\d+)\.json")
_NUMBERED = re.compile(r".*\.\d+")  # in the name of a file: an earlier run's
_CLOCK_SECONDS = 1.0  # resolution of the times of files
MAX_REPLICAS = 65536
_LATE_BATCHES = 10  # that a killed run may not have written


class EventFile[Record](LineReader):
    """The records of a file that may grow.

    Args:
        path: of the file, which need not exist yet.
        parse: turns a line into a record; raises an error where it is invalid.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], Record]) -> None:
        self._parse = parse
        super().__init__(path)

    def start_over(self) -> None:
        """Forget all records."""
        super().start_over()
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """Return all records, also those of earlier calls.

        Raises:
            UsageError: the file exists and cannot be read.
        """
        if self.was_replaced:
            self.start_over()
        for line in self.read():
            try:
                self._records.append(self._parse(line))
            except (ArithmeticError, KeyError, TypeError, ValueError, IndexError):
                self.num_damaged += 1
        return self._records


def parse_replica_line(line: Mapping[str, Any]) -> Iteration | Ending | None:
    """Return the record of a line of `replica-<r>.jsonl`; None for a digest."""
    if "digest" in line:
        return None
    return Ending.of(line) if "end" in line else Iteration.of(line)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumed from."""

    iteration: int  # under A-EDiT the step of replica 0
    samples: int  # consumed by all replicas


@dataclass(frozen=True)
class Facts:
    """The contents of `run.json`."""

    config: Mapping[str, Any]  # those that `--edit-auto` chose last are as chosen
    strategy: Strategy
    num_replicas: int  # in an elastic run how many it begins with
    ranks_per_replica: int
    device: str
    host: str
    warmup_steps: int  # 0 where the warm-up never ends
    num_choices: int | None  # how often `--edit-auto` has chosen settings; None without it
    versions: Mapping[str, str]
    argv: tuple[str, ...]
    train_iters: int
    last_local_step: int | None  # before the final synchronous phase; None without one
    batch_size: int
    seq_length: int
    inside_bytes: float  # sent inside a replica per step
    has_ends: bool  # whether replicas write end records; version 0.1 did not
    resumed_from: ResumePoint | None

    @property
    def sync_interval(self) -> int:
        """tau, steps."""
        return int(self.config["sync_interval"])

    @property
    def delay_steps(self) -> int:
        """d, steps."""
        return int(self.config["delay_steps"])

    @property
    def is_elastic(self) -> bool:
        """Whether the run has a hub: replicas have names, and come and go."""
        return self.config.get("hub") is not None

    @property
    def has_unequal_steps(self) -> bool:
        """Whether replicas make unequal numbers of steps: their position is that of samples."""
        return self.strategy.is_timed or self.is_elastic

    def has_local_steps(self, iteration: int) -> bool:
        """Whether the sync there ends a round of local steps. With a hub the warm-up and the final
        phase consist of rounds of one step."""
        last = self.train_iters if self.last_local_step is None else self.last_local_step
        return not self.is_elastic or self.warmup_steps < iteration <= last

    @property
    def has_one_loss_per_round(self) -> bool:
        """Whether `loss.jsonl` has one line for each round, but in a warm-up without a hub."""
        return self.has_unequal_steps or self.config.get("interval", FIXED) != FIXED

    @property
    def batch_tokens(self) -> int:
        """Tokens of an iteration of all replicas."""
        return self.batch_size * self.seq_length

    @classmethod
    def of(cls, text: str) -> Facts:
        """Parse the text of the file.

        Raises:
            ValueError: it is not a `run.json` of this package.
        """
        try:
            return cls._of_record(json.loads(text))
        except KeyError as error:
            raise ValueError(f"no {error.args[0]}") from None
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None

    @classmethod
    def _of_record(cls, found: Mapping[str, Any]) -> Facts:
        topology, sizes, choices = found["topology"], found["training"], found.get("choices", [])
        config = dict(found["config"])
        if (name := config["strategy"]) not in STRATEGIES:
            raise ValueError(f"unknown strategy {name}")
        if choices:
            config |= chosen_of(name, choices[-1]["settings"])
            config["warmup_steps"] = choices[0]["since"]
        strategy = STRATEGIES[name]
        segment = found.get("segment")
        point = segment and segment["resumed_from"]
        for name in ("sync_interval", "delay_steps"):
            as_count(config[name])
        as_number(config["sync_seconds"])
        if (num_replicas := as_count(topology["num_replicas"], 1)) > MAX_REPLICAS:
            raise ValueError(f"{num_replicas} replicas")
        return cls(
            config=config,
            strategy=strategy,
            num_replicas=num_replicas,
            ranks_per_replica=as_count(topology["ranks_per_replica"], 1),
            device=_text(topology["device"]),
            host=_text(topology["host"]),
            warmup_steps=0 if strategy.endless_warmup else as_count(config["warmup_steps"]),
            num_choices=len(choices) if config.get("auto") else None,
            versions={name: _text(version) for name, version in found["versions"].items()},
            argv=tuple(map(_text, found["argv"])),
            train_iters=as_count(sizes["train_iters"]),
            last_local_step=sizes["last_local_step"] if config.get("final_sync_fraction") else None,
            batch_size=as_count(sizes["global_batch_size"], 1),
            seq_length=as_count(sizes["seq_length"], 1),
            inside_bytes=as_number(sizes["inside_bytes_per_step"]),
            has_ends=segment is not None,
            resumed_from=ResumePoint(as_count(point["iteration"]), as_count(point["samples"]))
            if point
            else None,
        )


def _text(value: Any) -> str:
    """Return text that can be shown: surrogate escapes of invalid bytes are replaced."""
    return to_one_line(str(value))


def read_run_json(path: Path) -> str | None:
    """Return the text of `run.json`; None where there is no such file.

    Raises:
        UsageError: it cannot be read.
    """
    found = stat_or_none(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:  # renamed just now, by a run that begins
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable_error(path, error) from None


@dataclass(frozen=True)
class Segment:
    """One run of a training; its lines after the checkpoint that a later run resumed from do not
    count."""

    middle: str  # in the names of renamed files: `.1`; empty for the newest run
    facts: Facts
    end: ResumePoint | None = None  # that checkpoint

    def keeps(self, iteration: int, samples: float | None) -> bool:
        """Return whether a line counts, given the samples of all replicas until then."""
        if self.end is None:
            return True
        if self.facts.has_unequal_steps and samples is not None:
            return samples <= self.end.samples
        return iteration <= self.end.iteration

    def replicas_in(self, folder: Path) -> list[str]:
        """Return the names of the replicas of an elastic run that have a file in the folder."""
        found = stat_or_none(folder / f"run{self.middle}.json")
        if found is None:
            return []
        pattern = re.compile(rf"replica-({REPLICA_NAME}){re.escape(self.middle)}\.jsonl")
        names = []
        for path in paths_in(folder):
            match = pattern.fullmatch(path.name)
            if match is None or (not self.middle and _NUMBERED.fullmatch(match[1])):
                continue
            file = stat_or_none(path)  # a file that was not written to since is an earlier run's
            if file is not None and file.st_mtime >= found.st_mtime - _CLOCK_SECONDS:
                names.append(match[1])
        return sorted(names)


def read_segments(folder: Path, newest: Facts) -> list[Segment]:
    """Return the runs of the newest run's training, oldest first.

    A run that never got as far as the checkpoint belongs to another training.

    Raises:
        UsageError: the folder cannot be read.
    """
    found, end = [Segment("", newest)], None
    paths = paths_in(folder)
    names = [_RENAMED.fullmatch(path.name) for path in paths]
    for number in sorted((int(name[1]) for name in names if name), reverse=True):
        if (point := found[-1].facts.resumed_from) is None:
            break
        end = point if end is None else min(point, end, key=lambda each: each.samples)
        try:
            facts = Facts.of((folder / f"run.{number}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            break
        files = [path for path in paths if path.name.endswith(f".{number}.jsonl")]
        if _furthest_samples(facts, files) < point.samples:
            break
        found.append(Segment(f".{number}", facts, end))
    return found[::-1]


def _furthest_samples(facts: Facts, files: Sequence[Path]) -> int:
    """Return the samples of all replicas that a run has reached, by the last line of each file."""
    furthest = facts.resumed_from.samples if facts.resumed_from else 0
    for path in files:
        line = last_record(path) or {}
        try:
            # A sync has one number of samples per replica.
            if line.get("samples_all") is None and not isinstance(line.get("samples"), list):
                samples = as_count(line["iteration"]) * facts.batch_size
            else:
                samples = samples_of_all(line)
            furthest = max(furthest, samples)
        except (KeyError, TypeError, ValueError):
            continue
    return furthest + _LATE_BATCHES * facts.batch_size


def paths_in(folder: Path) -> list[Path]:
    """Return the files of a folder.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            str(folder), f"cannot be read ({error.strerror})", "give another folder"
        ) from None


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
