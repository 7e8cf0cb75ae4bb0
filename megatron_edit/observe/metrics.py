"""What is shown of a sync: its scalars, its line in event files, and its line on the console.

All is computed from the report of a sync, which every rank has: nothing is gathered, and there is
no work between syncs. Scalars go to TensorBoard and Weights & Biases; docs/monitoring.md has their
units and meanings. The fields of `sync.jsonl` are read by `records.SyncRecord`; fields may be
added, never renamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.special import entr

from megatron_edit.constants import FEW_REPLICAS, SYNC_TIMES
from megatron_edit.engine import SyncReport
from megatron_edit.method.digest import as_hex
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.records import finite_or_none

PREFIX = "edit/"
LOSS = "edit/lm-loss"


@dataclass
class SyncMetrics:
    """Computes scalars from the reports of syncs.

    Attributes:
        seq_length: tokens of a sample.
        inside_bytes: exchanged inside a replica in one inner step; None where not known.
        with_units: whether to include scalars of each unit, and of each replica, however many.
    """

    seq_length: int
    inside_bytes: float | None = None
    with_units: bool = False
    _last: tuple[float, int, dict[str, int]] | None = None

    def values(self, report: SyncReport, now: float | None = None) -> dict[str, float]:
        """Return the scalars of a sync, without those that are not finite or not known yet.

        Args:
            report: of the sync.
            now: seconds on a monotonic clock; None reads it.
        """
        now = time.monotonic() if now is None else now
        found, names = _overall_scalars(report), replica_names(report)
        if self.inside_bytes is not None:
            found["bytes-inside-replica"] = self.inside_bytes * report.inner_steps[0]
        if self.with_units or len(names) <= FEW_REPLICAS:
            for replica, name in enumerate(names):
                found |= _below(f"replica-{name}", _replica_scalars(report, replica))
        for index, unit in enumerate(report.units if self.with_units else ()):
            found |= _below(f"unit-{unit}", _unit_scalars(report, index))
        samples = dict(zip(names, report.samples, strict=True))
        if self._last is not None:
            found.update(self._speeds(report, samples, now))
        self._last = now, report.samples_of_all, samples
        return {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}

    def _speeds(
        self, report: SyncReport, samples: dict[str, int], now: float
    ) -> Iterator[tuple[str, float]]:
        """Return the speeds since the previous sync."""
        assert self._last is not None
        then, total, before = self._last
        seconds = now - then
        if seconds <= 0:
            return
        yield "tokens-per-second", (report.samples_of_all - total) * self.seq_length / seconds
        yield "exposed-share", report.seconds["exposed"] / seconds
        if self.with_units or len(samples) <= FEW_REPLICAS:
            for name, count in samples.items():
                if count >= before.get(name, count + 1):  # a replica that returns counts anew
                    speed = (count - before[name]) * self.seq_length / seconds
                    yield f"replica-{name}/tokens-per-second", speed


def _overall_scalars(report: SyncReport) -> dict[str, float]:
    decision = report.decision
    return {
        "round": report.round,
        "iteration": report.step,
        **_mean_and_max(decision.norms, "pseudo-gradient-norm"),
        **_mean_and_max(report.update_norm, "update-norm"),
        "z-score/max": largest_finite(decision.verdict.scores),
        "anomalies": int(decision.verdict.anomalous.sum()),
        "loss-z-score/max": largest_finite(decision.loss.scores),
        "loss-rejections": int(decision.loss.rejected.sum()),
        "rollbacks": int(decision.rollback.sum()),
        "weight/min": decision.weights.min().item(),
        "weight/max": decision.weights.max().item(),
        "weight-entropy": entr(decision.weights).sum(dim=0).mean().item(),
        **_mean_and_min(effective_replicas(decision.weights), "effective-replicas"),
        **_mean_and_min(report.clip, "clip-factor"),
        "inner-steps/min": min(report.inner_steps),
        "inner-steps/max": max(report.inner_steps),
        **{f"seconds/{name}": report.seconds[name] for name in SYNC_TIMES},
        "bytes-between-replicas": report.wire_bytes,
    }


def _replica_scalars(report: SyncReport, replica: int) -> dict[str, float]:
    decision = report.decision
    return {
        "pseudo-gradient-norm": finite_mean(decision.norms[replica]),
        "weight": decision.weights[replica].mean().item(),
        "anomalies": int(decision.verdict.anomalous[replica].sum()),
        "round-loss": decision.loss.losses[replica].item(),
        "loss-z-score": decision.loss.scores[replica].item(),
        "inner-steps": report.inner_steps[replica],
    }


def _unit_scalars(report: SyncReport, index: int) -> dict[str, float]:
    decision = report.decision
    return {
        "pseudo-gradient-norm": finite_mean(decision.norms[:, index]),
        "update-norm": report.update_norm[index].item(),
        "clip-factor": report.clip[index].item(),
        "effective-replicas": effective_replicas(decision.weights)[index].item(),
        "anomalies": int(decision.verdict.anomalous[:, index].sum()),
    }


def _below(prefix: str, scalars: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in scalars.items()}


def _mean_and_max(values: Tensor, name: str) -> dict[str, float]:
    """Return the mean of the finite values, and the largest."""
    return {f"{name}/mean": finite_mean(values), f"{name}/max": largest_finite(values)}


def _mean_and_min(values: Tensor, name: str) -> dict[str, float]:
    """Return the mean of the finite values, and the smallest."""
    return {f"{name}/mean": finite_mean(values), f"{name}/min": -largest_finite(-values)}


def finite_mean(values: Tensor) -> float:
    """Return the mean of the finite values; NaN without any."""
    return float(values[values.isfinite()].mean())


def largest_finite(values: Tensor) -> float:
    """Return the largest of the finite values; NaN without any."""
    known = values[values.isfinite()]
    return float(known.max()) if known.numel() else math.nan


# ---- lines of event files and of the console


def sync_line(report: SyncReport) -> dict[str, Any]:
    """Return a line of `sync.jsonl`. Tables are [unit][replica]."""
    decision = report.decision
    members = {} if report.epoch is None else {
        "epoch": report.epoch, "members": list(report.members),
        "samples_all": report.samples_of_all,
    }  # fmt: skip
    return members | {
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


def replica_names(report: SyncReport) -> list[str]:
    """Return the names of the replicas of a sync; without names, their numbers."""
    return list(report.members) or [str(number) for number in range(len(report.inner_steps))]


def digest_line(report: SyncReport) -> dict[str, Any]:
    """Return the line of `replica-<r>.jsonl` for a sync."""
    digest = None if report.digest is None else as_hex(report.digest)
    return {"round": report.round, "digest": digest}


def sync_summary(report: SyncReport) -> str:
    """Return the console line of a sync, in the style of Megatron's own."""
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
    """Return a console line for each replica that the loss check rejected."""
    loss, names, lines = report.decision.loss, replica_names(report), []
    for replica in loss.rejected.nonzero().flatten().tolist():
        others = [f"{x:.4g}" for r, x in enumerate(loss.losses.tolist()) if r != replica]
        shown = ", ".join(others[:FEW_REPLICAS]) + (", ..." if len(others) > FEW_REPLICAS else "")
        lines.append(
            f"sync {report.round} after iteration {report.step}: replica {names[replica]} is left "
            f"out because of its loss {loss.losses[replica]:.4g}, {loss.scores[replica]:.1f} "
            f"standard deviations above its history (the others: {shown or 'none'}); look at its "
            "data"
        )
    return lines


def _table(values: Tensor) -> list[list[Any]]:
    return [_row(row) for row in values.t()]


def _row(values: Tensor) -> list[Any]:
    return [finite_or_none(value) for value in values.tolist()]
