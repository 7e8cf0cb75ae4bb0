"""Charts from data: lines, bands and bars over one axis, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_edit.observe.records import Array
from megatron_edit.tools.pages import Chart
from megatron_edit.tools.pages.drawing import (
    COLORS,
    INK,
    LINE_STYLES,
    MARKERS,
    MAX_STEPS,
    SVG_INCHES,
    smoothed,
    svg_drawing,
)
from megatron_edit.tools.pages.texts import number, percent, short_name, show_count, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FLAT_SHARE = 0.005  # a curve that varies by less looks flat on an axis from zero
MANY = 8  # more lines of one kind are drawn as a band
MAX_LABELS = 14
MAX_POINTS = 1000  # of a line or of bars; more could not be told apart
MIN_LIMITED = 50  # values, before high ones may be above the axis
WIDTH_SHARE = 25  # training losses are means over 1/25 of the longest training
SHOWN_SHARE = 0.9  # of the losses of several runs: the others may be above the axis
MAX_NAME_LETTERS, MAX_BAR_LETTERS = 40, 24
NUM_PLACES = 200  # points of a curve of speeds
LOGARITHMIC_FROM = 30  # times as much at the end: the smaller curve would look flat
TOKENS = "tokens of all replicas"
# Of the time of local steps: compute, and what exposed syncs consist of.
PARTS = {"compute": COLORS[0], "wait": COLORS[4], "exchange": COLORS[5], "outer": COLORS[2]}
PARTS_NOTE = (
    "Ideal: compute alone, without waits and exposed syncs. Measured by replica 0 (with a hub by "
    "the leader), without evaluations and saves."
)
Curve = tuple[Array, Array]  # places and values
EMPTY: Curve = (np.empty(0), np.empty(0))


class Line(NamedTuple):
    """A line, or markers; the style is that of matplotlib."""

    label: str
    x: Array
    y: Array
    style: dict[str, Any]


class Band(NamedTuple):
    """The area between two lines; with `is_bars` each value is as wide as the step between two."""

    label: str
    x: Array
    low: Array
    high: Array
    color: str
    is_bars: bool = False


@dataclass
class LineChart:
    """A chart of lines, bands and marks."""

    title: str
    x: str
    y: str
    lines: list[Line] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    # Vertical lines: places, label, style.
    marks: list[tuple[Sequence[float], str, dict[str, Any]]] = field(default_factory=list)
    bottom: float | None = None  # of the y axis
    share: float = 1.0  # of the lines' values that the y axis shows at least
    is_logarithmic: bool = False

    def add(self, label: str, x: Array, y: Array, color: str = INK, **style: Any) -> None:
        """Add a line; a short one has markers."""
        x, y = thinned(MAX_POINTS, x, y)
        markers = {"marker": "o", "markersize": 3.5} if x.size <= 12 else {}
        self.lines.append(Line(label, x, y, {"color": color} | markers | style))

    def add_each(self, labels: Sequence[str], curves: Sequence[Curve]) -> None:
        """Add a line for each replica, or a band from the lowest to the highest if there are many.

        Curves of replicas that come and go have no values where they are not there.
        """
        if len(curves) <= MANY:
            for index, (label, (x, y)) in enumerate(zip(labels, curves, strict=True)):
                color = COLORS[index % len(COLORS)]
                self.add(label if len(curves) > 1 else "", x, y, color, linewidth=1, alpha=0.8)
            return
        x = max((x for x, _ in curves), key=len)
        table = np.array([
            y if np.array_equal(x, own) else np.interp(x, own, y, left=math.nan, right=math.nan)
            for own, y in curves if own.size
        ])  # fmt: skip
        known = np.isfinite(table).any(axis=0)
        x, table = x[known], table[:, known]
        low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
        self.bands.append(Band("lowest to highest replica", x, low, high, COLORS[0]))
        self.add("median replica", x, np.nanmedian(table, axis=0), COLORS[0])

    @property
    def constant(self) -> float | None:
        """The only value of all lines and bars; None where there are several."""
        values = [each.y for each in self.lines] + [each.high for each in self.bands]
        found = np.concatenate([each[np.isfinite(each)] for each in values])
        is_flat = found.size > 1 and np.ptp(found) <= FLAT_SHARE * np.abs(found).max()
        return float(found[-1]) if is_flat else None

    def draw(self, text: str, note: str = "", png: Path | None = None) -> Chart:
        """Return the finished chart with its content in a sentence, and how to read it."""
        name = self.title.lower().replace(" ", "-")
        with svg_drawing(name, png=png) as drawing:
            axes = drawing.axes
            top = self._limit(axes)
            for band in self.bands:
                _draw_band(axes, band)
            for line in self.lines:
                shown = line.y <= top if line.style.get("linestyle") == "" else slice(None)
                axes.plot(line.x[shown], line.y[shown], label=line.label or None, **line.style)
            if self.is_logarithmic:
                axes.set_yscale("log")
                plain_logarithms(axes.yaxis, (1, 2, 5))
            self._set_x_axis(axes)
            axes.set_ylabel(self.y)
            axes.set_ylim(bottom=self.bottom)
        return Chart(self.title, drawing.svg, text, note)

    def _limit(self, axes: Axes) -> float:
        """Limit the y axis where rare high values would flatten the rest; return the highest."""
        values = np.concatenate([each.y[np.isfinite(each.y)] for each in self.lines] or [EMPTY[0]])
        if self.share == 1 or values.size < MIN_LIMITED:
            return math.inf
        low, usual, high = (float(np.quantile(values, each)) for each in (0, self.share, 1))
        if not high - low > 2 * (usual - low) > 0:
            return math.inf
        margin = 0.08 * (usual - low)
        axes.set_ylim(low - margin, usual + 3 * margin)
        return usual + 3 * margin

    def _set_x_axis(self, axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        first, last = axes.get_xlim()
        for places, label, style in self.marks:
            shown = [place for place in places if first < place < last]
            for index, place in enumerate(shown):
                axes.axvline(place, label=None if index else label, **{"linewidth": 1} | style)
        if last - first < 1:  # a single point
            first, last = first - 0.5, last + 0.5
        axes.set_xlim(first, last)
        axes.set_xlabel(self.x)
        if not self.x.endswith("of training"):
            axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS, integer=True, min_n_ticks=1))
        if self.x.endswith("of all replicas"):
            axes.xaxis.set_major_formatter(EngFormatter())


def thinned(most: int, *columns: Array) -> list[Array]:
    """Return at most about `most` rows of equally long columns: means of neighbouring rows."""
    every = columns[0].size // most + 1
    if every == 1:
        return list(columns)
    starts = np.arange(0, columns[0].size, every)
    lengths = np.diff(starts, append=columns[0].size)
    return [np.add.reduceat(column, starts) / lengths for column in columns]


def _draw_band(axes: Axes, band: Band) -> None:
    if band.is_bars:
        x, low, high = thinned(MAX_POINTS, band.x, band.low, band.high)
        style: dict[str, Any] = {"fill": True, "color": band.color, "label": band.label or None}
        axes.stairs(high, bar_edges(x), baseline=low, **style)
        return
    axes.fill_between(band.x, band.low, band.high, color=band.color, alpha=0.3, linewidth=0,
                      label=band.label)  # fmt: skip


def bar_edges(x: Array) -> Array:
    """Return the left edges of bars around places, and the right edge of the last one."""
    half = max(0.5, (x[-1] - x[0]) / max(1, x.size - 1) / 2)
    return np.concatenate([[x[0] - half], (x[1:] + x[:-1]) / 2, [x[-1] + half]])


def plain_logarithms(axis: Axis, steps: tuple[int, ...]) -> None:
    """Set ticks at `steps` times powers of ten, without exponents."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def heat_map(
    title: str, table: Array, rounds: Array, names: Sequence[str], label: str,
    crosses: Array | None = None, **look: Any,
) -> str:  # fmt: skip
    """Return the picture of a table with a row for each name and a column for each sync.

    Args:
        title, table: of the chart.
        rounds: numbers of the syncs.
        names: of the rows.
        label: of the colours.
        crosses: where this table is not 0, there is a cross.
        look: of matplotlib's image.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    height = float(np.clip(1.2 + 0.2 * len(table), SVG_INCHES[1], 1.3 * SVG_INCHES[1]))
    with svg_drawing(title.lower().replace(" ", "-"), height=height) as drawing:
        axes, edges = drawing.axes, bar_edges(rounds)
        axes.grid(visible=False)
        box = (edges[0], edges[-1], len(table) - 0.5, -0.5)
        every = math.ceil(len(names) / MAX_LABELS)
        axes.set_yticks(range(0, len(names), every), names[::every])
        axes.set_xlabel("sync")
        axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS, integer=True, min_n_ticks=1))
        image = axes.imshow(table, aspect="auto", extent=box, **look)
        if crosses is not None:
            rows, columns = np.nonzero(np.nan_to_num(crosses))
            axes.plot(rounds[columns], rows, "x", color=COLORS[1], markersize=4)
        bar = drawing.figure.colorbar(image, pad=0.02, aspect=30)
        bar.set_label(label)
        if isinstance(image.norm, LogNorm):
            low, high = image.get_clim()
            plain_logarithms(bar.ax.yaxis, (1, 2, 5) if high < 1000 * low else (1,))
    return drawing.svg


# ---- several runs


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The progress of a run. Tokens are those of all replicas together since the start."""

    name: str
    seconds: Curve = EMPTY  # of training by tokens, without start-up, evaluations and saves
    training: Curve = EMPTY  # losses by tokens
    validation: Curve = EMPTY
    sent: Curve = EMPTY  # bytes that one replica has sent to others, by tokens
    final_loss: float | None = None  # validation loss of the last evaluation
    speed: float | None = None  # tokens per second after the warm-up
    local: Sequence[float] | Array = (0, 0)  # tokens at which local steps begin and end
    exposed: Sequence[float] | Array = ()  # seconds of the syncs there: wait, exchange, outer

    def seconds_at(self, tokens: Array) -> Array:
        """Return seconds of training; NaN where no step has been timed."""
        if not self.seconds[0].size:
            return np.full_like(tokens, math.nan)
        return np.interp(tokens, *self.seconds)

    @property
    def parts(self) -> Array:
        """The shares of `PARTS` in the time of local steps; empty where there are no syncs."""
        compute = np.ptp(self.seconds_at(np.array(self.local, float))) - sum(self.exposed)
        parts = np.array([compute, *self.exposed])
        return parts / parts.sum() if sum(self.exposed) and compute > 0 else EMPTY[0]

    def speeds(self, width: float) -> Curve:
        """Return tokens per second, means over `width` tokens or less."""
        tokens = self.seconds[0]
        if tokens.size < 2:
            return EMPTY
        places = np.linspace(tokens[0], tokens[-1], NUM_PLACES)
        half = max(width, float(np.ptp(tokens)) / NUM_PLACES) / 2
        first, last = np.maximum(tokens[0], places - half), np.minimum(tokens[-1], places + half)
        lengths = self.seconds_at(last) - self.seconds_at(first)
        known = lengths > 0
        return places[known], (last - first)[known] / lengths[known]


