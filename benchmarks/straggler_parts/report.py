"""The results of benchmarks/stragglers.py for people: a table, the targets, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from overlap_parts.analysis import Spread

from .analysis import Row, Verdict
from .kinds import A_EDIT, EDIT, IDEAL, STOCK

HEADER = (
    "stragglers", "training", "tokens/s", "of ideal: min", "median", "max", "x stock",
    "round (s)", "waited per round (ms): median", "max", "in slow steps: median", "max",
    "rest of a sync (ms)", "computing (ms / step)",
)  # fmt: skip
NAMES = {STOCK: "stock DistOpt", EDIT: "EDiT", A_EDIT: "A-EDiT"}


def markdown(rows: Sequence[Row], verdicts: Sequence[Verdict], titles: Mapping[str, str]) -> str:
    """The table, medians where no more is said; then a line for each target."""
    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    for row in rows:
        cells = [
            titles[row.scenario],
            row.kind,
            _middle(row.tokens_per_second, "{:.0f}"),
            *(_all(row.of_ideal) if row.kind != IDEAL else [""] * 3),
            _middle(row.of_stock if row.kind != STOCK else None, "{:.2f}"),
            _middle(row.round_seconds, "{:.2f}"),
            *_upper(row.waited, "{:.0f}", 1e3),
            *_upper(row.waited_steps, "{:.2f}"),
            _middle(row.synced, "{:.0f}", 1e3),
            _middle(row.computed, "{:.1f}", 1e3),
        ]
        lines.append(_line(cells))
    if verdicts:
        lines.append("")
    return "\n".join(lines + [_said(verdict, titles) for verdict in verdicts])


def _said(verdict: Verdict, titles: Mapping[str, str]) -> str:
    target = verdict.target
    return (
        f"- {titles[target.scenario]}, {target.kind}: {target.text} {verdict.value:.3f}, "
        f"wanted {'>=' if target.is_least else '<='} {target.bound:g}: "
        f"{'pass' if verdict.passes else 'MISS'}"
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _middle(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    return form.format(spread.median * factor) if spread else ""


def _upper(spread: Spread | None, form: str, factor: float = 1.0) -> list[str]:
    return [form.format(x * factor) for x in (spread.median, spread.max)] if spread else ["", ""]


def _all(spread: Spread | None) -> list[str]:
    return [f"{x:.3f}" for x in (spread.min, spread.median, spread.max)] if spread else [""] * 3


def draw(path: Path, rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """Writes the picture: tokens/s as parts of the ideal, by scenario."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    kinds = [kind for kind in NAMES if any(row.kind == kind for row in rows)]
    width = 0.8 / max(1, len(kinds))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, kind in enumerate(kinds):
        found = {row.scenario: row.of_ideal for row in rows if row.kind == kind}
        cases = [(x, s) for x, name in enumerate(scenarios) if (s := found.get(name)) is not None]
        shift = (number - (len(kinds) - 1) / 2) * width
        middles = [s.median for _, s in cases]
        errors = [[s.median - s.min for _, s in cases], [s.max - s.median for _, s in cases]]
        bars = axes.bar([x + shift for x, _ in cases], middles, width * 0.95, yerr=errors,
                        capsize=3, label=NAMES[kind])  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linestyle="dashed", linewidth=1, label="nobody waits")
    axes.set_xticks(range(len(scenarios)), [titles[name] for name in scenarios])
    axes.set_ylabel("tokens/s, part of the ideal")
    axes.set_ylim(0, 1.15)
    axes.set_title("What slow replicas cost: median, least and most of the repeats")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower left", ncols=4, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
