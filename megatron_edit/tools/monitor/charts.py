"""The charts of a run's page, each with a sentence for screen readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import (
    EngFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.observe.records import VALIDATION, Array
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import short_name
from megatron_edit.tools.pages.drawing import (
    COLORS,
    INK,
    MAX_STEPS,
    PAPER,
    SVG_INCHES,
    Drawing,
    legend_below,
    running_mean,
    svg_drawing,
)
from megatron_edit.tools.pages.texts import number, percent

MANY_REPLICAS = 8  # more replicas are drawn as a band
FLAT_SHARE = 0.005  # a curve that varies by less looks flat on an axis from zero
SMOOTH_SHARE = 50  # a running mean spans 1 / 50 of a curve
MAX_LABELS = 14
SAMPLES = "samples of all replicas"
Curve = tuple[Array, Array]


class Chart(NamedTuple):
    """One chart, or only its sentence where all values are the same.

    Attributes:
        title: of the chart.
        svg: the picture; empty where it would be a flat line.
        text: the content in a sentence.
        note: how to read the chart; may be empty.
    """

    title: str
    svg: str
    text: str
    note: str = ""


def make_charts(run: MonitoredRun) -> Iterator[Chart]:
    """Yield all charts that the run has data for."""
    makers: list[Callable[[MonitoredRun], Chart | None]] = [
        _loss_chart,
        _validation_chart,
        _speed_chart,
    ]
    if run.syncs.count:
        makers += [
            _unit_norm_chart,
            _replica_norm_chart,
            _score_chart,
            _anomaly_chart,
            _weight_chart,
            _clip_chart,
            _time_chart,
            _byte_chart,
        ]
    for make in makers:
        if (chart := make(run)) is not None:
            yield chart


# ---- over the length of a training


def _loss_chart(run: MonitoredRun) -> Chart | None:
    """Draw the training loss of each replica, the mean, and validation losses."""
    curves = [replica.losses.curve() for replica in run.replicas]
    if not any(x.size for x, _ in curves):
        return None
    with _line_chart("losses", _x_label(run), "loss (nats per token)") as drawing:
        axes = drawing.axes
        _plot_by_replica(axes, run, [(x, _smooth(y)) for x, y in curves])
        x, y = run.losses.curve()
        if x.size and len(curves) > 1 and run.has_one_loss_per_round:  # constant over a round
            axes.plot(x, y, color=INK, linewidth=1.4, drawstyle="steps-pre", label="mean")
        elif x.size and len(curves) > 1:
            axes.plot(x, _smooth(y), color=INK, linewidth=1.6, label="mean")
        highest = limit_y_axis(axes, [y for _, y in curves])
        x, y = run.validation.curve()
        if x.size:
            x, y = x[y <= highest], y[y <= highest]
            axes.plot(x, y, "D", color=PAPER, markeredgecolor=INK, markersize=5,
                      label=VALIDATION, clip_on=False, zorder=3)  # fmt: skip
        _mark_events(axes, run)
    last = run.loss if math.isfinite(run.loss) else next(
        (r.loss for r in run.replicas if math.isfinite(r.loss)), math.nan)  # fmt: skip
    note = f"Lines: training, running means of neighbours. {_band_note(run)}".strip()
    if run.has_one_loss_per_round:
        note += " Steps: means of rounds."
    if VALIDATION in run.evaluations:
        note += " Diamonds: validation."
    return Chart("Loss", drawing.svg, f"Training loss; at present {number(last, '.4f')}.", note)


def _validation_chart(run: MonitoredRun) -> Chart | None:
    """Draw the validation losses alone, on an axis of their own."""
    x, y = run.validation.curve()
    if x.size < 2:
        return None
    with _line_chart("validation", _x_label(run), "loss (nats per token)") as drawing:
        drawing.axes.plot(x, y, color=INK, label="validation loss", **_marker_style(x))
        _mark_events(drawing.axes, run)
        limit_y_axis(drawing.axes, [y])
    text = (
        f"Validation loss: {number(float(y[0]), '.4f')} at first, {number(float(y[-1]), '.4f')} at "
        f"last, {number(float(y.min()), '.4f')} at its lowest."
    )
    return Chart("Validation loss", drawing.svg, text)


def _speed_chart(run: MonitoredRun) -> Chart | None:
    curves = [replica.speeds() for replica in run.replicas]
    means = [float(y.mean()) for _, y in curves if y.size]
    if not means:
        return None
    with _line_chart("speeds", _x_label(run), "thousand tokens/s") as drawing:
        _plot_by_replica(drawing.axes, run, [(x, y / 1e3) for x, y in curves])
        _mark_events(drawing.axes, run)
        drawing.axes.set_ylim(bottom=0)
    text = (
        f"Tokens per second of each replica; on average {number(min(means), ',.0f')} to "
        f"{number(max(means), ',.0f')}."
    )
    note = "Medians of eight steps: a step with a sync takes as long as that of the slowest."
    return Chart("Speed of each replica", drawing.svg, text, note)


def _x_label(run: MonitoredRun) -> str:
    """Return the name of the x axis: samples of all replicas where their steps are unequal."""
    return SAMPLES if run.is_plotted_by_samples else "iteration"


def _smooth(values: Array) -> Array:
    """Return a running mean whose width depends on the length of the curve."""
    return np.array(running_mean(values.tolist(), max(1, values.size // SMOOTH_SHARE)))


def _mark_events(axes: Axes, run: MonitoredRun) -> None:
    """Draw vertical lines: end of warm-up, start of the final synchronous phase, resumes."""
    assert run.facts is not None
    batch = (run.facts.batch_size or 1) if run.is_plotted_by_samples else 1
    first, last = axes.get_xlim()
    final = [] if run.facts.last_local_step is None else [run.facts.last_local_step]
    for places, style, label in (
        ([run.facts.warmup_steps], ":", "end of warm-up"),
        (final, "--", "final synchronous phase"),
        (run.resumed_at, "-.", "resumed"),
    ):
        shown = [place * batch for place in places if first < place * batch < last]
        _draw_vertical_lines(axes, shown, label, color=INK, linestyle=style)
    axes.set_xlim(first, last)


def limit_y_axis(axes: Axes, columns: Sequence[Array], share: float = 0.98) -> float:
    """Limit the y axis where the first, high losses or rare peaks would flatten the rest.

    Args:
        axes: of the chart.
        columns: losses of all curves.
        share: of the losses that are always shown.

    Returns:
        the highest loss that is shown; infinite without a limit.
    """
    values = np.concatenate([np.empty(0), *columns])
    if not values.size:
        return math.inf
    low, usual, high = (float(np.quantile(values, each)) for each in (0, share, 1))
    if values.size >= 50 and high - low > 2 * (usual - low) > 0:
        margin = 0.08 * (usual - low)
        axes.set_ylim(low - margin, usual + 3 * margin)
        return usual + 3 * margin
    return math.inf


# ---- by sync


def _unit_norm_chart(run: MonitoredRun) -> Chart:
    units = run.syncs.units
    columns = list(units.values())
    table = _fill_gaps(run.syncs.rows.column("unit_norm")[:, columns]).T
    known = table[np.isfinite(table) & (table > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    with _heat_map("norms", run, table, list(units)) as (drawing, image):
        image.set(norm=LogNorm(low, max(high, low * 1.001)), cmap="viridis")
        bar = drawing.figure.colorbar(image, pad=0.02, aspect=30)
        bar.set_label("norm (in units of the parameters)")
        _plain_logarithms(bar.ax.yaxis, (1, 2, 5) if high < 1000 * low else (1,))
        rollbacks = run.syncs.rows.column("unit_rollbacks")[:, columns]
        places, rows = np.nonzero(np.nan_to_num(rollbacks))
        drawing.axes.plot(_sync_numbers(run)[places], rows, "x", color=COLORS[1], markersize=4)
    text = (
        "Norm of the pseudo-gradient of each unit, mean over the replicas, by sync: from "
        f"{number(low)} to {number(high)}."
    )
    note = "Units from first (top) to last; logarithmic colours. Crosses: roll-backs."
    return Chart("Pseudo-gradient norms by unit", drawing.svg, text, note)


def _replica_norm_chart(run: MonitoredRun) -> Chart | None:
    norms = run.syncs.rows.column("replica_norm")
    known = np.isfinite(norms).any(axis=1)
    if len(run.replicas) < 2 or not known.any():
        return None
    relative = np.full_like(norms, math.nan)
    relative[known] = norms[known] / np.nanmedian(norms[known], axis=1, keepdims=True)
    low, high = float(np.nanmin(relative)), float(np.nanmax(relative))
    with _line_chart("relative-norms", "sync", "norm (median replica: 1)") as drawing:
        _plot_by_sync(drawing.axes, run, relative)
        drawing.axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        if high > 4:
            drawing.axes.set_yscale("log")
            _plain_logarithms(drawing.axes.yaxis, (1, 2, 5))
    text = (
        "Mean norm of each replica, as a multiple of the median replica's: from "
        f"{number(low)} to {number(high)}."
    )
    return Chart("Pseudo-gradient norms by replica", drawing.svg, text, _band_note(run))


def _score_chart(run: MonitoredRun) -> Chart | None:
    assert run.facts is not None
    scores = run.syncs.rows.column("replica_z")
    if not run.facts.has_anomaly or not np.isfinite(scores).any():
        return None
    threshold = run.facts.anomaly_threshold
    with _line_chart("scores", "sync", "standard deviations") as drawing:
        _plot_by_sync(drawing.axes, run, np.clip(scores, -4 * threshold, 4 * threshold))
        drawing.axes.axhline(threshold, color=COLORS[1], linestyle="--", label="left out above")
        _mark_rollbacks(drawing.axes, run)
    text = (
        f"Largest z score of each replica by sync; the highest is "
        f"{number(float(np.nanmax(scores)))}, and norms above {threshold:g} are left out."
    )
    note = f"Of the unit where it is largest; cut off at {4 * threshold:g}."
    return Chart("Anomaly scores", drawing.svg, text, note)


def _anomaly_chart(run: MonitoredRun) -> Chart | None:
    if not run.syncs.sums["anomalies"]:
        return None
    rows = run.syncs.rows
    table = 100 * (rows.column("replica_anomalies") / np.maximum(1, rows.column("replica_pairs"))).T
    names = [_label(run, replica) for replica in range(len(table))]
    with _heat_map("anomalies", run, table, names) as (drawing, image):
        image.set(clim=(0, 100), cmap="cividis")
        drawing.figure.colorbar(image, pad=0.02, aspect=30).set_label("% of its units")
    shares = run.syncs.anomaly_shares()
    text = (
        "Share of its units in which each replica was left out, by sync; most often replica "
        f"{run.name_of(int(np.argmax(shares)))}, in {percent(float(shares.max()))}."
    )
    return Chart("Left out as anomalous", drawing.svg, text)


def _weight_chart(run: MonitoredRun) -> Chart | None:
    counts, title = run.syncs.rows.column("num_replicas")[:, 0], "Effective number of replicas"
    if not run.is_elastic:
        counts = np.full_like(counts, len(run.replicas))
    count = int(counts.max())
    if count < 2:
        return None
    middle, low, high = (
        run.syncs.rows.column(f"effective{which}")[:, 0] for which in ("", "_min", "_max")
    )
    if _is_flat(low, high):
        text = f"{number(float(low[-1]), '.2f')} of {counts[-1]:g}, of each unit at every sync."
        return Chart(title, "", text)
    x = _sync_numbers(run)
    with _line_chart("weights", "sync", "replicas") as drawing:
        axes = drawing.axes
        axes.fill_between(x, low, high, color=COLORS[2], alpha=0.3, linewidth=0, label="all units")
        axes.plot(x, middle, color=COLORS[2], label="median unit", **_marker_style(x))
        if np.ptp(counts):
            axes.plot(x, counts, color=INK, linewidth=1, drawstyle="steps-pre", label="members")
            axes.plot(x, counts / 2, color=COLORS[1], linestyle="--", linewidth=1,
                      drawstyle="steps-pre", label="half")  # fmt: skip
        else:
            axes.axhline(count / 2, color=COLORS[1], linestyle="--", linewidth=1, label="half")
        axes.set_ylim(0, 1.06 * count)
        _mark_rollbacks(axes, run)
    text = (
        f"Effective number of replicas, 1 / sum of squared weights, of {_range(counts)}: the "
        "median unit "
        f"has {number(float(np.nanmean(middle)), '.2f')} on average."
    )
    most = f"{count}" if not np.ptp(counts) else "The number of members"
    note = f"{most} for equal weights, 1 where one replica has all the weight."
    return Chart(title, drawing.svg, text, note)


def _clip_chart(run: MonitoredRun) -> Chart | None:
    assert run.facts is not None
    low, middle = (run.syncs.rows.column(name)[:, 0] for name in ("clip_min", "clip"))
    if not run.facts.has_clip or not np.isfinite(low).any():
        return None
    if _is_flat(low, middle):
        text = f"{number(float(low[-1]), '.2f')} of each unit at every sync (1 is no clip)."
        return Chart("Clip factors", "", text)
    x = _sync_numbers(run)
    with _line_chart("clips", "sync", "clip factor") as drawing:
        drawing.axes.plot(x, middle, color=COLORS[0], label="median unit", **_marker_style(x))
        drawing.axes.plot(
            x, low, color=COLORS[1], linewidth=1, label="smallest", **_marker_style(x)
        )
        drawing.axes.set_ylim(0, 1.06)
    text = (
        f"Clip factors by sync: the median unit's is {number(float(np.nanmean(middle)), '.2f')} on "
        f"average, the smallest of all {number(float(np.nanmin(low)), '.2f')}."
    )
    return Chart("Clip factors", drawing.svg, text, "1 is no clip.")


def _time_chart(run: MonitoredRun) -> Chart:
    parts = dict(zip(SYNC_TIMES, run.syncs.rows.column("seconds").T * 1e3, strict=True))
    with _line_chart("seconds", "sync", "milliseconds") as drawing:
        below = np.zeros_like(parts["total"])
        for color, name in ((4, "wait"), (5, "exchange"), (2, "outer")):
            _plot_bars(drawing.axes, run, parts[name], below, color=COLORS[color], label=name)
            below = below + parts[name]
        drawing.axes.plot(
            _sync_numbers(run), parts["total"], ".", color=INK, markersize=4, label="total"
        )
        drawing.axes.set_ylim(0, 1.05 * max(1e-9, float(max(below.max(), parts["total"].max()))))
    share = run.syncs.share("exposed")
    exposed = f"; exposed {percent(share)} of the time" if share is not None else ""
    text = (
        "Time of each sync: waiting for other replicas, for the exchange, and the outer step"
        f"{exposed}."
    )
    whose = "the leader" if run.is_elastic else "replica 0"
    note = f"Bars: exposed time ({whose}). Points: start to last landing."
    return Chart("Time of syncs", drawing.svg, text, note)


def _byte_chart(run: MonitoredRun) -> Chart:
    sizes = run.syncs.rows.column("wire_bytes")[:, 0] / 1e6
    total = f"{number(run.syncs.sums['wire_bytes'] / 1e6, ',.2f')} in all {run.syncs.count} syncs"
    title, note = "Bytes between replicas", "Payload; 1 MB = 10^6 bytes."
    if _is_flat(sizes):
        text = f"{number(float(sizes[-1]), ',.2f')} MB sent by a replica at every sync; {total}."
        return Chart(title, "", text, note)
    with _line_chart("bytes", "sync", "MB sent by a replica") as drawing:
        _plot_bars(drawing.axes, run, sizes, np.zeros_like(sizes), color=COLORS[0])
    text = f"Megabytes that the ranks of one replica sent to other replicas in each sync; {total}."
    return Chart(title, drawing.svg, text, note)


# ---- parts of charts


@contextmanager
def _line_chart(name: str, x: str, y: str) -> Iterator[Drawing]:
    """Draw in the block; axis names and a legend are added after it.

    Args:
        name: of the chart.
        x, y: names of the axes.
    """
    with svg_drawing(name) as drawing:
        yield drawing
        axes = drawing.axes
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _integer_ticks(axes)
        if x == SAMPLES:
            axes.xaxis.set_major_formatter(EngFormatter())
        first, last = axes.get_xlim()
        if last - first < 1:  # a single point
            axes.set_xlim(first - 0.5, last + 0.5)
        legend_below(axes)


@contextmanager
def _heat_map(
    name: str, run: MonitoredRun, table: Array, names: Sequence[str]
) -> Iterator[tuple[Drawing, AxesImage]]:
    """Draw a heat map, one row per name and one column per sync; the block sets its colours.

    Args:
        name: of the chart.
        run: whose syncs the columns are.
        table: float64 [names, syncs].
        names: of the rows.
    """
    height = float(np.clip(1.2 + 0.2 * len(table), SVG_INCHES[1], 1.3 * SVG_INCHES[1]))
    with svg_drawing(name, height=height) as drawing:
        axes, edges = drawing.axes, _bar_edges(run)
        axes.grid(visible=False)
        box = (edges[0], edges[-1], len(table) - 0.5, -0.5)
        every = math.ceil(len(names) / MAX_LABELS)
        axes.set_yticks(range(0, len(names), every), list(names)[::every])
        axes.set_xlabel("sync")
        _integer_ticks(axes)
        yield drawing, axes.imshow(table, aspect="auto", extent=box)


def _integer_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS, integer=True, min_n_ticks=1))


def _plain_logarithms(axis: Axis, steps: tuple[int, ...]) -> None:
    """Set ticks at `steps` times powers of ten, without exponents."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _label(run: MonitoredRun, replica: int) -> str:
    """Return the name of a replica in legends, given its number."""
    return f"replica {short_name(run.name_of(replica))}"


