"""The charts of a run, each with a sentence for screen readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from megatron_edit.tools.monitor.membership import MembershipHistory
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.pages import Chart
from megatron_edit.tools.pages.drawing import (
    COLORS,
    INK,
    MAX_STEPS,
    PAPER,
    SVG_INCHES,
    Curve,
    Drawing,
    running_mean,
    svg_drawing,
)
from megatron_edit.tools.pages.texts import (
    join_names,
    number,
    percent,
    plural,
    short_name,
    time_unit,
)

MANY_REPLICAS = 8  # more replicas are drawn as a band
FLAT_SHARE = 0.005  # a curve that varies by less looks flat on an axis from zero
SMOOTH_SHARE = 50  # a running mean spans 1 / 50 of a curve
MAX_LABELS = 14
MAX_ROWS = 48  # of the chart of members
MAX_BARS = 256  # in a row, or lines of epochs; closer ones could not be told apart
SAMPLES = "samples of all replicas"
Maker = Callable[[MonitoredRun], Chart | None]


def make_charts(run: MonitoredRun, *makers: Maker) -> list[Chart]:
    """Return those of some charts that the run has data for."""
    return [chart for make in makers if (chart := make(run)) is not None]


# ---- over the length of a training


def loss_chart(run: MonitoredRun) -> Chart | None:
    """Draw the training loss of each replica, the mean, and validation losses."""
    curves = [replica.losses.curve() for replica in run.replicas]
    if not any(x.size for x, _ in curves):
        return None
    by_round = run.facts.has_one_loss_per_round
    with _line_chart("losses", _x_label(run), "loss (nats per token)") as drawing:
        axes = drawing.axes
        _plot_replicas(axes, run, [(x, _smooth(y)) for x, y in curves])
        x, y = run.losses.curve()
        if x.size and len(curves) > 1:  # one per round is constant over the round
            axes.plot(x, y if by_round else _smooth(y), color=INK, label="mean",
                      drawstyle="steps-pre" if by_round else "default")  # fmt: skip
        highest = limit_y_axis(axes, [y for _, y in curves])
        x, y = run.validation.curve()
        if x.size:
            x, y = x[y <= highest], y[y <= highest]
            axes.plot(x, y, "D", color=PAPER, markeredgecolor=INK, markersize=5,
                      label=VALIDATION, clip_on=False, zorder=3)  # fmt: skip
        _mark_events(axes, run)
    note = f"Lines: training, running means of neighbours. {_band_note(run)}".strip()
    note += " Steps: means of rounds." if by_round else ""
    note += " Diamonds: validation." if VALIDATION in run.evaluations else ""
    text = f"Training loss; at present {number(run.latest_loss, '.4f')}."
    return Chart("Loss", drawing.svg, text, note)


def validation_chart(run: MonitoredRun) -> Chart | None:
    """Draw the validation losses alone, on an axis of their own."""
    x, y = run.validation.curve()
    if x.size < 2:
        return None
    with _line_chart("validation", _x_label(run), "loss (nats per token)") as drawing:
        drawing.axes.plot(x, y, color=INK, label="validation loss", **_marker_style(x))
        _mark_events(drawing.axes, run)
        limit_y_axis(drawing.axes, [y])
    first, last, lowest = (number(float(each), ".4f") for each in (y[0], y[-1], y.min()))
    text = f"Validation loss: {first} at first, {last} at last, {lowest} at its lowest."
    return Chart("Validation loss", drawing.svg, text)


def speed_chart(run: MonitoredRun) -> Chart | None:
    """Draw the tokens per second of each replica."""
    curves = [replica.speeds() for replica in run.replicas]
    means = [float(y.mean()) for _, y in curves if y.size]
    if not means:
        return None
    with _line_chart("speeds", _x_label(run), "thousand tokens/s") as drawing:
        _plot_replicas(drawing.axes, run, [(x, y / 1e3) for x, y in curves])
        _mark_events(drawing.axes, run)
        drawing.axes.set_ylim(bottom=0)
    text = (
        f"Tokens per second of each replica; on average {number(min(means), ',.0f')} to "
        f"{number(max(means), ',.0f')}."
    )
    note = "Medians of eight steps: a step with a sync takes as long as that of the slowest."
    return Chart("Speed of each replica", drawing.svg, text, note)


def member_chart(run: MonitoredRun) -> Chart | None:
    """Draw who took part in an elastic run, over the seconds of training."""
    membership, length = run.membership, run.syncs.elapsed
    if membership.count < 2 or length <= 0:
        return None
    scale, unit = time_unit(length)
    names = _shown_members(membership)
    height = float(np.clip(1.3 + 0.24 * len(names), 2.4, 1.3 * SVG_INCHES[1]))
    with svg_drawing("members", height=height) as drawing:
        axes = drawing.axes
        axes.grid(visible=False)
        for place, name in enumerate(names):
            spans = membership.spans[name]
            starts = np.array([span.start for span in spans]) / scale
            ends = np.array([span.end for span in spans]) / scale
            # Gaps that could not be seen are left out.
            gaps = np.flatnonzero(starts[1:] - ends[:-1] >= length / scale / MAX_BARS)
            starts, ends = starts[[0, *(gaps + 1)]], ends[[*gaps, -1]]
            axes.broken_barh(list(zip(starts, ends - starts, strict=True)), (place - 0.32, 0.64),
                             facecolors=COLORS[5])  # fmt: skip
            came, left = starts[starts > 0], ends if spans[-1].next_round else ends[:-1]
            for x, marker, color in ((came, ">", COLORS[2]), (left, "X", COLORS[1])):
                axes.plot(x, np.full(x.size, place), marker, color=color, markersize=6, zorder=3)
        changes = [change.start / scale for change in membership.changes[1:]]
        for start in changes[:: math.ceil(len(changes) / MAX_BARS) or 1]:
            axes.axvline(start, color=INK, linewidth=0.8, linestyle=":", zorder=0)
        _name_rows(axes, [short_name(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(-0.02 * length / scale, 1.02 * length / scale)
        axes.set_xlabel(f"{unit} of training since the first sync")
        for style, color, label in (("s", COLORS[5], "member"), (">", COLORS[2], "came"),
                                    ("X", COLORS[1], "left"), (":", INK, "new epoch")):  # fmt: skip
            axes.plot([], [], style, color=color, label=label)
    text = (
        f"Members by time: {len(membership.spans)} replicas in all, "
        f"{plural(len(changes), 'change')} of the epoch; at the last sync "
        f"{join_names([replica.name for replica in run.members])}."
    )
    note = "As of the syncs, without the time between two runs."
    if hidden := len(membership.spans) - len(names):
        note += f" {hidden} more replicas are not shown."
    return Chart("Members", drawing.svg, text, note)


def _shown_members(membership: MembershipHistory) -> list[str]:
    """Return the replicas that are shown, by name: those that came and went are preferred."""
    is_constant = {name: membership.num_syncs[name] == membership.count
                   for name in membership.spans}  # fmt: skip
    return sorted(sorted(is_constant, key=lambda name: (is_constant[name], name))[:MAX_ROWS])


def _x_label(run: MonitoredRun) -> str:
    return SAMPLES if run.facts.is_plotted_by_samples else "iteration"


def _smooth(values: Array) -> Array:
    """Return a running mean whose width depends on the length of the curve."""
    return np.array(running_mean(values.tolist(), max(1, values.size // SMOOTH_SHARE)))


def _mark_events(axes: Axes, run: MonitoredRun) -> None:
    """Draw vertical lines: end of warm-up, start of the final synchronous phase, resumes."""
    facts = run.facts
    batch = (facts.batch_size or 1) if facts.is_plotted_by_samples else 1
    first, last = axes.get_xlim()
    final = [] if facts.last_local_step is None else [facts.last_local_step]
    for places, style, label in (
        ([facts.warmup_steps], ":", "end of warm-up"),
        (final, "--", "final synchronous phase"),
        (run.resumed_at, "-.", "resumed"),
    ):
        shown = [place * batch for place in places if first < place * batch < last]
        _draw_vertical_lines(axes, shown, label, color=INK, linestyle=style)
    axes.set_xlim(first, last)


def limit_y_axis(axes: Axes, columns: Sequence[Array], share: float = 0.98) -> float:
    """Limit the y axis where the first, high losses or rare peaks would flatten the rest.

    At least this share of the losses is shown. Returns the highest one that is shown; infinity
    without a limit.
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


