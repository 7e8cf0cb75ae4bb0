"""The picture of benchmarks/gains.py: speed, time to a loss, and loss, by link and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from frame.gpt import link_name
from frame.page import Spread

from .kinds import DILOCO, EDIT, IDEAL, PAPER, STOCK, TORCHFT

# By kind: label, color (of a palette for the color-blind), marker.
STYLES = {
    EDIT: ("EDiT, automatic", "#0072b2", "o"),
    PAPER: ("EDiT, the paper's settings", "#56b4e9", "s"),
    DILOCO: ("DiLoCo", "#cc79a7", "^"),
    TORCHFT: ("torchft, streaming DiLoCo", "#d55e00", "D"),
    STOCK: ("stock Megatron", "#555555", "X"),
}
WIDTH, HEIGHT, DPI = 10.0, 6.4, 150  # inches; about 1.5 pixels each at the width of a page


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the results of a study, on white, so that dark pages show them as well."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    rows, sizes = results["summary"], results["configuration"]
    figure = plt.figure(figsize=(WIDTH, HEIGHT), facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.35, 1))
    speed = figure.add_subplot(grid[0, 0])
    seconds = figure.add_subplot(grid[1, 0], sharex=speed)
    loss = figure.add_subplot(grid[:, 1])
    figure.suptitle(
        f"{sizes['hosts']} replicas over slow links: 1.1 million parameters, "
        f"{sizes['iterations']} steps of {sizes['samples']} samples each, CPU and gloo",
        fontsize=12,
    )
    _draw_by_link(speed, rows, "of_ideal")
    speed.set_ylim(0, 1.1)
    speed.axhline(1, color="black", linewidth=0.8, linestyle=":")
    speed.set_title("speed of local steps, as a share of training without exchange", fontsize=10)
    _draw_by_link(seconds, rows, "seconds_to_loss")
    seconds.set_yscale("log")
    seconds.yaxis.set_major_formatter("{x:g}")
    seconds.set_title("seconds to the final loss of the worst training", fontsize=10)
    seconds.set_xlabel("link between the replicas")
    _draw_losses(loss, rows)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9,
                  frameon=False)  # fmt: skip
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _draw_by_link(axes: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Draw a line for each kind: median, least and most of a list at each link."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    for kind, (label, color, marker) in STYLES.items():
        found = {row["rate"]: Spread.of(row[name]) for row in rows if row["kind"] == kind}
        spreads = {rates.index(rate): spread for rate, spread in found.items() if spread}
        if not spreads:
            continue
        middle = [each.median for each in spreads.values()]
        below = [each.median - each.min for each in spreads.values()]
        above = [each.max - each.median for each in spreads.values()]
        axes.errorbar(list(spreads), middle, (below, above), label=label, color=color,
                      marker=marker, markersize=5, capsize=3, linewidth=1.6)  # fmt: skip
    axes.set_xticks(range(len(rates)), [link_name(rate) for rate in rates])
    axes.grid(alpha=0.3)


def _draw_losses(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar for each kind, and for each link where the settings depend on it."""
    bars = list[tuple[str, str, Sequence[float]]]()
    for kind, (label, color, _) in STYLES.items():
        own = [row for row in rows if row["kind"] == kind and row["above_stock"]]
        if kind in (STOCK, IDEAL) or not own:
            continue
        for row in own if kind == EDIT else own[:1]:
            text = label.replace(", ", ",\n")
            if kind == EDIT:
                text = f"{label},\n{link_name(row['rate'])}"
            bars.append((text, color, row["above_stock"]))
    percents = [[100 * each for each in losses] for _, _, losses in bars]
    means = [fmean(each) for each in percents]
    axes.barh(range(len(bars)), means, color=[color for _, color, _ in bars])
    for place, each in enumerate(percents):
        axes.plot(each, [place] * len(each), ".", color="black", markersize=5)
        axes.text(max([0.0, *each]), place, f"  {means[place]:+.2f} %", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlim(right=1.35 * max([1.0, *(max(each) for each in percents)]))
    axes.set_title("final validation loss over stock Megatron's (%);\na dot is a seed", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
