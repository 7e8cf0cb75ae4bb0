"""The results of benchmarks/overlap.py for people: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frame.gpt import link_name
from frame.page import cells, draw_bars, middle, picture, table

from megatron_edit.flags import flag

from .analysis import Row
from .kinds import IDEAL, STOCK, variants
from .rivals import RIVALS

CROWDED = 6  # kinds; of more, the picture has no room for numbers
HEADER = (
    "link", "link measured (Mbit/s)", "training", "ms / iteration", "tokens/s",
    "of ideal: min", "median", "max", "limit", "of limit: min", "median", "x stock",
    "exposed (ms / sync)", "of it waiting", "lost (ms / round)",
)  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """The table; medians where no more is said."""
    return table(HEADER, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    return [
        link_name(row.rate),
        middle(row.bandwidth, "{:.1f}", 1e-6),
        row.kind,
        middle(row.step_seconds, "{:.1f}", 1e3),
        middle(row.tokens_per_second, "{:.0f}"),
        *cells(row.of_ideal, "{:.3f}"),
        middle(row.limit if row.of_limit else None, "{:.3f}"),
        *cells(row.of_limit, "{:.3f}", of=("min", "median")),
        middle(row.of_stock, "{:.2f}"),
        middle(row.exposed, "{:.1f}", 1e3),
        middle(row.waited, "{:.1f}", 1e3),
        middle(row.lost, "{:.1f}", 1e3),
    ]


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Writes the picture: tokens/s as parts of the ideal, by link; the limit as a line."""
    links = list(dict.fromkeys(row.rate for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != IDEAL))
    kinds.sort(key=lambda kind: (kind == STOCK, kind in RIVALS))  # EDiT first
    is_crowded = len(kinds) > CROWDED
    with picture(path, figsize=(11, 5) if is_crowded else (8, 4.5)) as (figure, axes):
        from matplotlib import colormaps

        series = {
            _name(kind): {row.rate: row.of_ideal for row in rows if row.kind == kind}
            for kind in kinds
        }
        colors = colormaps["tab20" if is_crowded else "tab10"].colors  # type: ignore[attr-defined]
        draw_bars(axes, links, series, colors=colors, with_numbers=not is_crowded)
        limits = {row.rate: row.limit.median for row in rows if row.limit and row.of_limit}
        for number, (rate, limit) in enumerate(limits.items()):
            x = links.index(rate)
            label = "_nolegend_" if number else "limit of the exact method"
            axes.hlines(limit, x - 0.45, x + 0.45, colors="black", linestyles="dashed", label=label)
        axes.set_xticks(range(len(links)), [link_name(rate) for rate in links])
        axes.set_ylabel("tokens/s, part of the ideal (no exchange)")
        axes.set_xlabel("link between the hosts")
        axes.set_title("Speed by link: median, least and most of the repeats")
        if is_crowded:
            figure.legend(loc="outside right upper")
        else:
            axes.legend()


def _name(kind: str) -> str:
    """In the legend."""
    if kind == STOCK:
        return "stock DistOpt, overlapped"
    is_named = kind in RIVALS or flag("strategy") in variants(1).get(kind, ())
    return kind if is_named else f"EDiT, {kind}"