def _range(counts: Array) -> str:
    """Return the only count, or the smallest and the largest one."""
    low, high = counts.min(), counts.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _plot_by_replica(axes: Axes, run: MonitoredRun, curves: Sequence[Curve]) -> None:
    """Draw a line per replica, or a band where there are many."""
    if len(curves) <= MANY_REPLICAS:
        for replica, (x, y) in enumerate(curves):
            axes.plot(x, y, color=COLORS[replica % len(COLORS)], linewidth=1, alpha=0.75,
                      label=_label(run, replica) if len(curves) > 1 else None)  # fmt: skip
        return
    places = max((x for x, _ in curves), key=len)
    outside = {"left": math.nan, "right": math.nan} if run.is_elastic else {}  # no member there
    _plot_band(
        axes, places, np.array([np.interp(places, x, y, **outside) for x, y in curves if x.size])
    )


def _plot_by_sync(axes: Axes, run: MonitoredRun, table: Array) -> None:
    """Draw values by sync: a line per replica, or a band where there are many."""
    x = _sync_numbers(run)
    if table.shape[1] > MANY_REPLICAS:
        _plot_band(axes, x, table.T)
        return
    for replica, column in enumerate(table.T):
        axes.plot(x, column, color=COLORS[replica % len(COLORS)], linewidth=1, alpha=0.85,
                  label=_label(run, replica), **_marker_style(x))  # fmt: skip


