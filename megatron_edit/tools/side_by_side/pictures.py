"""The pictures of several runs: losses, speed and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from megatron_edit.observe.records import Array
from megatron_edit.tools.compare.pictures import SVG_HEIGHT, WIDTH_SHARE, Curve, plot_losses
from megatron_edit.tools.monitor.charts import Chart, limit_y_axis
from megatron_edit.tools.monitor.summary import short_name
from megatron_edit.tools.pages.drawing import (
    COLORS,
    Drawing,
    legend_below,
    show_tokens,
    svg_drawing,
)
from megatron_edit.tools.pages.texts import number, show_count, time_unit
from megatron_edit.tools.side_by_side.progress import RunCurves

LINE_STYLES = ("-", "--", ":", "-.")  # one after the other where there are more runs than colours
MAX_NAME_LETTERS = 40
SHOWN_SHARE = 0.9  # of the losses: the others may be above the axis
NUM_PLACES = 200  # points of a curve of speeds


def smoothing_tokens(runs: Sequence[RunCurves]) -> float:
    """Return the tokens over which each training loss is averaged, in all runs."""
    return max((float(np.max(run.training[0], initial=0)) for run in runs), default=0) / WIDTH_SHARE


def make_charts(runs: Sequence[RunCurves], width: float) -> Iterator[Chart]:
    """Yield all charts that the runs have data for.

    Args:
        runs: all runs.
        width: tokens over which losses and speeds are averaged.
    """
    if any(run.training[0].size or run.validation[0].size for run in runs):
        yield _loss_by_tokens(runs, width)
    if any(run.training[0].size and run.seconds[0].size for run in runs):
        yield _loss_by_time(runs, width)
    if any(_speeds(run, width)[0].size for run in runs):
        yield _speed_chart(runs, width)
    if any(run.sent[0].size for run in runs):
        yield _byte_chart(runs)


def _loss_by_tokens(runs: Sequence[RunCurves], width: float) -> Chart:
    with _chart("loss-tokens") as drawing:
        _plot_losses(drawing, runs, width, lambda run, tokens: tokens)
    note = f"Lines: training, each point a mean over {show_count(width)} tokens."
    if any(run.validation[0].size for run in runs):
        note += " Markers: validation."
    return Chart("Loss by tokens", drawing.svg, _losses_text(runs), note)


def _loss_by_time(runs: Sequence[RunCurves], width: float) -> Chart:
    longest = max(float(np.max(run.seconds[1], initial=0)) for run in runs)
    scale, unit = time_unit(longest)
    timed = [run for run in runs if run.seconds[0].size]
    with _chart("loss-time", f"{unit} of training") as drawing:
        _plot_losses(drawing, runs, width, lambda run, tokens: run.seconds_at(tokens) / scale)
    text = f"The same losses by time: {len(timed)} of {len(runs)} runs are shown."
    if len(timed) == len(runs):
        text = "The same losses by time in training."
    return Chart("Loss by time", drawing.svg, text, "Without start-up, evaluations and saves.")


def _losses_text(runs: Sequence[RunCurves]) -> str:
    """Return the lowest final validation loss and whose it is."""
    losses = {run.name: run.final_loss for run in runs if run.final_loss is not None}
    if not losses:
        return "Training losses of all runs."
    best = min(losses, key=losses.__getitem__)
    return f"The lowest validation loss at the end is {losses[best]:.4f}, of {best}."


def _plot_losses(
    drawing: Drawing,
    runs: Sequence[RunCurves],
    width: float,
    place: Callable[[RunCurves, Array], Array],
) -> None:
    curves = [run.smoothed(width) for run in runs]
    highest = limit_y_axis(drawing.axes, [losses for _, losses in curves], SHOWN_SHARE)
    for index, (run, (tokens, losses)) in enumerate(zip(runs, curves, strict=True)):
        marks, found = run.validation
        marks, found = marks[found <= highest], found[found <= highest]
        plot_losses(drawing.axes, index, _label(run), (place(run, tokens), losses),
                    (place(run, marks), found))  # fmt: skip
    drawing.axes.set_ylabel("loss (nats per token)")


def _speed_chart(runs: Sequence[RunCurves], width: float) -> Chart:
    with _chart("speeds") as drawing:
        _plot_lines(drawing, runs, [_speeds(run, width) for run in runs], 1e-3)
        drawing.axes.set_ylabel("thousand tokens/s")
        drawing.axes.set_ylim(bottom=0)
    known = {run.name: run.speed for run in runs if run.speed is not None}
    text = "Tokens per second of all replicas together."
    if known:
        best = max(known, key=known.__getitem__)
        text = f"{text[:-1]}; fastest after the warm-up: {best}, {number(known[best], ',.0f')}."
    return Chart("Speed", drawing.svg, text, "With waits and syncs.")


def _speeds(run: RunCurves, width: float) -> Curve:
    """Return tokens per second, means over `width` tokens or less."""
    tokens = run.seconds[0]
    if tokens.size < 2:
        return np.empty(0), np.empty(0)
    places = np.linspace(tokens[0], tokens[-1], NUM_PLACES)
    half = max(width, float(np.ptp(tokens)) / NUM_PLACES) / 2
    first, last = np.maximum(tokens[0], places - half), np.minimum(tokens[-1], places + half)
    lengths = run.seconds_at(last) - run.seconds_at(first)
    known = lengths > 0
    return places[known], (last - first)[known] / lengths[known]


def _byte_chart(runs: Sequence[RunCurves]) -> Chart:
    with _chart("bytes") as drawing:
        _plot_lines(drawing, runs, [run.sent for run in runs], 1e-6, drawstyle="steps-post")
        drawing.axes.set_ylabel("MB sent by one replica in syncs")
        drawing.axes.set_ylim(bottom=0)
    text = "Bytes that one replica has sent to others in syncs."
    return Chart("Bytes between replicas", drawing.svg, text, "Payload; 1 MB = 10^6 bytes.")


@contextmanager
def _chart(name: str, x: str = "") -> Iterator[Drawing]:
    """Draw in the block; the x axis, of tokens unless it has a name, and a legend are added."""
    with svg_drawing(f"runs-{name}", height=SVG_HEIGHT) as drawing:
        yield drawing
        if x:
            drawing.axes.set_xlabel(x)
        else:
            show_tokens(drawing.axes)
        drawing.axes.set_xlim(left=0)
        legend_below(drawing.axes)


def _plot_lines(
    drawing: Drawing,
    runs: Sequence[RunCurves],
    curves: Sequence[Curve],
    scale: float,
    drawstyle: str = "default",
) -> None:
    for index, (run, (tokens, values)) in enumerate(zip(runs, curves, strict=True)):
        if tokens.size:
            drawing.axes.plot(
                tokens, values * scale, color=COLORS[index % len(COLORS)],
                linestyle=LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)],
                drawstyle=drawstyle, label=_label(run),
            )  # fmt: skip


def _label(run: RunCurves) -> str:
    return short_name(run.name, MAX_NAME_LETTERS)