def smoothing_tokens(runs: Sequence[RunCurves]) -> float:
    """Return the tokens over which each training loss is averaged, in all runs."""
    return max((float(np.max(run.training[0], initial=0)) for run in runs), default=0) / WIDTH_SHARE


def compare_charts(runs: Sequence[RunCurves], folder: Path | None = None) -> dict[str, Chart]:
    """Return charts of losses, speed and bytes, by short names, as far as there are data.

    Args:
        runs: a line of each.
        folder: for the charts as PNG files, `compare-<name>.png`; None writes none.
    """
    width = smoothing_tokens(runs)
    longest = max((float(np.max(run.seconds[1], initial=0)) for run in runs), default=0)
    scale, unit = time_unit(longest)
    losses = {run.name: run.final_loss for run in runs
              if run.final_loss is not None and math.isfinite(run.final_loss)}  # fmt: skip
    speeds = {run.name: run.speed for run in runs if run.speed is not None}
    text = "Losses of all runs."
    if losses:
        best = min(losses, key=losses.__getitem__)
        text = f"The lowest validation loss at the end is {losses[best]:.4f}, of {best}."
    speed_text = "Tokens per second of all replicas together."
    if speeds:
        best = max(speeds, key=speeds.__getitem__)
        speed_text = f"Fastest after the warm-up: {best}, {number(speeds[best], ',.0f')} tokens/s."
    charts = {
        "tokens": (_losses("Loss by tokens", runs, width), text,
                   f"Lines: training, each point a mean over {show_count(width)} tokens. "
                   "Markers: validation."),
        "time": (_losses("Loss by time", runs, width, scale, unit), "The same losses by time.",
                 "Without start-up, evaluations and saves."),
        "speed": (_lines("Speed", "thousand tokens/s", runs, [run.speeds(width) for run in runs],
                         1e-3), speed_text, "With waits and syncs."),
        "bytes": (_lines("Bytes between replicas", "MB sent by one replica", runs,
                         [run.sent for run in runs], 1e-6, drawstyle="steps-post"),
                  "Bytes that one replica has sent to others.", "Payload; 1 MB = 10^6 bytes."),
    }  # fmt: skip
    return {
        name: chart.draw(text, note, folder and folder / f"compare-{name}.png")
        for name, (chart, text, note) in charts.items()
        if any(np.isfinite(line.x).any() for line in chart.lines)
    } | part_chart(runs, folder)


