"""The records of the event files: meaning, writing and reading of each field.

The writers are `EventLog` and `reports.sync_line`; the readers are the tools. docs/events.md has
the same fields for users. Values that are not finite or not known are null. Fields may be added,
never renamed. Readers accept files of older versions, in which fields are missing, and must expect
damaged lines: each `of` raises `ArithmeticError`, `KeyError`, `TypeError` or `ValueError` on an
invalid line.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_edit.constants import BAD_LOSS, NO_STEP, REPLICA_NAME, SYNC_TIMES
from megatron_edit.errors import to_one_line

RUN, SYNCS, LOSSES = "run.json", "sync.jsonl", "loss.jsonl"
VALIDATION = "validation"  # the split whose losses are plotted and compared
FINISHED, STOPPED, FAILED = ENDS = ("finished", "stopped", "failed")
MAX_EXPONENT = 20.0  # of a perplexity, as in Megatron
LARGEST_COUNT = 2**53  # exact as a float
LARGEST_NUMBER = 1e100  # its squares and sums are finite; the largest float32 is 3e38
_UNIT_NAME = re.compile(r"[\w.-]+", re.ASCII)
_REPLICA_NAME = re.compile(REPLICA_NAME)
Array = NDArray[np.float64]


def replica_file(replica: int | str) -> str:
    """Return the name of a replica's own file."""
    return f"replica-{replica}.jsonl"


def finite_or_none(value: Any) -> Any:
    """Return `value`, or None for a float that is not finite (JSON has no NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_number(value: Any, least: float = -LARGEST_NUMBER) -> float:
    """Return a number of a record as a float.

    Raises:
        TypeError, ValueError: it is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a number must be")
    if not least <= value <= LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return float(value)


def number_or_nan(value: Any) -> float:
    """Return a number as a float; NaN where the record has null."""
    return math.nan if value is None else as_number(value)


def as_count(value: Any, least: int = 0) -> int:
    """Return a whole number of a record.

    Raises:
        TypeError, ValueError: it is not a whole number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a whole number must be")
    if not least <= value <= LARGEST_COUNT or value != int(value):
        raise ValueError("a number that cannot be a count")
    return int(value)


def count_or_none(value: Any) -> int | None:
    """Return a whole number; None where the record has null or no such field."""
    return None if value is None else as_count(value)


def as_replica_name(value: Any) -> str:
    """Return the name of a replica of an elastic run.

    Raises:
        TypeError, ValueError: it is not one.
    """
    if not _REPLICA_NAME.fullmatch(value):
        raise ValueError("no name of a replica")
    return str(value)


def members_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the members from a line of a sync or of the hub's journal.

    Returns:
        Their names in the order of the columns; empty in a run without a hub.
    """
    members = line.get("members", [])
    if not isinstance(members, list) or len(set(members)) < len(members):
        raise ValueError("no list of different members")
    return tuple(map(as_replica_name, members))


