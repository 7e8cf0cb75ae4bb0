"""Charts as SVG in the colours of the page, and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_edit.observe.records import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (  # safe for colour blindness (Okabe and Ito)
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F",
)  # fmt: skip
DARK_COLORS = (  # the same for dark pages
    "#4FA8E0", "#F0813A", "#2FC79B", "#E2A1C6", "#F2B632", "#8FD0F5", "#E8E8E8", "#C9A95A",
)  # fmt: skip
LINE_STYLES = ("-", "--", ":", "-.")  # one after the other where there are more lines than colours
MARKERS = "osD^vPX*<>hd"
SVG_INCHES = (4.3, 3.1)  # as wide as a phone, so that text is not scaled down there
DOTS_PER_INCH = 240
MAX_STEPS = 6  # between ticks of the x axis, whose labels would run together if there were more
NUM_PLACES = 400  # points of a smoothed curve
# Colours in PNG files; in SVG they are replaced by those of the page.
INK, FAINT, PAPER = "#1b1b1c", "#dcdcdd", "#fefeff"
_PAGE_COLORS = {INK: "var(--ink)", FAINT: "var(--line)", PAPER: "var(--paper)"} | {
    color.lower(): f"var(--c{number})" for number, color in enumerate(COLORS)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # as text, for search and screen readers
    "font.family": "sans-serif", "font.size": 10,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": FAINT, "legend.edgecolor": FAINT, "legend.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.0,
    "ytick.major.size": 0, "grid.linewidth": 0.7,
    "legend.fontsize": 9.5, "legend.framealpha": 0.85, "axes.formatter.limits": (-4, 5),
    "axes.formatter.use_mathtext": False, "lines.linewidth": 1.5,
}  # fmt: skip


@dataclass
class Drawing:
    """A chart under construction; `svg` is empty until it is finished."""

    figure: Figure
    axes: Axes
    svg: str = field(default="", init=False)


@contextmanager
def svg_drawing(
    name: str, *, height: float = SVG_INCHES[1], png: Path | None = None
) -> Iterator[Drawing]:
    """Draw in the block; afterwards `svg` holds the chart, with a legend below the axes.

    Args:
        name: unique on the page, as the ids inside the SVG are derived from it.
        height: in inches; the width is that of a phone.
        png: a file for the same chart on white.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(SVG_INCHES[0], height), layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS))
        drawing = Drawing(figure, axes)
        yield drawing
        _mark_single_points(axes)
        _add_legend(axes)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
        if png is not None:
            figure.patch.set_visible(True)
            figure.savefig(png, dpi=DOTS_PER_INCH, facecolor="white")
    drawing.svg = _svg_element(file.getvalue())


def _mark_single_points(axes: Axes) -> None:
    """Mark the points of lines that have no two neighbours, and would be invisible."""
    for line in axes.get_lines():
        known = np.isfinite(np.asarray(line.get_xydata(), dtype=float)).all(axis=1)
        is_visible = (known[1:] & known[:-1]).any() or not known.any()
        if line.get_marker() == "None" and not is_visible:
            line.set(marker="o", markersize=3.5, clip_on=False)


def _add_legend(axes: Axes) -> None:
    """Put a legend below the axes, so that it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    longest = max(map(len, labels))
    columns = 4 if longest <= 9 else 3 if longest <= 16 else 2 if longest <= 28 else 1
    axes.figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)),
        columnspacing=0.8, handlelength=1.2, frameon=False,
    )  # fmt: skip


def _svg_element(text: str) -> str:
    """Return the element of an SVG file with the colours of the page and without unused ids."""
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    used = set(re.findall(r'(?:#|url\(#)([\w-]+)["\)]', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    for color, page_color in _PAGE_COLORS.items():
        body = re.sub(rf"{color}\b", page_color, body, flags=re.IGNORECASE)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg {box[0]} aria-hidden="true">{body}'.strip()


def smoothed(ends: Array, losses: Array, width: float) -> tuple[Array, Array]:
    """Smooth training losses with a moving mean over `width`; return places and losses.

    A loss counts for all tokens since the previous one, so that one loss per step and one per round
    give the same curve.
    """
    known = np.isfinite(losses)
    ends, losses = ends[known], losses[known]
    if ends.size < 2:
        return ends, losses
    edges = np.concatenate([[max(0.0, 2 * ends[0] - ends[1])], ends])
    sums = np.concatenate([[0.0], np.cumsum(losses * np.diff(edges))])
    places = np.linspace(edges[0], edges[-1], NUM_PLACES)
    half = max(width, (edges[-1] - edges[0]) / NUM_PLACES) / 2
    first, last = np.maximum(edges[0], places - half), np.minimum(edges[-1], places + half)
    return places, (np.interp(last, edges, sums) - np.interp(first, edges, sums)) / (last - first)
