"""Charts as SVG in the colours of the page, and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (  # safe for colour blindness (Okabe and Ito)
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F",
)  # fmt: skip
DARK_COLORS = (  # the same for dark pages
    "#4FA8E0", "#F0813A", "#2FC79B", "#E2A1C6", "#F2B632", "#8FD0F5", "#E8E8E8", "#C9A95A",
)  # fmt: skip
# As wide as a phone, so that text is not scaled down there.
SIZE_INCHES = (4.3, 3.5)
DOTS_PER_INCH = 240
SVG_INCHES = (4.3, 3.3)
MAX_STEPS = 6  # between ticks of the x axis, whose labels would run together if there were more
# Placeholders, replaced by the colours of the page in the SVG.
INK, FAINT, PAPER = "#010203", "#040506", "#070809"
_PAGE_COLORS = {INK: "var(--ink)", FAINT: "var(--line)", PAPER: "var(--paper)"} | {
    color.lower(): f"var(--c{number})" for number, color in enumerate(COLORS)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # as text, for search and screen readers
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": FAINT, "legend.edgecolor": FAINT, "legend.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "axes.xmargin": 0.0,
    "legend.fontsize": 9.0, "legend.framealpha": 0.85, "axes.formatter.limits": (-4, 5),
    "axes.formatter.use_mathtext": False, "lines.linewidth": 1.4,
}  # fmt: skip


@dataclass
class Drawing:
    """A chart under construction.

    Attributes:
        figure: of matplotlib.
        axes: the only axes of the figure.
        svg: the finished chart as an HTML element; empty before.
    """

    figure: Figure
    axes: Axes
    svg: str = field(default="", init=False)


@contextmanager
def svg_drawing(name: str, *, height: float = SVG_INCHES[1]) -> Iterator[Drawing]:
    """Draw in the block; afterwards `svg` holds the chart.

    Args:
        name: unique on the page, as the ids inside the SVG are derived from it.
        height: in inches; the width is that of a phone.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(SVG_INCHES[0], height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        _space_ticks(axes)
        drawing = Drawing(figure, axes)
        yield drawing
        _mark_single_points(axes)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    drawing.svg = _svg_element(file.getvalue())


def _space_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS))


def _mark_single_points(axes: Axes) -> None:
    """Mark the points of lines that have no two neighbours, and would be invisible."""
    for line in axes.get_lines():
        known = np.isfinite(np.asarray(line.get_xydata(), dtype=float)).all(axis=1)
        if line.get_marker() == "None" and not (known[1:] & known[:-1]).any():
            line.set(marker="o", markersize=3.5, clip_on=False)


def show_tokens(axes: Axes) -> None:
    """Name the x axis, whose values are tokens of all replicas, and shorten its numbers."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens of all replicas")
    axes.xaxis.set_major_formatter(EngFormatter())


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
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg {box[0]} aria-hidden="true">{body}'.strip()


def legend_below(axes: Axes) -> None:
    """Put the legend below the axes, so that it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    longest = max(map(len, labels))
    columns = 4 if longest <= 9 else 3 if longest <= 16 else 2 if longest <= 28 else 1
    axes.figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)),
        columnspacing=0.8, handlelength=1.2, frameon=False,
    )  # fmt: skip


@contextmanager
def png_axes(path: Path, title: str) -> Iterator[Axes]:
    """Draw on the axes in the block; afterwards the file `path` holds the chart.

    The background is white, for pages of unknown colours.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"axes.xmargin": 0.0}):
        figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
        _space_ticks(axes)
        yield axes
        _mark_single_points(axes)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        legend_below(axes)
        figure.savefig(path, dpi=DOTS_PER_INCH)
        plt.close(figure)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return means of `width` neighbouring values around each value; fewer at the ends."""
    reach = width // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
