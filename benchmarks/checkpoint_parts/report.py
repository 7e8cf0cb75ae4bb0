"""The results of benchmarks/checkpoints.py for people: tables, the marks, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from overlap_parts.analysis import Spread

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
    tables = [_table(WEIGHT_HEADER, map(_weight, weights))]
    if timings:
        tables.append(_table(TIMING_HEADER, map(_timing, timings)))
        labels = [name for name in LABELS if any(name in timing.spans for timing in timings)]
        header = ("stall (ms) of the slowest rank", "mode", "saved", *labels)
        rows = ((*_names(t), *(_ms(t.spans.get(name)) for name in labels)) for t in timings)
        tables.append(_table(header, rows))
    if verdicts:
        tables.append("\n".join(_said(verdict) for verdict in verdicts))
    return "\n\n".join(tables)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _weight(weight: Weight) -> list[str]:
    return [
        weight.kind,
        weight.precision,
        "" if weight.kind in STOCK else str(weight.num_replicas),
        weight.position + (" (asked before)" if weight.is_asked_late else ""),
        *(f"{weight.parts[part]:.2f}" for part in PARTS),
        f"{weight.total.median:.2f}",
        f"{weight.limit:g}",
        f"{weight.of_stock.median:.3f}" if weight.of_stock else "",
    ]


def _timing(timing: Timing) -> list[str]:
    return [
        *_names(timing),
        str(timing.num_saves),
        *_all(timing.stall),
        *_all(timing.of_one),
        f"{timing.of_one_aside.median:.2f}" if timing.of_one_aside else "",
        *_all(timing.of_all),
        *_all(timing.loop),
        *_all(timing.loop_of_one),
        *_all(timing.loop_of_all),
        f"{timing.complete.median:.2f}",
        f"{timing.complete.max:.2f}",
        f"{timing.complete_of_one.median:.2f}" if timing.complete_of_one else "",
        _ms(timing.finalized.median) if timing.is_async else "",
    ]


def _names(timing: Timing) -> list[str]:
    return [timing.kind, "async" if timing.is_async else "sync", timing.position]


def _all(spread: Spread | None) -> list[str]:
    return [f"{x:.2f}" for x in (spread.min, spread.median, spread.max)] if spread else [""] * 3


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def _said(verdict: Verdict) -> str:
    return (
        f"- {verdict.text}: {verdict.value:.3f}, wanted <= {verdict.bound:g}: "
        f"{'pass' if verdict.passes else 'MISS'}"
    )


def draw(path: Path, weights: Sequence[Weight], timings: Sequence[Timing]) -> None:
    """Writes the picture: bytes by part, and stalls."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    _draw_weights(left, [w for w in weights if not w.is_asked_late])
    _draw_stalls(right, timings)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
    for number, is_async in enumerate((False, True)):
        found = {(t.kind, t.position): t.stall for t in timings if t.is_async == is_async}
        cases = [(x, s) for x, sort in enumerate(sorts) if (s := found.get(sort)) is not None]
        errors = [[s.median - s.min for _, s in cases], [s.max - s.median for _, s in cases]]
        shift = 0.2 if is_async else -0.2
        bars = axes.bar([x + shift for x, _ in cases], [s.median for _, s in cases], 0.38,
                        yerr=errors, capsize=3, label="--async-save" if number else "as ever"
                        )  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(sorts)), ["\n".join(sort) for sort in sorts])
    axes.set_ylabel("seconds of the rank that stalls longest")
    axes.set_title("Stall of training in a save: median, least and most")
    axes.grid(axis="y", alpha=0.3)
    if timings:
        axes.legend(fontsize=8)
