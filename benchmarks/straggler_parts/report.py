"""The results of benchmarks/stragglers.py for people: a table, the targets, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from frame.page import cells, draw_bars, mark_line, middle, picture, table

from .analysis import Row, Verdict
from .kinds import A_EDIT, A_EDIT_BLOCKING, EDIT, IDEAL, STOCK

HEADER = (
    "stragglers", "training", "tokens/s", "of ideal: min", "median", "max", "x stock",
    "round (s)", "waited per round (ms): median", "max", "in slow steps: median", "max",
    "rest of a sync (ms)", "computing (ms / step)",
)  # fmt: skip
NAMES = {
    STOCK: "stock DistOpt",
    EDIT: "EDiT",
    A_EDIT: "A-EDiT",
    A_EDIT_BLOCKING: "A-EDiT, blocking",
}


def markdown(rows: Sequence[Row], verdicts: Sequence[Verdict], titles: Mapping[str, str]) -> str:
    """The table, medians where no more is said; then a line for each target."""
    lines = [table(HEADER, (_cells(row, titles) for row in rows))]
    if verdicts:
        lines.append("")
    return "\n".join(lines + [_said(verdict, titles) for verdict in verdicts])


def _cells(row: Row, titles: Mapping[str, str]) -> list[str]:
    upper = ("median", "max")
    return [
        titles[row.scenario],
        row.kind,
        middle(row.tokens_per_second, "{:.0f}"),
        *cells(row.of_ideal if row.kind != IDEAL else None, "{:.3f}"),
        middle(row.of_stock if row.kind != STOCK else None, "{:.2f}"),
        middle(row.round_seconds, "{:.2f}"),
        *cells(row.waited, "{:.0f}", 1e3, of=upper),
        *cells(row.waited_steps, "{:.2f}", of=upper),
        middle(row.synced, "{:.0f}", 1e3),
        middle(row.computed, "{:.1f}", 1e3),
    ]


def _said(verdict: Verdict, titles: Mapping[str, str]) -> str:
    target = verdict.target
    text = f"{titles[target.scenario]}, {target.kind}: {target.text}"
    return mark_line(text, verdict.value, target.bound, is_least=target.is_least)


def draw(path: Path, rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """Writes the picture: tokens/s as parts of the ideal, by scenario."""
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    series = {
        name: {row.scenario: row.of_ideal for row in rows if row.kind == kind}
        for kind, name in NAMES.items()
        if any(row.kind == kind for row in rows)
    }
    with picture(path, figsize=(8, 4.5)) as (_, axes):
        draw_bars(axes, scenarios, series)
        axes.axhline(1.0, color="black", linestyle="dashed", linewidth=1, label="nobody waits")
        axes.set_xticks(range(len(scenarios)), [titles[name] for name in scenarios])
        axes.set_ylabel("tokens/s, part of the ideal")
        axes.set_ylim(0, 1.15)
        axes.set_title("What slow replicas cost: median, least and most of the repeats")
        axes.legend(loc="lower left", ncols=4, fontsize=8)