def unit_norm_chart(run: MonitoredRun) -> Chart | None:
    """Draw the norms of the units' pseudo-gradients as a heat map."""
    if not run.syncs.count:
        return None
    columns = list(run.syncs.units.values())
    table = _fill_gaps(run.syncs.rows.column("unit_norm")[:, columns]).T
    known = table[np.isfinite(table) & (table > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    with _heat_map("norms", run, table, list(run.syncs.units)) as (drawing, image):
        image.set(norm=LogNorm(low, max(high, low * 1.001)), cmap="viridis")
        bar = drawing.figure.colorbar(image, pad=0.02, aspect=30)
        bar.set_label("norm (in units of the parameters)")
        _plain_logarithms(bar.ax.yaxis, (1, 2, 5) if high < 1000 * low else (1,))
        rollbacks = run.syncs.rows.column("unit_rollbacks")[:, columns]
        places, rows = np.nonzero(np.nan_to_num(rollbacks))
        drawing.axes.plot(_rounds(run)[places], rows, "x", color=COLORS[1], markersize=4)
    text = (
        "Norm of the pseudo-gradient of each unit, mean over the replicas, by sync: from "
        f"{number(low)} to {number(high)}."
    )
    note = "Units from first (top) to last; logarithmic colours. Crosses: roll-backs."
    return Chart("Pseudo-gradient norms by unit", drawing.svg, text, note)


def replica_norm_chart(run: MonitoredRun) -> Chart | None:
    """Draw the norm of each replica's pseudo-gradient, relative to the median replica's."""
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


def score_chart(run: MonitoredRun) -> Chart | None:
    """Draw the z scores of the norms, by replica."""
    scores, config = run.syncs.rows.column("replica_z"), run.facts.config
    if config["no_anomaly"] or not np.isfinite(scores).any():
        return None
    threshold = config["anomaly_threshold"]
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


def anomaly_chart(run: MonitoredRun) -> Chart | None:
    """Draw which replicas were left out, as a heat map."""
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


def weight_chart(run: MonitoredRun) -> Chart | None:
    """Draw the effective number of replicas."""
    rows, title = run.syncs.rows, "Effective number of replicas"
    if not rows.count or (counts := rows.vector("num_replicas")).max() < 2:
        return None
    middle, low, high = (rows.vector(f"effective{which}") for which in ("", "_min", "_max"))
    if _is_flat(low, high):
        text = f"{number(float(low[-1]), '.2f')} of {counts[-1]:g}, of each unit at every sync."
        return Chart(title, "", text)
    x = _rounds(run)
    with _line_chart("weights", "sync", "replicas") as drawing:
        axes = drawing.axes
        axes.fill_between(x, low, high, color=COLORS[2], alpha=0.3, linewidth=0, label="all units")
        axes.plot(x, middle, color=COLORS[2], label="median unit", **_marker_style(x))
        if np.ptp(counts):
            axes.plot(x, counts, color=INK, linewidth=1, drawstyle="steps-pre", label="members")
        axes.plot(x, counts / 2, color=COLORS[1], linestyle="--", linewidth=1,
                  drawstyle="steps-pre", label="half")  # fmt: skip
        axes.set_ylim(0, 1.06 * counts.max())
        _mark_rollbacks(axes, run)
    least, most = (f"{each:g}" for each in (counts.min(), counts.max()))
    text = (
        "Effective number of replicas, 1 / sum of squared weights, of "
        f"{most if least == most else f'{least} to {most}'}: the median unit has "
        f"{number(float(np.nanmean(middle)), '.2f')} on average."
    )
    equal = most if least == most else "The number of members"
    note = f"{equal} for equal weights, 1 where one replica has all the weight."
    return Chart(title, drawing.svg, text, note)


def clip_chart(run: MonitoredRun) -> Chart | None:
    """Draw the clip factors of the averages."""
    rows = run.syncs.rows
    if run.facts.config["no_clip"] or not rows.count:
        return None
    low, middle = rows.vector("clip_min"), rows.vector("clip")
    if not np.isfinite(low).any():
        return None
    if _is_flat(low, middle):
        text = f"{number(float(low[-1]), '.2f')} of each unit at every sync (1 is no clip)."
        return Chart("Clip factors", "", text)
    x = _rounds(run)
    with _line_chart("clips", "sync", "clip factor") as drawing:
        for y, color, label in ((middle, COLORS[0], "median unit"), (low, COLORS[1], "smallest")):
            drawing.axes.plot(x, y, color=color, label=label, **_marker_style(x))
        drawing.axes.set_ylim(0, 1.06)
    text = (
        f"Clip factors by sync: the median unit's is {number(float(np.nanmean(middle)), '.2f')} on "
        f"average, the smallest of all {number(float(np.nanmin(low)), '.2f')}."
    )
    return Chart("Clip factors", drawing.svg, text, "1 is no clip.")


def time_chart(run: MonitoredRun) -> Chart | None:
    """Draw the exposed seconds of each sync, and its seconds in all."""
    if not run.syncs.count:
        return None
    parts = dict(zip(SYNC_TIMES, run.syncs.rows.column("seconds").T * 1e3, strict=True))
    with _line_chart("seconds", "sync", "milliseconds") as drawing:
        below = np.zeros_like(parts["total"])
        for color, name in ((4, "wait"), (5, "exchange"), (2, "outer")):
            _plot_bars(drawing.axes, run, parts[name], below, color=COLORS[color], label=name)
            below = below + parts[name]
        drawing.axes.plot(_rounds(run), parts["total"], ".", color=INK, markersize=4, label="total")
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


def byte_chart(run: MonitoredRun) -> Chart | None:
    """Draw the bytes that a replica sends in each sync."""
    if not run.syncs.count:
        return None
    sizes = run.syncs.rows.vector("wire_bytes") / 1e6
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
    """Draw in the block; the names of the axes are added after it."""
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


@contextmanager
def _heat_map(
    name: str, run: MonitoredRun, table: Array, names: Sequence[str]
) -> Iterator[tuple[Drawing, AxesImage]]:
    """Draw a heat map, one row per name and one column per sync; the block sets its colours."""
    height = float(np.clip(1.2 + 0.2 * len(table), SVG_INCHES[1], 1.3 * SVG_INCHES[1]))
    with svg_drawing(name, height=height) as drawing:
        axes, edges = drawing.axes, _bar_edges(run)
        axes.grid(visible=False)
        box = (edges[0], edges[-1], len(table) - 0.5, -0.5)
        _name_rows(axes, names)
        axes.set_xlabel("sync")
        _integer_ticks(axes)
        yield drawing, axes.imshow(table, aspect="auto", extent=box)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    every = math.ceil(len(names) / MAX_LABELS)
    axes.set_yticks(range(0, len(names), every), list(names)[::every])


def _integer_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(MAX_STEPS, integer=True, min_n_ticks=1))


def _plain_logarithms(axis: Axis, steps: tuple[int, ...]) -> None:
    """Set ticks at `steps` times powers of ten, without exponents."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _label(run: MonitoredRun, replica: int) -> str:
    return f"replica {short_name(run.name_of(replica))}"


def _plot_by_sync(axes: Axes, run: MonitoredRun, table: Array) -> None:
    _plot_replicas(axes, run, [(_rounds(run), column) for column in table.T])


def _plot_replicas(axes: Axes, run: MonitoredRun, curves: Sequence[Curve]) -> None:
    """Draw a line per replica, or the band from the lowest to the highest where there are many."""
    if len(curves) <= MANY_REPLICAS:
        for replica, (x, y) in enumerate(curves):
            label = _label(run, replica) if len(curves) > 1 else None
            axes.plot(x, y, color=COLORS[replica % len(COLORS)], linewidth=1, alpha=0.8,
                      label=label, **_marker_style(x))  # fmt: skip
        return
    x = max((x for x, _ in curves), key=len)
    outside = {"left": math.nan, "right": math.nan} if run.is_elastic else {}  # no member there
    table = np.array([
        y if np.array_equal(x, own) else np.interp(x, own, y, **outside)
        for own, y in curves if own.size
    ])  # fmt: skip
    known = np.isfinite(table).any(axis=0)  # there are no scores before detectors are armed
    x, table = x[known], table[:, known]
    axes.fill_between(x, np.nanmin(table, axis=0), np.nanmax(table, axis=0), alpha=0.3,
                      color=COLORS[0], linewidth=0, label="all replicas")  # fmt: skip
    axes.plot(x, np.nanmedian(table, axis=0), color=COLORS[0], label="median replica")


def _band_note(run: MonitoredRun) -> str:
    many = len(run.replicas) > MANY_REPLICAS
    return "The band goes from the lowest replica to the highest." if many else ""


def _plot_bars(axes: Axes, run: MonitoredRun, values: Array, below: Array, **style: Any) -> None:
    axes.stairs(below + values, _bar_edges(run), baseline=below, fill=True, **style)


def _bar_edges(run: MonitoredRun) -> Array:
    """Return the left edges of the bars, and the right edge of the last one."""
    x = _rounds(run)
    half = max(0.5, (x[-1] - x[0]) / max(1, x.size - 1) / 2)
    return np.concatenate([[x[0] - half], (x[1:] + x[:-1]) / 2, [x[-1] + half]])


def _rounds(run: MonitoredRun) -> Array:
    """Return the sync number of each row; the last one where a row merges several syncs."""
    return run.syncs.rows.vector("round")


def _fill_gaps(table: Array) -> Array:
    """Fill gaps with the row before: with fragments a unit does not take part in every sync."""
    filled = table.copy()
    for row, before in zip(filled[1:], filled[:-1], strict=True):
        gaps = np.isnan(row)
        row[gaps] = before[gaps]
    return filled


def _mark_rollbacks(axes: Axes, run: MonitoredRun) -> None:
    places = _rounds(run)[run.syncs.rows.vector("rollbacks") > 0]
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
