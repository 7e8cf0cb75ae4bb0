"""The records of the event files: what each field is, how it is written and how it is read.

The writers are `EventLog` and `reports.sync_line`; the readers are the tools. docs/events.md has
the same fields for users. Values that are not finite or not known are null. Fields may be added,
never renamed. Readers take files of older versions, in which fields are missing, and must expect
damaged lines: each `of` raises `ArithmeticError`, `KeyError`, `TypeError` or `ValueError` where a
line is not of its form.
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

from megatron_edit.constants import BAD_LOSS, SYNC_TIMES
from megatron_edit.errors import on_one_line

RUN, SYNCS, LOSSES = "run.json", "sync.jsonl", "loss.jsonl"
VALIDATION = "validation"  # the split whose losses are drawn and compared
FINISHED, STOPPED, FAILED = ENDS = ("finished", "stopped", "failed")
MAX_EXPONENT = 20.0  # of a perplexity, as Megatron bounds it
LARGEST_COUNT = 2**53  # as a float it is still exact
LARGEST_NUMBER = 1e100  # squares and sums of such are finite; float32 ends at 3e38
_UNIT_NAME = re.compile(r"[\w.-]+", re.ASCII)
Array = NDArray[np.float64]


def replica_file(replica: int) -> str:
    """Name of a replica's own file."""
    return f"replica-{replica}.jsonl"


def number(value: Any) -> Any:
    """`value`, or None for a float that is not finite (JSON has no NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def finite(value: Any, least: float = -LARGEST_NUMBER) -> float:
    """A number of a record.

    Raises:
        TypeError, ValueError: it is none, is below `least`, or larger than anything can be.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a number must be")
    if not least <= value <= LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return float(value)


def finite_or_nan(value: Any) -> float:
    """A number; NaN where the record has null."""
    return math.nan if value is None else finite(value)


def whole(value: Any, least: int = 0) -> int:
    """A whole number of a record.

    Raises:
        TypeError, ValueError: it is none, is below `least`, or larger than anything can be.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a whole number must be")
    if not least <= value <= LARGEST_COUNT or value != int(value):
        raise ValueError("a number that cannot be a count")
    return int(value)


def whole_or_none(value: Any) -> int | None:
    """A whole number; None where the record has null, or lacks it."""
    return None if value is None else whole(value)


@dataclass(frozen=True)
class Iteration:
    """One inner iteration of one replica: a line of `replica-<r>.jsonl`.

    Attributes:
        iteration: attempted optimizer steps, from 1; where replicas run at their own speeds, whole
            global batches that all of them have consumed.
        replica_step: attempted optimizer steps of this replica.
        loss: training loss, mean over the replica (in warm-up over all replicas); NaN where
            unknown.
        grad_norm: of the replica, before clipping; None where Megatron computed none.
        lr: learning rate of the next step, as Megatron's log line has it.
        samples: samples of this replica in this iteration.
        samples_all: consumed by all replicas so far, as far as this one knows; None where an older
            version wrote the line.
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
        """As it is written."""
        return {name: number(value) for name, value in vars(self).items()}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """From a line; versions before 0.2 wrote neither step nor `samples_all`."""
        iteration = whole(line["iteration"])
        return cls(
            iteration=iteration,
            replica_step=whole(line.get("replica_step", iteration)),
            loss=finite_or_nan(line["loss"]),
            grad_norm=line.get("grad_norm"),
            lr=line.get("lr"),
            samples=whole(line["samples"]),
            samples_all=whole_or_none(line.get("samples_all")),
            tokens=finite(line["tokens"], least=0),
            seconds=finite(line["seconds"], least=0),
        )


