"""The table of several runs: a column for each run, a line for each quantity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.tools.monitor.findings import LEVELS, list_findings
from megatron_edit.tools.pages.tables import Column
from megatron_edit.tools.pages.texts import UNKNOWN, duration, megabytes, number, percent
from megatron_edit.tools.side_by_side.progress import RunCurves

SHOWN_LEVELS = LEVELS[:2]  # errors and warnings


@dataclass(frozen=True, eq=False)
class ResultRow:
    """One run.

    Attributes:
        progress: of the run.
        base: final validation loss of the first run; None for that run, or where not known.
        width: tokens over which training losses are averaged.
    """

    progress: RunCurves
    base: float | None
    width: float


def _strategy(row: ResultRow) -> str:
    facts = row.progress.run.facts
    assert facts is not None
    return facts.strategy.name


def _tokens(row: ResultRow) -> str:
    tokens, run = row.progress.tokens, row.progress.run
    shown = UNKNOWN if tokens is None else f"{tokens / 1e6:,.4g}"
    return f"{shown} ({percent(run.progress)})" if run.progress not in (None, 1.0) else shown


def _seconds(row: ResultRow) -> str:
    seconds = row.progress.seconds[1]
    return duration(float(seconds[-1])) if seconds.size else UNKNOWN


def _difference(row: ResultRow) -> str:
    loss = row.progress.final_loss
    return UNKNOWN if loss is None or row.base is None else f"{loss - row.base:+.4f}"


def _training_loss(row: ResultRow) -> str:
    losses = row.progress.smoothed(row.width)[1]
    return number(float(losses[-1]), ".4f") if losses.size else UNKNOWN


def _bytes(row: ResultRow) -> str:
    syncs = row.progress.run.syncs
    return f"{megabytes(syncs.sums['wire_bytes'])} in {syncs.count:,}" if syncs.count else UNKNOWN


def _rejected(row: ResultRow) -> str:
    syncs = row.progress.run.syncs
    if not syncs.count:
        return UNKNOWN
    left_out, rollbacks = int(syncs.sums["anomalies"]), int(syncs.sums["rollbacks"])
    back = f", {rollbacks:,} roll-back{'s' if rollbacks > 1 else ''}"
    return f"{left_out:,}{back if rollbacks else ''}"


def _findings(row: ResultRow) -> str:
    found = Counter(finding.level for finding in list_findings(row.progress.run))
    parts = [f"{found[level]} {level}{'s' if found[level] > 1 else ''}"
             for level in SHOWN_LEVELS if found[level]]  # fmt: skip
    return ", ".join(parts) or "none"


QUANTITIES: tuple[Column[ResultRow], ...] = (
    Column("strategy", "value of --edit-strategy", _strategy),
    Column("state", "as in the page of each run", lambda row: row.progress.run.state_text),
    Column("million tokens", "consumed by all replicas together, and the share of the training "
           "where it is not complete", _tokens),
    Column("time", "of training, without start-up, evaluations and saves", _seconds),
    Column("validation loss", "nats per token, of the last evaluation",
           lambda row: number(row.progress.final_loss, ".4f")),
    Column("difference", "of that loss to the first run's", _difference),
    Column("training loss", "nats per token, at the end, smoothed like the curves",
           _training_loss),
    Column("tokens/s", "of all replicas together, after the warm-up, without start-up, "
           "evaluations and saves", lambda row: number(row.progress.speed, ",.0f")),
    Column("exposed", "share of the time between syncs in which training waited for a sync",
           lambda row: percent(row.progress.run.syncs.share("exposed"))),
    Column("waiting", "the part of it spent waiting for other replicas",
           lambda row: percent(row.progress.run.syncs.share("wait"))),
    Column("MB in syncs", "(10^6 bytes) payload sent by one replica in all syncs; steps that "
           "average gradients are not included", _bytes),
    Column("rejected updates", "units of replicas that were left out of a sync, and units that "
           "went back to their anchor", _rejected),
    Column("problems", "listed below the table", _findings),
)  # fmt: skip


def lines_of(runs: Sequence[RunCurves], width: float) -> list[list[str]]:
    """Return the lines of the table; losses are compared with those of the first run.

    Args:
        runs: all runs.
        width: tokens over which training losses are averaged.
    """
    first = runs[0].final_loss
    rows = [ResultRow(run, first if place else None, width) for place, run in enumerate(runs)]
    return [[each.title, *(each.cell(row) for row in rows)] for each in QUANTITIES]