@dataclass(frozen=True)
class Iteration:
    """One inner iteration of one replica: a line of `replica-<r>.jsonl`.

    Attributes:
        iteration: attempted optimizer steps, from 1; with timed rounds, complete global batches
            consumed by all replicas.
        replica_step: attempted optimizer steps of this replica.
        loss: training loss, mean over the replica (in warm-up over all replicas); NaN where
            unknown.
        grad_norm: of the replica, before clipping; None where Megatron computed none.
        lr: learning rate of the next step, as in Megatron's log line.
        samples: samples of this replica in this iteration.
        samples_all: consumed by all replicas so far, as known to this one; None in lines of older
            versions.
        tokens: tokens of this replica in this iteration.
        seconds: length of the step.
    """

    iteration: int
    replica_step: int
    loss: float
    grad_norm: float | None
    lr: float | None
    samples: int
    samples_all: int | None
    tokens: float
    seconds: float

    def line(self) -> dict[str, Any]:
        """Return the line to write."""
        return {name: finite_or_none(value) for name, value in vars(self).items()}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Read a line; versions before 0.2 wrote neither step nor `samples_all`."""
        iteration = as_count(line["iteration"])
        return cls(
            iteration=iteration,
            replica_step=as_count(line.get("replica_step", iteration)),
            loss=number_or_nan(line["loss"]),
            grad_norm=line.get("grad_norm"),
            lr=line.get("lr"),
            samples=as_count(line["samples"]),
            samples_all=count_or_none(line.get("samples_all")),
            tokens=as_number(line["tokens"], least=0),
            seconds=as_number(line["seconds"], least=0),
        )


@dataclass(frozen=True)
class Ending:
    """How a replica's training ended: the last line of `replica-<r>.jsonl`.

    Attributes:
        end: `finished`: all iterations are done; `stopped`: a signal, the end of the allotted time,
            `--exit-interval`; `failed`: an error.
        reason: in words; None for `finished`.
        exit_code: of the process.
        iteration: the last one of this replica.
        samples: consumed by this replica since the start of training.
        time: Unix seconds at which the line was written.
        lines_lost: lines of its writer that could not be written.
    """

    end: str
    reason: str | None
    exit_code: int
    iteration: int
    samples: int
    time: float = 0.0
    lines_lost: int = 0

    def line(self, lines_lost: int) -> dict[str, Any]:
        """Return the line to write, with the present time.

        Args:
            lines_lost: lines of its writer that could not be written.
        """
        return dict(vars(replace(self, time=time.time(), lines_lost=lines_lost)))

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Read a line."""
        if line["end"] not in ENDS:
            raise ValueError("an unknown kind of end")
        return cls(
            end=line["end"],
            reason=None if line.get("reason") is None else to_one_line(str(line["reason"])),
            exit_code=int(as_number(line["exit_code"])),
            iteration=as_count(line.get("iteration", 0)),
            samples=as_count(line.get("samples", 0)),
            time=as_number(line["time"]),
            lines_lost=as_count(line.get("lines_lost", 0)),
        )


