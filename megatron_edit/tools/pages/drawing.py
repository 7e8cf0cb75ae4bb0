"""Pictures: SVG for a page, in the colours of the page, and PNG for everything else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (  # told apart by people who see fewer colours, too (Okabe and Ito)
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F",
)  # fmt: skip
DARK_COLORS = (  # the same, where the page is dark
    "#4FA8E0", "#F0813A", "#2FC79B", "#E2A1C6", "#F2B632", "#8FD0F5", "#E8E8E8", "#C9A95A",
)  # fmt: skip
# As wide as a phone, so that the letters stay as large there as they are drawn.
SIZE_INCHES = (4.3, 3.5)
DOTS_PER_INCH = 240
SVG_INCHES = (4.3, 3.3)
# Colours that stand for those of the page: whoever draws with them never sees them.
INK, FAINT, PAPER = "#010203", "#040506", "#070809"
_OF_PAGE = {INK: "var(--ink)", FAINT: "var(--line)", PAPER: "var(--paper)"} | {
    color.lower(): f"var(--c{number})" for number, color in enumerate(COLORS)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters of the page, to be found and read aloud
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
    """A picture that is being made.

    Attributes:
        figure: of matplotlib.
        axes: its only axes.
        svg: the picture as an element of a page, when it is done.
    """

    figure: Figure
    axes: Axes
    svg: str = field(default="", init=False)


@contextmanager
def svg_drawing(name: str, *, height: float = SVG_INCHES[1]) -> Iterator[Drawing]:
    """Draw in the block; the picture is in `svg` after it.

    Args:
        name: of the picture, another one for each on a page: what is in it is named after it.
        height: in inches; a picture is as wide as a phone.
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
        drawing = Drawing(figure, axes)
        yield drawing
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    drawing.svg = _element(file.getvalue())


def _element(text: str) -> str:
    """The element of an SVG file: colours of the page, and no names but those that are used."""
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    used = set(re.findall(r'(?:#|url\(#)([\w-]+)["\)]', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    for color, of_page in _OF_PAGE.items():
        body = re.sub(rf"{color}\b", of_page, body, flags=re.IGNORECASE)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg {box[0]} aria-hidden="true">{body}'.strip()


def legend_below(axes: Axes) -> None:
    """What the lines are, below the axes: nothing lies on the data."""
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
    """Axes to draw on in the block; the picture is in the file `path` after it.

    It has a white ground of its own, for pages whose colours nobody knows.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"axes.xmargin": 0.0}):
        figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
        yield axes
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        legend_below(axes)
        figure.savefig(path, dpi=DOTS_PER_INCH)
        plt.close(figure)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours, `width` in all; fewer at the ends."""
    reach = width // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
