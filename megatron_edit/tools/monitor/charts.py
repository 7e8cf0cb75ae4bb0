"""The pictures of a run's page, each with a sentence for those who do not see it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.tools.monitor.curves import loss_chart, speed_chart, validation_chart
from megatron_edit.tools.monitor.heat import anomalies_by_replica, norms_by_unit
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.series import Array
from megatron_edit.tools.monitor.strokes import (
    MANY_REPLICAS,
    Chart,
    band,
    band_note,
    finish,
    is_flat,
    marker,
)
from megatron_edit.tools.monitor.texts import number, percent
from megatron_edit.tools.pages.drawing import COLORS, INK, svg_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 64


def charts_of(run: MonitoredRun) -> Iterator[Chart]:
    """All pictures that the run has something for."""
    curves = [replica.losses.curve() for replica in run.replicas]
    if any(x.size for x, _ in curves):
        yield loss_chart(run, curves)
    if (validation := validation_chart(run)) is not None:
        yield validation
    speeds = [replica.speeds() for replica in run.replicas]
    if any(x.size for x, _ in speeds):
        yield speed_chart(run, speeds)
    if run.syncs.count:
        for make in (_norms, _relative_norms, _scores, _anomalies, _weights, _clips, _seconds,
                     _bytes):  # fmt: skip
            if (chart := make(run)) is not None:
                yield chart


# ---- by sync


def _norms(run: MonitoredRun) -> Chart:
    svg, low, high = norms_by_unit(run.syncs)
    text = (
        "Norm of the pseudo-gradient of each unit, mean over the replicas, by sync: from "
        f"{number(low)} to {number(high)}."
    )
    note = "Units from first (top) to last; logarithmic colours. Crosses: roll-backs."
    return Chart("Pseudo-gradient norms by unit", svg, text, note)


def _relative_norms(run: MonitoredRun) -> Chart | None:
    norms = run.syncs.rows.column("replica_norm")
    known = np.isfinite(norms).any(axis=1)
    if len(run.replicas) < 2 or not known.any():
        return None
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    relative = np.full_like(norms, math.nan)
    relative[known] = norms[known] / np.nanmedian(norms[known], axis=1, keepdims=True)
    with svg_drawing("relative-norms") as drawing:
        axes = drawing.axes
        _by_sync(axes, run, relative)
        axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        if np.nanmax(relative) > 4:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        finish(axes, "sync", "norm (median replica: 1)")
    text = (
        "Mean norm of each replica, as a multiple of the median replica's: from "
        f"{number(float(np.nanmin(relative)))} to {number(float(np.nanmax(relative)))}."
    )
    return Chart("Pseudo-gradient norms by replica", drawing.svg, text, band_note(run, "replica"))


def _scores(run: MonitoredRun) -> Chart | None:
    assert run.facts is not None
    scores = run.syncs.rows.column("replica_z")
    if not run.facts.has_anomaly or not np.isfinite(scores).any():
        return None
    threshold = run.facts.anomaly_threshold
    with svg_drawing("scores") as drawing:
        axes = drawing.axes
        _by_sync(axes, run, np.clip(scores, -4 * threshold, 4 * threshold))
        axes.axhline(threshold, color=COLORS[1], linestyle="--", label="left out above")
        _mark_rollbacks(axes, run)
        finish(axes, "sync", "standard deviations")
    highest = number(float(np.nanmax(scores)))
    text = (
        f"Largest z score of each replica by sync; the highest is {highest}, and norms above "
        f"{threshold:g} are left out."
    )
    note = f"Of the unit where it is largest; cut off at {4 * threshold:g}."
    return Chart("Anomaly scores", drawing.svg, text, note)


def _anomalies(run: MonitoredRun) -> Chart | None:
    if not run.syncs.sums["anomalies"]:
        return None
    svg = anomalies_by_replica(run.syncs)
    worst = int(np.argmax(shares := run.syncs.anomaly_shares()))
    text = (
        "Share of its units in which each replica was left out, by sync; most often replica "
        f"{worst}, in {percent(float(shares[worst]))}."
    )
    return Chart("Left out as anomalous", svg, text)


def _weights(run: MonitoredRun) -> Chart | None:
    count = len(run.replicas)
    if count < 2:
        return None
    rows, title = run.syncs.rows, "Effective number of replicas"
    x = _syncs(run)
    low, high = rows.column("effective_min")[:, 0], rows.column("effective_max")[:, 0]
    if is_flat(low, high):
        return Chart(title, "", f"{number(float(low[-1]), '.2f')} of {count}, of each unit at "
                     "every sync.")  # fmt: skip
    with svg_drawing("weights") as drawing:
        axes = drawing.axes
        axes.fill_between(x, low, high, color=COLORS[2], alpha=0.3, linewidth=0, label="all units")
        middle = rows.column("effective")[:, 0]
        axes.plot(x, middle, color=COLORS[2], label="median unit", **marker(x))
        axes.axhline(count / 2, color=COLORS[1], linestyle="--", linewidth=1, label="half")
        axes.set_ylim(0, 1.06 * count)
        _mark_rollbacks(axes, run)
        finish(axes, "sync", "replicas")
    text = (
        f"Effective number of replicas, 1 / sum of squared weights, of {count}: the median unit "
        f"stands on {number(float(np.nanmean(middle)), '.2f')} on average."
    )
    note = f"{count} where all count alike, 1 where one decides."
    return Chart(title, drawing.svg, text, note)


def _clips(run: MonitoredRun) -> Chart | None:
    assert run.facts is not None
    rows, x = run.syncs.rows, _syncs(run)
    low, middle = rows.column("clip_min")[:, 0], rows.column("clip")[:, 0]
    if not run.facts.has_clip or not np.isfinite(low).any():
        return None
    if is_flat(low, middle):
        return Chart("Clip factors", "", f"{number(float(low[-1]), '.2f')} of each unit at every "
                     "sync (1 is no clip).")  # fmt: skip
    with svg_drawing("clips") as drawing:
        axes = drawing.axes
        axes.plot(x, middle, color=COLORS[0], label="median unit", **marker(x))
        axes.plot(x, low, color=COLORS[1], linewidth=1, label="smallest", **marker(x))
        axes.set_ylim(0, 1.06)
        finish(axes, "sync", "clip factor")
    text = (
        f"Clip factors by sync: the median unit's is {number(float(np.nanmean(middle)), '.2f')} on "
        f"average, the smallest of all {number(float(np.nanmin(low)), '.2f')}."
    )
    return Chart("Clip factors", drawing.svg, text, "1 is no clip.")


def _seconds(run: MonitoredRun) -> Chart:
    x, table = _bars(_syncs(run), run.syncs.rows.column("seconds") * 1e3)
    parts = {name: table[:, place] for place, name in enumerate(SYNC_TIMES)}
    width = 0.85 * (x[1] - x[0] if x.size > 1 else 1)
    with svg_drawing("seconds") as drawing:
        axes = drawing.axes
        below = np.zeros_like(x)
        for color, name in ((4, "wait"), (5, "exchange"), (2, "outer")):
            axes.bar(x, parts[name], width, below, color=COLORS[color], label=name, linewidth=0)
            below = below + parts[name]
        axes.plot(x, parts["total"], ".", color=INK, markersize=4, label="total")
        axes.set_ylim(0, 1.05 * max(1e-9, float(max(below.max(), parts["total"].max()))))
        _whole_bars(axes, x, width)
        finish(axes, "sync", "milliseconds")
    share = run.syncs.share("exposed")
    exposed = f"; exposed {percent(share)} of the time" if share is not None else ""
    text = (
        "Time of each sync: waiting for other replicas, for the exchange, and the outer step"
        f"{exposed}."
    )
    note = "Bars: exposed time (replica 0). Points: start to last landing."
    return Chart("Time of syncs", drawing.svg, text, note)


def _bytes(run: MonitoredRun) -> Chart:
    sizes = run.syncs.rows.column("wire_bytes") / 1e6
    total = f"{number(run.syncs.sums['wire_bytes'] / 1e6, ',.2f')} in all {run.syncs.count}"
    title, note = "Bytes between replicas", "Payload; 1 MB = 10^6 bytes."
    if is_flat(sizes):
        text = f"{number(float(sizes[-1, 0]), ',.2f')} MB sent by a replica at every sync; {total}."
        return Chart(title, "", text, note)
    x, table = _bars(_syncs(run), sizes)
    width = 0.85 * (x[1] - x[0] if x.size > 1 else 1)
    with svg_drawing("bytes") as drawing:
        axes = drawing.axes
        axes.bar(x, table[:, 0], width, color=COLORS[0], linewidth=0)
        _whole_bars(axes, x, width)
        finish(axes, "sync", "MB sent by a replica")
    text = f"Megabytes that the ranks of one replica sent to other replicas in each sync; {total}."
    return Chart(title, drawing.svg, text, note)


def _by_sync(axes: Axes, run: MonitoredRun, table: Array) -> None:
    """A line for each replica, or a band."""
    x = _syncs(run)
    if table.shape[1] > MANY_REPLICAS:
        band(axes, x, table.T)
        return
    for replica, column in enumerate(table.T):
        axes.plot(x, column, color=COLORS[replica % len(COLORS)], linewidth=1, alpha=0.85,
                  label=f"replica {replica}", **marker(x))  # fmt: skip


def _syncs(run: MonitoredRun) -> Array:
    """Numbers of the syncs, one for each row; the last one where a row stands for several."""
    rounds: Array = run.syncs.rows.column("round")[:, 0]
    return rounds


def _bars(x: Array, table: Array) -> tuple[Array, Array]:
    """As many rows as there is room for bars, by means of neighbours."""
    step = -(-x.size // MOST_BARS)
    starts = range(0, x.size, step)
    return (
        np.array([x[i : i + step].mean() for i in starts]),
        np.array([table[i : i + step].mean(axis=0) for i in starts]),
    )


def _whole_bars(axes: Axes, x: Array, width: float) -> None:
    """The axis begins and ends with a bar."""
    axes.set_xlim(float(x[0]) - width / 2, float(x[-1]) + width / 2)


def _mark_rollbacks(axes: Axes, run: MonitoredRun) -> None:
    counts = run.syncs.rows.column("rollbacks")[:, 0]
    for number_, place in enumerate(_syncs(run)[counts > 0]):
        axes.axvline(place, color=COLORS[3], linewidth=1, alpha=0.7,
                     label=None if number_ else "roll-back")  # fmt: skip
