"""Formatting of a sync's report for event files and the console.

The fields of `sync.jsonl` are read by `records.SyncRecord`. Fields may be added, never renamed.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from megatron_edit.constants import FEW_REPLICAS
from megatron_edit.engine import SyncReport
from megatron_edit.method.digest import as_hex
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.records import finite_or_none


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