@dataclass(frozen=True)
class Ending:
    """How a replica's training ended: the last line of `replica-<r>.jsonl`.

    Attributes:
        end: `finished`: all iterations are made; `stopped`: a signal, the end of the allotted time,
            `--exit-interval`; `failed`: an error.
        reason: in words; None where it is finished.
        exit_code: of the process.
        iteration: the last that this replica made.
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
        """As it is written, now.

        Args:
            lines_lost: lines of its writer that could not be written.
        """
        return dict(vars(replace(self, time=time.time(), lines_lost=lines_lost)))

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """From a line."""
        if line["end"] not in ENDS:
            raise ValueError("an unknown kind of end")
        return cls(
            end=line["end"],
            reason=None if line.get("reason") is None else on_one_line(str(line["reason"])),
            exit_code=int(finite(line["exit_code"])),
            iteration=whole(line.get("iteration", 0)),
            samples=whole(line.get("samples", 0)),
            time=finite(line["time"]),
            lines_lost=whole(line.get("lines_lost", 0)),
        )


@dataclass(frozen=True)
class LossRecord:
    """A training loss, or one evaluation of all replicas: a line of `loss.jsonl`.

    Attributes:
        iteration: of a training loss, or Megatron's iteration number after which an evaluation
            came.
        samples: consumed by all replicas by then; None where that is not known.
        split: `validation` or `test`; None for a training loss.
        loss: mean over the replicas; NaN where there is no finite one.
        name: which of several validation sets; None where there is one.
    """

    iteration: int
    samples: int | None
    split: str | None
    loss: float
    name: str | None = None

    def line(self) -> dict[str, Any]:
        """As it is written; the perplexity is that of Megatron's console."""
        line: dict[str, Any] = {"iteration": self.iteration, "samples": self.samples}
        if self.split is None:
            return {**line, "loss": number(self.loss)}
        line |= {"validation_loss": number(self.loss), "split": self.split}
        line["perplexity"] = number(math.exp(min(MAX_EXPONENT, self.loss)))
        return line if self.name is None else {**line, "name": self.name}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """From a line; versions before 0.2 did not write the samples."""
        is_training = "validation_loss" not in line
        return cls(
            iteration=whole(line["iteration"]),
            samples=whole_or_none(line.get("samples")),
            split=None if is_training else str(line.get("split", VALIDATION)),
            loss=finite_or_nan(line["loss" if is_training else "validation_loss"]),
            name=str(line.get("name") or "") or None,
        )


Evaluation = LossRecord  # what the host calls one with a split


@dataclass(frozen=True, eq=False)
class SyncRecord:
    """A line of `sync.jsonl` as it is read, for N replicas and U units.

    Attributes:
        round, iteration, wire_bytes: as in the file.
        time: Unix seconds.
        units: names.
        norms, z, weights, anomalous: float64 [U, N]; NaN where not known.
        clip, rollback: float64 [U].
        seconds: of `SYNC_TIMES`, float64 [5].
        samples: of each replica.
        state_bytes: None where it is not known.
        rejected: replicas that were left out because of their loss.
        round_loss: float64 [N]; empty where an older version wrote the line.
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
    state_bytes: int | None
    rejected: list[int]
    round_loss: Array

    @classmethod
    def of(cls, line: Mapping[str, Any], num_replicas: int) -> Self:
        """From a line.

        Args:
            line: of the file.
            num_replicas: N, which the tables must have.
        """
        units = line["units"]
        if not isinstance(units, list) or not all(_UNIT_NAME.fullmatch(name) for name in units):
            raise ValueError("no names of units")
        shape = (len(units), num_replicas)
        rejected, round_loss = _rejected(line, num_replicas)
        return cls(
            round=whole(line["round"]),
            iteration=whole(line["iteration"]),
            wire_bytes=whole(line["wire_bytes"]),
            time=finite(line["time"]),
            units=units,
            norms=_table(line["norms"], shape),
            z=_table(line["z"], shape),
            weights=_table(line["weights"], shape),
            anomalous=_table(line["anomalous"], shape),
            clip=_table(line["clip"], shape[:1]),
            rollback=_table(line["rollback"], shape[:1]),
            seconds=np.array([finite(line["seconds"][name]) for name in SYNC_TIMES]),
            samples=samples_of(line),
            state_bytes=whole_or_none(line.get("state_bytes")),
            rejected=rejected,
            round_loss=round_loss,
        )


def samples_of(line: Mapping[str, Any]) -> list[int]:
    """Of each replica, by a line of `sync.jsonl`."""
    return [whole(samples) for samples in line["samples"]]


def _table(values: Any, shape: tuple[int, ...]) -> Array:
    """A table of numbers and nulls, which become NaN."""
    table = np.array(values, dtype=np.float64)
    if table.shape != shape or not table.size:
        raise ValueError(f"a table of shape {table.shape}, not {shape}")
    if (np.abs(table) > LARGEST_NUMBER).any():  # NaN is not
        raise ValueError("a number out of range")
    return table


def _rejected(line: Mapping[str, Any], num_replicas: int) -> tuple[list[int], Array]:
    """Replicas that the loss check left out, and the losses of all."""
    if "why" not in line:
        return [], np.empty(0)
    losses, why = _table(line["round_loss"], (num_replicas,)), line["why"]
    if not isinstance(why, list) or any(len(reasons) != num_replicas for reasons in why):
        raise ValueError("no reasons by unit and replica")
    by_replica = zip(*why, strict=True)
    return [r for r, reasons in enumerate(by_replica) if BAD_LOSS in reasons], losses