@dataclass(frozen=True)
class LossRecord:
    """A training loss, or one evaluation of all replicas: a line of `loss.jsonl`.

    Attributes:
        iteration: of a training loss, or after which Megatron evaluated.
        samples: consumed by all replicas so far; None where not known.
        split: `validation` or `test`; None for a training loss.
        loss: mean over the replicas; NaN where there is no finite one.
        name: of one of several validation sets; None if there is only one.
    """

    iteration: int
    samples: int | None
    split: str | None
    loss: float
    name: str | None = None

    def line(self) -> dict[str, Any]:
        """Return the line to write; the perplexity is that of Megatron's console."""
        line: dict[str, Any] = {"iteration": self.iteration, "samples": self.samples}
        if self.split is None:
            return {**line, "loss": finite_or_none(self.loss)}
        line |= {"validation_loss": finite_or_none(self.loss), "split": self.split}
        line["perplexity"] = finite_or_none(math.exp(min(MAX_EXPONENT, self.loss)))
        return line if self.name is None else {**line, "name": self.name}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Read a line; versions before 0.2 did not write the samples."""
        is_training = "validation_loss" not in line
        return cls(
            iteration=as_count(line["iteration"]),
            samples=count_or_none(line.get("samples")),
            split=None if is_training else str(line.get("split", VALIDATION)),
            loss=number_or_nan(line["loss" if is_training else "validation_loss"]),
            name=str(line.get("name") or "") or None,
        )


Evaluation = LossRecord  # a record with a split


@dataclass(frozen=True, eq=False)
class SyncRecord:
    """A line of `sync.jsonl` as it is read, for N replicas and U units.

    In an elastic run the replicas are the members of the sync.

    Attributes:
        round, iteration, wire_bytes: as in the file.
        time: Unix seconds.
        units: names.
        norms, z, weights, anomalous: float64 [U, N]; NaN where not known. A replica of an elastic
            run that has just joined, and has no step, is not anomalous.
        clip, rollback: float64 [U].
        seconds: of `SYNC_TIMES`, float64 [5].
        samples: of each replica.
        samples_all: consumed by all replicas so far, also by former members.
        state_bytes: None where not known.
        rejected: replicas that were rejected because of their loss.
        round_loss: float64 [N]; empty where an older version wrote the line.
        epoch: number of the membership; None in a run without a hub.
        members: names of the replicas; empty in a run without a hub.
    """

    round: int
    iteration: int
    wire_bytes: int
    time: float
    units: list[str]
    norms: Array
    z: Array
    weights: Array
    anomalous: Array
    clip: Array
    rollback: Array
    seconds: Array
    samples: list[int]
    samples_all: int
    state_bytes: int | None
    rejected: list[int]
    round_loss: Array
    epoch: int | None
    members: tuple[str, ...]

    @classmethod
    def of(cls, line: Mapping[str, Any], num_replicas: int) -> Self:
        """Read a line.

        Args:
            line: of the file.
            num_replicas: N, the required size of the tables; not used where the line has members.
        """
        units, members = line["units"], members_of(line)
        num_replicas = len(members) or num_replicas
        if not isinstance(units, list) or not all(_UNIT_NAME.fullmatch(name) for name in units):
            raise ValueError("no names of units")
        shape = (len(units), num_replicas)
        rejected, round_loss = _rejected(line, num_replicas)
        return cls(
            round=as_count(line["round"]),
            iteration=as_count(line["iteration"]),
            wire_bytes=as_count(line["wire_bytes"]),
            time=as_number(line["time"]),
            units=units,
            norms=_table(line["norms"], shape),
            z=_table(line["z"], shape),
            weights=_table(line["weights"], shape),
            anomalous=_table(line["anomalous"], shape) * (1 - _has_joined(line, shape)),
            clip=_table(line["clip"], shape[:1]),
            rollback=_table(line["rollback"], shape[:1]),
            seconds=np.array([as_number(line["seconds"][name]) for name in SYNC_TIMES]),
            samples=samples_of(line),
            samples_all=samples_of_all(line),
            state_bytes=count_or_none(line.get("state_bytes")),
            rejected=rejected,
            round_loss=round_loss,
            epoch=as_count(line["epoch"]) if members else None,
            members=members,
        )


def samples_of(line: Mapping[str, Any]) -> list[int]:
    """Return the samples of each replica from a line of `sync.jsonl`."""
    return [as_count(samples) for samples in line["samples"]]


def samples_of_all(line: Mapping[str, Any]) -> int:
    """Return the samples that all replicas have consumed until a line of `sync.jsonl`.

    Lines of runs without a hub do not have their number: no replica leaves such a run.
    """
    if (samples := line.get("samples_all")) is not None:
        return as_count(samples)
    return sum(samples_of(line))


def _table(values: Any, shape: tuple[int, ...]) -> Array:
    """Return a table of numbers; nulls become NaN."""
    table = np.array(values, dtype=np.float64)
    if table.shape != shape or not table.size:
        raise ValueError(f"a table of shape {table.shape}, not {shape}")
    if (np.abs(table) > LARGEST_NUMBER).any():  # false for NaN
        raise ValueError("a number out of range")
    return table


def _has_joined(line: Mapping[str, Any], shape: tuple[int, int]) -> Array:
    """Return 1 where a replica of an elastic run was left out as it has no step; else 0."""
    if "members" not in line:
        return np.zeros(shape)
    has_joined = np.array([[reason == NO_STEP for reason in row] for row in line["why"]], float)
    if has_joined.shape != shape:
        raise ValueError("no reasons by unit and replica")
    return has_joined


def _rejected(line: Mapping[str, Any], num_replicas: int) -> tuple[list[int], Array]:
    """Return the replicas that the loss check rejected, and the losses of all."""
    if "why" not in line:
        return [], np.empty(0)
    losses, why = _table(line["round_loss"], (num_replicas,)), line["why"]
    if not isinstance(why, list) or any(len(reasons) != num_replicas for reasons in why):
        raise ValueError("no reasons by unit and replica")
    by_replica = zip(*why, strict=True)
    return [r for r, reasons in enumerate(by_replica) if BAD_LOSS in reasons], losses
