"""The plots of a comparison: loss by tokens, loss by time, bytes by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_edit.observe.records import Array
from megatron_edit.tools.compare.analysis import ComparisonResult, is_synchronous
from megatron_edit.tools.compare.readings import Point, Reading
from megatron_edit.tools.pages.drawing import (
    COLORS,
    legend_below,
    png_axes,
    show_tokens,
    svg_drawing,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_SHARE = 25  # training losses are means over 1/25 of the longest training
NUM_PLACES = 400  # points of a smoothed curve
MARKERS = "osD^vPX*<>hd"
SVG_HEIGHT = 3.6
Curve = tuple[Array, Array]  # places and values


class Picture(NamedTuple):
    """One plot.

    Attributes:
        title: of the plot.
        path: a PNG file.
        svg: the same as an SVG element, in the colours of the page.
    """

    title: str
    path: Path
    svg: str


def draw(folder: Path, outcome: ComparisonResult) -> list[Picture]:
    """Draw the plots, and write their files; none without readings.

    Args:
        folder: of the files `compare-<name>.png`.
        outcome: of the comparison; the curves are those of the first seed.
    """
    shown = _first_seeds(outcome)
    pictures = []
    for title, name, fill in (
        ("Loss by tokens", "tokens", _loss_by_tokens),
        ("Loss by time in training", "time", _loss_by_time),
        ("Bytes sent by one replica, by step", "bytes", _bytes_by_step),
    ):
        if not shown:
            break
        path = folder / f"compare-{name}.png"
        with png_axes(path, title) as axes:
            fill(axes, outcome, shown)
        with svg_drawing(f"compare-{name}", height=SVG_HEIGHT) as drawing:
            fill(drawing.axes, outcome, shown)
            legend_below(drawing.axes)
        pictures.append(Picture(title, path, drawing.svg))
    return pictures


def _first_seeds(outcome: ComparisonResult) -> dict[str, Reading]:
    """Return for each entry the reading of the first seed that has one."""
    found = {label: list(outcome.of_label(label).values()) for label in outcome.labels}
    return {label: readings[0] for label, readings in found.items() if readings}


def smoothing_tokens(outcome: ComparisonResult) -> float:
    """Return the tokens over which each training loss is averaged, for all curves."""
    lengths = [r.training[-1].tokens for r in outcome.readings.values() if r.training]
    return max(lengths, default=0.0) / WIDTH_SHARE


def smoothed(points: Sequence[Point], width: float) -> tuple[Array, Array]:
    """Smooth training losses with a moving mean; return tokens and losses, float64 [P].

    A loss counts for all tokens since the previous one, so that one loss per step and one per round
    give the same curve.

    Args:
        points: of the training.
        width: of the window, tokens.
    """
    known = [point for point in points if np.isfinite(point.loss)]
    if len(known) < 2:
        return np.array([p.tokens for p in known]), np.array([p.loss for p in known])
    ends = np.array([point.tokens for point in known])
    edges = np.concatenate([[max(0.0, 2 * ends[0] - ends[1])], ends])
    losses = np.array([point.loss for point in known])
    sums = np.concatenate([[0.0], np.cumsum(losses * np.diff(edges))])
    places = np.linspace(edges[0], edges[-1], NUM_PLACES)
    half = max(width, (edges[-1] - edges[0]) / NUM_PLACES) / 2
    first, last = np.maximum(edges[0], places - half), np.minimum(edges[-1], places + half)
    means = (np.interp(last, edges, sums) - np.interp(first, edges, sums)) / (last - first)
    return places, means


def _loss_by_tokens(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    _losses(axes, outcome, shown, lambda reading, tokens: tokens)
    show_tokens(axes)


def _loss_by_time(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    _losses(axes, outcome, shown, _seconds_at)
    axes.set_xlabel("seconds of training, without evaluations")


def _seconds_at(reading: Reading, tokens: Array) -> Array:
    points = sorted((*reading.training, *reading.validation), key=lambda point: point.iteration)
    seconds: Array = np.interp(tokens, [p.tokens for p in points], [p.seconds for p in points])
    return seconds


def _losses(
    axes: Axes,
    outcome: ComparisonResult,
    shown: dict[str, Reading],
    place: Callable[[Reading, Array], Array],
) -> None:
    """Plot training losses as thin lines with the same smoothing, validation as markers."""
    width = smoothing_tokens(outcome)
    for number, label in enumerate(outcome.compared):
        reading = shown.get(label)
        if reading is None:
            continue
        tokens, losses = smoothed(reading.training, width)
        marks = np.array([point.tokens for point in reading.validation])
        found = np.array([point.loss for point in reading.validation])
        plot_losses(axes, number, label, (place(reading, tokens), losses),
                    (place(reading, marks), found))  # fmt: skip


def plot_losses(axes: Axes, number: int, label: str, training: Curve, validation: Curve) -> None:
    """Plot the losses of one run: training as a thin line, validation as markers.

    Args:
        axes: of the plot.
        number: of the run; determines colour and marker.
        label: in the legend.
        training: smoothed; places and losses.
        validation: places and losses.
    """
    color, mark = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    has_marks = bool(validation[0].size)
    axes.plot(*training, color=color, alpha=0.6, linewidth=1, label=None if has_marks else label)
    if has_marks:
        axes.plot(*validation, mark, color=color, markersize=5, label=label,
                  clip_on=False, zorder=3)  # fmt: skip
    axes.set_ylabel("loss (nats per token); markers: validation")


def _bytes_by_step(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    """Plot the sent bytes as a step function, on a logarithmic scale."""
    by_label = {run.entry.label: run for run in outcome.plan}
    for label in outcome.compared:
        reading = shown.get(label)
        if reading is None:
            continue
        sent: list[tuple[int, float]] = list(reading.syncs)
        if is_synchronous(by_label[label]):
            made = range(reading.warmup_steps + 1, reading.iterations + 1)
            sent = [(step, reading.step_bytes) for step in made]
        number = outcome.compared.index(label)
        color = COLORS[number % len(COLORS)]
        width = max(1.2, 4.5 - 0.8 * number)  # equal curves stay visible
        sent += [(reading.iterations, 0)] if sent else []  # flat to the end
        steps, sizes = np.array(sent).reshape(-1, 2).T
        axes.step(steps, np.cumsum(sizes) / 1e6, where="post", color=color, label=label,
                  linewidth=width)  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("MB since the end of the warm-up")
    if any(reading.bytes_per_step for reading in shown.values()):
        from matplotlib.ticker import NullFormatter, StrMethodFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # no exponents: too small
        axes.yaxis.set_minor_formatter(NullFormatter())
