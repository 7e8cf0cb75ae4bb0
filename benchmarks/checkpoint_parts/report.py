"""The results of benchmarks/checkpoints.py for people: tables, the marks, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frame.page import cells, draw_bars, mark_line, middle, picture, table

from .analysis import Timing, Verdict, Weight
from .kinds import BF16, STOCK
from .readings import PARTS

WEIGHT_HEADER = (
    "bytes per parameter", "precision", "N", "saved", *PARTS, "all", "limit", "x stock",
)  # fmt: skip
TIMING_HEADER = (
    "save", "mode", "saved", "number", "stall (s): min", "median", "max", "x stock-one: min",
    "median", "max", "landing aside", "x stock-all: min", "median", "max",
    "costs the loop (s): min", "median", "max", "x stock-one: min", "median", "max",
    "x stock-all: min", "median", "max",
    "complete (s): median", "max",
    "x stock-one", "later in the loop (ms)",
)  # fmt: skip
LABELS = (
    "gather parameters", "settle", "previous", "write outer", "copy outer", "hand over outer",
    "state dict", "write", "copy", "hand over", "barrier", "rest",
)  # fmt: skip


def markdown(
    weights: Sequence[Weight], timings: Sequence[Timing], verdicts: Sequence[Verdict]
) -> str:
    """Bytes; times; where the stalls went, in medians; then a line for each mark."""
    tables = [table(WEIGHT_HEADER, map(_weight, weights))]
    if timings:
        tables.append(table(TIMING_HEADER, map(_timing, timings)))
        labels = [name for name in LABELS if any(name in timing.spans for timing in timings)]
        header = ("stall (ms) of the slowest rank", "mode", "saved", *labels)
        rows = ((*_names(t), *(_ms(t.spans.get(name)) for name in labels)) for t in timings)
        tables.append(table(header, rows))
    if verdicts:
        tables.append("\n".join(_said(verdict) for verdict in verdicts))
    return "\n\n".join(tables)


def _weight(weight: Weight) -> list[str]:
    return [
        weight.kind,
        weight.precision,
        "" if weight.kind in STOCK else str(weight.num_replicas),
        weight.position + (" (asked before)" if weight.is_asked_late else ""),
        *(f"{weight.parts[part]:.2f}" for part in PARTS),
        middle(weight.total, "{:.2f}"),
        f"{weight.limit:g}",
        middle(weight.of_stock, "{:.3f}"),
    ]


def _timing(timing: Timing) -> list[str]:
    return [
        *_names(timing),
        str(timing.num_saves),
        *cells(timing.stall, "{:.2f}"),
        *cells(timing.of_one, "{:.2f}"),
        middle(timing.of_one_aside, "{:.2f}"),
        *cells(timing.of_all, "{:.2f}"),
        *cells(timing.loop, "{:.2f}"),
        *cells(timing.loop_of_one, "{:.2f}"),
        *cells(timing.loop_of_all, "{:.2f}"),
        *cells(timing.complete, "{:.2f}", of=("median", "max")),
        middle(timing.complete_of_one, "{:.2f}"),
        _ms(timing.finalized.median) if timing.is_async else "",
    ]


def _names(timing: Timing) -> list[str]:
    return [timing.kind, "async" if timing.is_async else "sync", timing.position]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def _said(verdict: Verdict) -> str:
    return mark_line(verdict.text + ":", verdict.value, verdict.bound)


def draw(path: Path, weights: Sequence[Weight], timings: Sequence[Timing]) -> None:
    """Writes the picture: bytes by part, and stalls."""
    with picture(path, ncols=2, figsize=(13, 5.5)) as (_, (left, right)):
        _draw_weights(left, [w for w in weights if not w.is_asked_late])
        _draw_stalls(right, timings)


def _draw_weights(axes: Any, weights: Sequence[Weight]) -> None:
    weights = sorted(weights, key=lambda w: w.precision != BF16)
    names = [
        f"{w.kind}{'' if w.kind in STOCK else f', N={w.num_replicas}'} {w.precision}"
        + (f"\n{w.position}" if w.position else "")
        for w in weights
    ]
    places = range(len(weights))
    start = [0.0] * len(weights)
    for part in PARTS:
        values = [w.parts[part] for w in weights]
        axes.barh(places, values, left=start, label=part)
        start = [a + b for a, b in zip(start, values, strict=True)]
    for place, (weight, end) in enumerate(zip(weights, start, strict=True)):
        ratio = f" {weight.of_stock.median:.2f} x" if weight.of_stock else ""
        axes.text(end, place, ratio, va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(start, default=1.0))
    axes.set_xlabel("bytes per parameter; x stock in the same precision")
    axes.set_title("One checkpoint on the disk")
    axes.legend(fontsize=8)


def _draw_stalls(axes: Any, timings: Sequence[Timing]) -> None:
    sorts = list(dict.fromkeys((t.kind, t.position) for t in timings))
    series = {
        label: {(t.kind, t.position): t.stall for t in timings if t.is_async == is_async}
        for label, is_async in (("as ever", False), ("--async-save", True))
    }
    draw_bars(axes, sorts, series)
    axes.set_xticks(range(len(sorts)), ["\n".join(sort) for sort in sorts])
    axes.set_ylabel("seconds of the rank that stalls longest")
    axes.set_title("Stall of training in a save: median, least and most")
    if timings:
        axes.legend(fontsize=8)
