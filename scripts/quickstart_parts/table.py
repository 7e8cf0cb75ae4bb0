"""The table of the quickstart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_edit.tools.compare.readings import NUM_EXCLUDED_ITERATIONS, RunLog
from megatron_edit.tools.compare.traffic import Layout


@dataclass(frozen=True)
class Result:
    """The numbers of one run in the table.

    Attributes:
        name: of the run.
        validation_loss: of the last evaluation; nan if there was none.
        tokens_per_second: of all ranks together.
        bytes_total: payload between replicas in the run.
        bytes_per_step: the same per iteration.
        seconds: of the run, start-up included.
    """

    name: str
    validation_loss: float
    tokens_per_second: float
    bytes_total: float
    bytes_per_step: float
    seconds: float


def tokens_per_second(log: RunLog, seq_length: int) -> float:
    """Return tokens per second of all ranks, without the first iterations."""
    times = log.milliseconds()
    kept = {i: ms for i, ms in times.items() if i > NUM_EXCLUDED_ITERATIONS} or times
    seconds = sum(kept.values()) / 1e3
    return len(kept) * log.batch_size * seq_length / seconds if seconds else 0.0


def sync_bytes(layout: Layout, records: Sequence[Mapping[str, Any]]) -> float:
    """Return the bytes between replicas in the syncs of EDiT, from the lines of sync.jsonl.

    `wire_bytes` is what the ranks of replica 0 sent; all replicas send as much.
    """
    return float(layout.num_replicas * sum(record["wire_bytes"] for record in records))


def summarize(
    name: str, log: RunLog, *, seq_length: int, bytes_total: float, seconds: float
) -> Result:
    """Return the result of one run."""
    validation = log.validation()
    return Result(
        name=name,
        validation_loss=validation[max(validation)] if validation else math.nan,
        tokens_per_second=tokens_per_second(log, seq_length),
        bytes_total=bytes_total,
        bytes_per_step=bytes_total / max(1, log.last_iteration),
        seconds=seconds,
    )


def format_table(results: Sequence[Result]) -> str:
    """Return the comparison as text, one column per run."""
    rows = [
        ("", *(r.name for r in results)),
        ("validation loss", *(f"{r.validation_loss:.4f}" for r in results)),
        ("tokens/s", *(f"{r.tokens_per_second:,.0f}" for r in results)),
        ("MB between replicas, total", *(f"{r.bytes_total / 1e6:,.1f}" for r in results)),
        ("MB between replicas, per step", *(f"{r.bytes_per_step / 1e6:,.2f}" for r in results)),
        ("seconds, start-up included", *(f"{r.seconds:.0f}" for r in results)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