def part_chart(runs: Sequence[RunCurves], folder: Path | None = None) -> dict[str, Chart]:
    """Return a chart of the time of local steps, with a bar for each run that has syncs.

    Args:
        runs: the name of a single one is not shown.
        folder: for the chart as a PNG file; None writes none.
    """
    found = {f"{run.name}: " if len(runs) > 1 else "": run.parts for run in runs if run.parts.size}
    if not found:
        return {}
    texts, left = [], np.zeros(len(found))
    png, height = folder and folder / "compare-parts.png", 2.0 + 0.4 * len(found)
    with svg_drawing("parts", height=height, png=png) as drawing:
        axes, rows = drawing.axes, range(len(found))
        for part, share in zip(PARTS, 100 * np.array([*found.values()]).T, strict=True):
            axes.barh(rows, share, 0.5, left, color=PARTS[part], label=part)
            left = left + share
        for row, (name, (compute, *others)) in enumerate(found.items()):
            ideal = f"{percent(compute)} of the ideal"
            axes.text(0, row - 0.32, short_name(name, MAX_BAR_LETTERS) + ideal)
            shown = zip(("wait", "exchange", "outer step"), map(percent, others), strict=True)
            texts.append(f"{name}{ideal} ({', '.join(map(' '.join, shown))})")
        axes.set(xlabel="% of the time", yticks=(), ylim=(len(found) - 0.65, -0.65))
    text = f"Time of local steps: {'; '.join(texts)}."
    return {"parts": Chart("Compute, wait, exchange", drawing.svg, text, PARTS_NOTE)}


