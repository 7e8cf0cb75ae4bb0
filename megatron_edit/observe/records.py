"""The lines of the event files (design section 4): what each field is and where it comes from.

Values that are not finite or not known are null. Fields may be added, never renamed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_edit.constants import FEW_REPLICAS
from megatron_edit.engine import SyncReport
from megatron_edit.method.digest import as_hex
from megatron_edit.method.weights import effective_replicas

MAX_EXPONENT = 20.0  # of a perplexity, as Megatron bounds it


@dataclass(frozen=True)
class Iteration:
    """One inner iteration of one replica.

    Attributes:
        iteration: attempted optimizer steps, from 1; where replicas run at their own speeds, whole
            global batches that all of them have consumed.
        replica_step: attempted optimizer steps of this replica.
        loss: training loss, mean over the replica (in warm-up over all replicas); NaN where
            unknown.
        grad_norm: of the replica, before clipping; None where Megatron computed none.
        lr: learning rate of the next step, as Megatron's log line has it.
        samples: samples of this replica in this iteration.
        samples_all: consumed by all replicas so far, as far as this one knows.
        tokens: tokens of this replica in this iteration.
        seconds: length of the step.
    """

    iteration: int
    replica_step: int
    loss: float
    grad_norm: float | None
    lr: float | None
    samples: int
    samples_all: int
    tokens: int
    seconds: float

    def line(self) -> dict[str, Any]:
        """A line of `replica-<r>.jsonl`."""
        return {name: number(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of all replicas.

    Attributes:
        iteration: Megatron's iteration number, after which it came.
        samples: consumed by all replicas by then.
        split: `validation` or `test`.
        loss: mean over the replicas.
        name: which of several validation sets; None where there is one.
    """

    iteration: int
    samples: int
    split: str
    loss: float
    name: str | None = None

    def line(self) -> dict[str, Any]:
        """A line of `loss.jsonl`; the perplexity is that of Megatron's console."""
        line = {
            "iteration": self.iteration,
            "samples": self.samples,
            "validation_loss": number(self.loss),
            "split": self.split,
            "perplexity": number(math.exp(min(MAX_EXPONENT, self.loss))),
        }
        return line if self.name is None else {**line, "name": self.name}


@dataclass(frozen=True)
class Ending:
    """How a replica's training ended.

    Attributes:
        end: `finished`: all iterations are made; `stopped`: a signal, the end of the allotted time,
            `--exit-interval`; `failed`: an error.
        reason: in words; None where it is finished.
        exit_code: of the process.
        iteration: the last that this replica made.
        samples: consumed by this replica since the start of training.
    """

    end: str
    reason: str | None
    exit_code: int
    iteration: int
    samples: int

    def line(self, lines_lost: int) -> dict[str, Any]:
        """The last line of `replica-<r>.jsonl`.

        Args:
            lines_lost: lines of its writer that could not be written.
        """
        return {**vars(self), "time": time.time(), "lines_lost": lines_lost}


def number(value: Any) -> Any:
    """`value`, or None for a float that is not finite (JSON has no NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sync_line(report: SyncReport) -> dict[str, Any]:
    """A line of `sync.jsonl`. Tables are [unit][replica]."""
    decision = report.decision
    return {
        "round": report.round,
        "iteration": report.step,
        "time": time.time(),
        "units": list(report.units),
        "norms": _table(decision.norms),
        "z": _table(decision.verdict.scores),
        "anomalous": decision.verdict.anomalous.t().tolist(),
        "why": decision.reasons(),
        "round_loss": _row(decision.loss.losses),
        "loss_z": _row(decision.loss.scores),
        "weights": _table(decision.weights),
        "effective_replicas": _row(effective_replicas(decision.weights)),
        "clip": _row(report.clip),
        "update_norm": _row(report.update_norm),
        "rollback": decision.rollback.tolist(),
        "inner_steps": list(report.inner_steps),
        "samples": list(report.samples),
        "wire_bytes": report.wire_bytes,
        "state_bytes": report.state_bytes,
        "seconds": {name: round(value, 6) for name, value in report.seconds.items()},
    }


def digest_line(report: SyncReport) -> dict[str, Any]:
    """The line that `replica-<r>.jsonl` gets at a sync."""
    digest = None if report.digest is None else as_hex(report.digest)
    return {"round": report.round, "digest": digest}


def sync_summary(report: SyncReport) -> str:
    """One console line per sync, in the style of Megatron's own."""
    decision = report.decision
    left_out = int(decision.verdict.anomalous.sum())
    effective = effective_replicas(decision.weights).median().item()
    clipped = report.clip.nan_to_num(1.0).median().item()
    parts = [
        f"sync {report.round} after iteration {report.step}",
        f"effective replicas: {effective:.2f} of {decision.weights.shape[0]}",
        f"left out: {left_out} of {decision.weights.numel()}",
        f"clip: {clipped:.2f}",
        f"sent: {report.wire_bytes / 1e6:.2f} MB per replica",
        f"wait (ms): {report.seconds['wait'] * 1e3:.1f}",
        f"exposed (ms): {report.seconds['exposed'] * 1e3:.1f}",
        f"total (ms): {report.seconds['total'] * 1e3:.1f}",
    ]
    if bool(decision.rollback.any()):
        parts.insert(2, f"rolled back: {int(decision.rollback.sum())} units")
    return " | ".join(parts)


def loss_rejections(report: SyncReport) -> list[str]:
    """One console line for each replica that the loss check left out."""
    loss = report.decision.loss
    lines = []
    for replica in loss.rejected.nonzero().flatten().tolist():
        others = [f"{x:.4g}" for r, x in enumerate(loss.losses.tolist()) if r != replica]
        shown = ", ".join(others[:FEW_REPLICAS]) + (", ..." if len(others) > FEW_REPLICAS else "")
        lines.append(
            f"sync {report.round} after iteration {report.step}: replica {replica} is left out "
            f"because of its loss {loss.losses[replica]:.4g}, {loss.scores[replica]:.1f} standard "
            f"deviations above its history (the others: {shown or 'none'}); look at its data"
        )
    return lines


def _table(values: Tensor) -> list[list[Any]]:
    return [_row(row) for row in values.t()]


def _row(values: Tensor) -> list[Any]:
    return [number(value) for value in values.tolist()]