def _plot_band(axes: Axes, x: Array, table: Array) -> None:
    """Draw the band from the lowest to the highest row, and the median row."""
    known = np.isfinite(table).any(axis=0)  # there are no scores before detectors are armed
    x, table = x[known], table[:, known]
    axes.fill_between(x, np.nanmin(table, axis=0), np.nanmax(table, axis=0), alpha=0.3,
                      color=COLORS[0], linewidth=0, label="all replicas")  # fmt: skip
    axes.plot(x, np.nanmedian(table, axis=0), color=COLORS[0], label="median replica")


def _band_note(run: MonitoredRun) -> str:
    """Return how to read a band; empty where there is none."""
    many = len(run.replicas) > MANY_REPLICAS
    return "The band goes from the lowest replica to the highest." if many else ""


def _plot_bars(axes: Axes, run: MonitoredRun, values: Array, below: Array, **style: Any) -> None:
    axes.stairs(below + values, _bar_edges(run), baseline=below, fill=True, **style)


def _bar_edges(run: MonitoredRun) -> Array:
    """Return the left edges of the bars, and the right edge of the last one."""
    x = _sync_numbers(run)
    half = max(0.5, (x[-1] - x[0]) / max(1, x.size - 1) / 2)
    return np.concatenate([[x[0] - half], (x[1:] + x[:-1]) / 2, [x[-1] + half]])