def _losses(
    title: str, runs: Sequence[RunCurves], width: float, scale: float = 0, unit: str = ""
) -> LineChart:
    """Return the losses of all runs by tokens, or by time in units of `scale` seconds."""
    x = f"{unit} of training" if unit else TOKENS
    chart = LineChart(title, x, "loss (nats per token)", share=SHOWN_SHARE)
    for index, run in enumerate(runs):
        color, mark = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        training, validation = smoothed(*run.training, width), run.validation
        if scale:
            training, validation = (
                (run.seconds_at(tokens) / scale, loss) for tokens, loss in (training, validation)
            )
        has_marks = bool(validation[0].size)
        label = short_name(run.name, MAX_NAME_LETTERS)
        chart.add("" if has_marks else label, *training, color, alpha=0.7, linewidth=1.2)
        if has_marks:
            chart.add(label, *validation, color, linestyle="", marker=mark, markersize=5, zorder=3,
                      clip_on=False)  # fmt: skip
    return chart


def _lines(
    title: str, y: str, runs: Sequence[RunCurves], curves: Sequence[Curve], scale: float,
    drawstyle: str = "default",
) -> LineChart:  # fmt: skip
    """Return a line for each run."""
    chart = LineChart(title, TOKENS, y, bottom=0)
    for index, (run, (tokens, values)) in enumerate(zip(runs, curves, strict=True)):
        style = LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)]
        label, color = short_name(run.name, MAX_NAME_LETTERS), COLORS[index % len(COLORS)]
        if tokens.size:
            chart.add(label, tokens, values * scale, color, linestyle=style, drawstyle=drawstyle)
    totals = [line.y[-1] for line in chart.lines if line.y[-1] > 0]
    if totals and max(totals) > LOGARITHMIC_FROM * min(totals):
        chart.is_logarithmic, chart.bottom = True, None
    return chart
