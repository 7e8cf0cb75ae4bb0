"""The charts of a comparison: loss by tokens, loss by time, bytes by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_edit.tools.compare.analysis import ComparisonResult, is_synchronous
from megatron_edit.tools.compare.readings import Point, Reading
from megatron_edit.tools.pages import Chart
from megatron_edit.tools.pages.drawing import (
    COLORS,
    Curve,
    plot_losses,
    show_tokens,
    smoothed,
    svg_drawing,
)
from megatron_edit.tools.pages.drawing import MARKERS as MARKERS
from megatron_edit.tools.pages.texts import show_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_SHARE = 25  # training losses are means over 1/25 of the longest training
Readings = Mapping[str, Reading]  # of the first seed that has one, by label


def draw(folder: Path, outcome: ComparisonResult) -> dict[str, Chart]:
    """Return the charts by the names of their PNG files, which are written; none without runs."""
    shown = {
        label: next(iter(readings.values()))
        for label in outcome.labels
        if (readings := outcome.of_label(label))
    }
    note = f"Each training loss is a mean over {show_count(_width(outcome))} tokens."
    charts = {}
    for title, name, text, fill in (
        ("Loss by tokens", "tokens", f"Curves are of the first seed. {note}", _loss_by_tokens),
        ("Loss by time", "time", "Without start-up and evaluations.", _loss_by_time),
        ("Bytes sent by one replica", "bytes", "Since the end of the warm-up.", _bytes_by_step),
    ):
        if not shown:
            break
        path = folder / f"compare-{name}.png"
        with svg_drawing(f"compare-{name}", height=3.4, png=path) as drawing:
            fill(drawing.axes, outcome, shown)
        charts[path.name] = Chart(title, drawing.svg, text)
    return charts


def _width(outcome: ComparisonResult) -> float:
    """Return the tokens over which each training loss is averaged, for all curves."""
    lengths = [r.training[-1].tokens for r in outcome.readings.values() if r.training]
    return max(lengths, default=0.0) / WIDTH_SHARE


def _loss_by_tokens(axes: Axes, outcome: ComparisonResult, shown: Readings) -> None:
    _losses(axes, outcome, shown, lambda reading, curve: curve)
    show_tokens(axes)


def _loss_by_time(axes: Axes, outcome: ComparisonResult, shown: Readings) -> None:
    _losses(axes, outcome, shown, _by_seconds)
    axes.set_xlabel("seconds of training")


def _by_seconds(reading: Reading, curve: Curve) -> Curve:
    points = sorted((*reading.training, *reading.validation), key=lambda point: point.iteration)
    tokens, seconds = [p.tokens for p in points], [p.seconds for p in points]
    return np.interp(curve[0], tokens, seconds), curve[1]


def _curve(points: tuple[Point, ...]) -> Curve:
    return np.array([p.tokens for p in points]), np.array([p.loss for p in points])


def _losses(
    axes: Axes,
    outcome: ComparisonResult,
    shown: Readings,
    place: Callable[[Reading, Curve], Curve],
) -> None:
    """Plot training losses as thin lines with the same smoothing, validation as markers."""
    for number, label in enumerate(outcome.compared):
        if (reading := shown.get(label)) is not None:
            training = smoothed(*_curve(reading.training), _width(outcome))
            curves = (place(reading, curve) for curve in (training, _curve(reading.validation)))
            plot_losses(axes, number, label, *curves)


def _bytes_by_step(axes: Axes, outcome: ComparisonResult, shown: Readings) -> None:
    """Plot the sent bytes as a step function, on a logarithmic scale."""
    by_label = {run.entry.label: run for run in outcome.plan}
    for number, label in enumerate(outcome.compared):
        if (reading := shown.get(label)) is None:
            continue
        sent: list[tuple[int, float]] = list(reading.syncs)
        if is_synchronous(by_label[label]):
            made = range(reading.warmup_steps + 1, reading.iterations + 1)
            sent = [(step, reading.step_bytes) for step in made]
        width = max(1.2, 4.5 - 0.8 * number)  # equal curves stay visible
        sent += [(reading.iterations, 0)] if sent else []  # flat to the end
        steps, sizes = np.array(sent).reshape(-1, 2).T
        axes.step(steps, np.cumsum(sizes) / 1e6, where="post", color=COLORS[number % len(COLORS)],
                  label=label, linewidth=width)  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("MB")
    if any(reading.bytes_per_step for reading in shown.values()):
        from matplotlib.ticker import NullFormatter, StrMethodFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # no exponents: too small
        axes.yaxis.set_minor_formatter(NullFormatter())