def _sync_numbers(run: MonitoredRun) -> Array:
    """Return the sync number of each row; the last one where a row merges several syncs."""
    rounds: Array = run.syncs.rows.column("round")[:, 0]
    return rounds


def _fill_gaps(table: Array) -> Array:
    """Fill gaps with the row before: with fragments a unit does not take part in every sync."""
    filled = table.copy()
    for row, before in zip(filled[1:], filled[:-1], strict=True):
        gaps = np.isnan(row)
        row[gaps] = before[gaps]
    return filled


def _mark_rollbacks(axes: Axes, run: MonitoredRun) -> None:
    places = _sync_numbers(run)[run.syncs.rows.column("rollbacks")[:, 0] > 0]
    _draw_vertical_lines(axes, places.tolist(), "roll-back", color=COLORS[3], alpha=0.7)


def _draw_vertical_lines(axes: Axes, places: Sequence[float], label: str, **style: Any) -> None:
    """Draw vertical lines with one entry in the legend."""
    for index, place in enumerate(places):
        axes.axvline(place, linewidth=1, label=None if index else label, **style)


def _marker_style(x: Array) -> dict[str, Any]:
    """Return the marker style: short lines have markers, else a single point is invisible."""
    return {"marker": "o", "markersize": 3.5} if x.size <= 12 else {}


def _is_flat(*columns: Array) -> bool:
    """Return whether a chart of these values would be a flat line."""
    values = np.concatenate([column[np.isfinite(column)] for column in columns])
    return values.size > 1 and bool(np.ptp(values) <= FLAT_SHARE * np.abs(values).max())
