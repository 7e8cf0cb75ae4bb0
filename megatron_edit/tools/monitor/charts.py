"""The charts of a run, each with a sentence for screen readers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.observe.records import VALIDATION, Array
from megatron_edit.tools.monitor.membership import MembershipHistory
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.pages import Chart
from megatron_edit.tools.pages.charts import Band, LineChart, heat_map, name_rows
from megatron_edit.tools.pages.drawing import (
    COLORS,
    INK,
    PAPER,
    SVG_INCHES,
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

SMOOTH_SHARE = 50  # a running mean spans 1 / 50 of a curve
LOSS = "loss (nats per token)"
MAX_ROWS = 48  # of the chart of members
MAX_BARS = 256  # in a row, or lines of epochs; closer ones could not be told apart


# ---- over the length of a training


def loss_charts(run: MonitoredRun) -> list[Chart]:
    """Return training losses with validation losses, and validation losses alone."""
    curves = [replica.losses.curve() for replica in run.replicas]
    if not any(x.size for x, _ in curves):
        return []
    by_round = run.facts.has_one_loss_per_round
    chart = _over_training(run, "Loss", LOSS)
    chart.add_each(_labels(run, len(curves)), [(x, _smooth(y)) for x, y in curves])
    x, y = run.losses.curve()
    if x.size and len(curves) > 1:  # one per round is constant over the round
        chart.add("mean", x, y if by_round else _smooth(y),
                  drawstyle="steps-pre" if by_round else "default", marker="")  # fmt: skip
    x, y = run.validation.curve()
    if x.size:
        chart.add(VALIDATION, x, y, PAPER, marker="D", markeredgecolor=INK, markersize=5,
                  linestyle="", clip_on=False, zorder=3)  # fmt: skip
    note = "Lines: training, running means of neighbours."
    note += " Steps: means of rounds." if by_round else ""
    note += " Diamonds: validation." if x.size else ""
    found = [chart.draw(f"Training loss; at present {number(run.latest_loss, '.4f')}.", note)]
    if x.size > 1:
        chart = _over_training(run, "Validation loss", LOSS)
        chart.add("validation loss", x, y)
        first, last, lowest = (number(float(each), ".4f") for each in (y[0], y[-1], y.min()))
        text = f"Validation loss: {first} at first, {last} at last, {lowest} at its lowest."
        found.append(chart.draw(text))
    return found


def replica_charts(run: MonitoredRun) -> list[Chart]:
    """Return charts of who is slow, was left out, or was lost."""
    found = list(filter(None, [_member_chart(run)]))
    curves = [replica.speeds() for replica in run.replicas]
    means = [float(y.mean()) for _, y in curves if y.size]
    if means:
        chart = _over_training(run, "Speed of each replica", "thousand tokens/s")
        chart.share, chart.bottom = 1.0, 0
        chart.add_each(_labels(run, len(curves)), [(x, y / 1e3) for x, y in curves])
        slowest, fastest = number(min(means), ",.0f"), number(max(means), ",.0f")
        text = f"Tokens per second of each replica; on average {slowest} to {fastest}."
        note = "Medians of eight steps: a step with a sync takes as long as that of the slowest."
        found.append(chart.draw(text, note))
    if run.syncs.count:
        found += _norm_charts(run)
    return found


def _norm_charts(run: MonitoredRun) -> list[Chart]:
    rows, config, found = run.syncs.rows, run.facts.config, []
    norms, scores = rows.column("replica_norm"), rows.column("replica_z")
    known = np.isfinite(norms).any(axis=1)
    if len(run.replicas) > 1 and known.any():
        relative = np.full_like(norms, math.nan)
        relative[known] = norms[known] / np.nanmedian(norms[known], axis=1, keepdims=True)
        low, high = float(np.nanmin(relative)), float(np.nanmax(relative))
        chart = LineChart("Pseudo-gradient norms by replica", "sync", "norm (median replica: 1)")
        chart.is_logarithmic = high > 4
        _add_by_sync(chart, run, relative)
        found.append(chart.draw(
            "Mean norm of each replica, as a multiple of the median replica's: from "
            f"{number(low)} to {number(high)}."
        ))  # fmt: skip
    if not config["no_anomaly"] and np.isfinite(scores).any():
        threshold = config["anomaly_threshold"]
        chart = LineChart("Anomaly scores", "sync", "standard deviations")
        _add_by_sync(chart, run, np.clip(scores, -4 * threshold, 4 * threshold))
        x = _rounds(run)
        chart.add("left out above", x, np.full(x.size, threshold), COLORS[1], linestyle="--",
                  marker="")  # fmt: skip
        _mark_rollbacks(chart, run)
        found.append(chart.draw(
            f"Largest z score of each replica by sync; the highest is "
            f"{number(float(np.nanmax(scores)))}, and norms above {threshold:g} are left out.",
            f"Of the unit where it is largest; cut off at {4 * threshold:g}.",
        ))  # fmt: skip
    if run.syncs.sums["anomalies"]:
        pairs = np.maximum(1, rows.column("replica_pairs"))
        table = 100 * (rows.column("replica_anomalies") / pairs).T
        svg = heat_map("Left out", table, _rounds(run), _labels(run, len(table)),
                       "% of its units", clim=(0, 100), cmap="cividis")  # fmt: skip
        shares = run.syncs.anomaly_shares()
        text = (
            "Share of its units in which each replica was left out, by sync; most often replica "
            f"{run.name_of(int(np.argmax(shares)))}, in {percent(float(shares.max()))}."
        )
        found.append(Chart("Left out as anomalous", svg, text))
    return found


def _member_chart(run: MonitoredRun) -> Chart | None:
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
        name_rows(axes, [short_name(name) for name in names])
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


def _over_training(run: MonitoredRun, title: str, y: str) -> LineChart:
    """Return an empty chart with marks: end of warm-up, final synchronous phase, resumes."""
    facts = run.facts
    batch = (facts.batch_size or 1) if facts.is_plotted_by_samples else 1
    final = [] if facts.last_local_step is None else [facts.last_local_step]
    marks = (
        ([facts.warmup_steps], ":", "end of warm-up"),
        (final, "--", "final synchronous phase"),
        (run.resumed_at, "-.", "resumed"),
    )
    x = "samples of all replicas" if facts.is_plotted_by_samples else "iteration"
    chart = LineChart(title, x, y, share=0.98)
    for places, style, label in marks:
        found = [place * batch for place in places]
        chart.marks.append((found, label, {"color": INK, "linestyle": style}))
    return chart


def _labels(run: MonitoredRun, count: int) -> list[str]:
    """Return the names of the first columns; an earlier run may have had more replicas."""
    return [f"replica {short_name(run.name_of(number))}" for number in range(count)]


def _smooth(values: Array) -> Array:
    """Return a running mean whose width depends on the length of the curve."""
    return np.array(running_mean(values.tolist(), max(1, values.size // SMOOTH_SHARE)))


# ---- by sync


def sync_charts(run: MonitoredRun) -> list[Chart]:
    """Return charts of what syncs cost and do."""
    if not run.syncs.count:
        return []
    found = [_time_chart(run), _byte_chart(run), _unit_chart(run), _weight_chart(run)]
    return [chart for chart in (*found, _clip_chart(run)) if chart is not None]


def _time_chart(run: MonitoredRun) -> Chart:
    parts = dict(zip(SYNC_TIMES, run.syncs.rows.column("seconds").T * 1e3, strict=True))
    chart, x = LineChart("Time of syncs", "sync", "milliseconds", bottom=0), _rounds(run)
    below = np.zeros_like(x)
    for color, name in ((4, "wait"), (5, "exchange"), (2, "outer")):
        chart.bands.append(Band(name, x, below, below + parts[name], COLORS[color], is_bars=True))
        below = below + parts[name]
    chart.add("total", x, parts["total"], linestyle="", marker=".", markersize=4)
    whose = "the leader" if run.is_elastic else "replica 0"
    return chart.draw(
        "Time of each sync: waiting for other replicas, for the exchange, and the outer step.",
        f"Bars: exposed time ({whose}). Points: start to last landing.",
    )


def _byte_chart(run: MonitoredRun) -> Chart:
    chart, x = LineChart("Bytes between replicas", "sync", "MB sent by a replica"), _rounds(run)
    sizes, note = run.syncs.rows.vector("wire_bytes") / 1e6, "Payload; 1 MB = 10^6 bytes."
    chart.bands.append(Band("", x, np.zeros_like(x), sizes, COLORS[0], is_bars=True))
    if (size := chart.constant) is not None:
        return Chart(chart.title, "", f"{size:,.2f} MB sent by a replica at every sync.", note)
    return chart.draw("Megabytes that one replica sent to others in each sync.", note)


def _unit_chart(run: MonitoredRun) -> Chart:
    from matplotlib.colors import LogNorm

    table = _fill_gaps(run.syncs.rows.column("unit_norm")).T
    known = table[np.isfinite(table) & (table > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    svg = heat_map(
        "Unit norms",
        table,
        _rounds(run),
        list(run.syncs.units),
        "norm (in units of the parameters)",
        run.syncs.rows.column("unit_rollbacks").T,
        norm=LogNorm(low, max(high, low * 1.001)),
        cmap="viridis",
    )
    text = (
        "Norm of the pseudo-gradient of each unit, mean over the replicas, by sync: from "
        f"{number(low)} to {number(high)}."
    )
    note = "Units from first (top) to last; logarithmic colours. Crosses: roll-backs."
    return Chart("Pseudo-gradient norms by unit", svg, text, note)


def _weight_chart(run: MonitoredRun) -> Chart | None:
    rows, x = run.syncs.rows, _rounds(run)
    counts = rows.vector("num_replicas")
    if counts.max() < 2:
        return None
    middle, low, high = (rows.vector(f"effective{which}") for which in ("", "_min", "_max"))
    chart = LineChart("Effective number of replicas", "sync", "replicas", bottom=0)
    chart.bands.append(Band("all units", x, low, high, COLORS[2]))
    chart.add("median unit", x, middle, COLORS[2])
    if (constant := chart.constant) is not None:
        text = f"{constant:.2f} of {counts[-1]:g}, of each unit at every sync."
        return Chart(chart.title, "", text)
    style: dict[str, Any] = {"drawstyle": "steps-pre", "linewidth": 1, "marker": ""}
    if np.ptp(counts):
        chart.add("members", x, counts, INK, **style)
    chart.add("half", x, counts / 2, COLORS[1], linestyle="--", **style)
    _mark_rollbacks(chart, run)
    least, most = (f"{each:g}" for each in (counts.min(), counts.max()))
    return chart.draw(
        "Effective number of replicas, 1 / sum of squared weights, of "
        f"{most if least == most else f'{least} to {most}'}: the median unit has "
        f"{number(float(np.nanmean(middle)), '.2f')} on average.",
        "All replicas for equal weights, 1 where one replica has all the weight.",
    )


def _clip_chart(run: MonitoredRun) -> Chart | None:
    rows, x = run.syncs.rows, _rounds(run)
    low, middle = rows.vector("clip_min"), rows.vector("clip")
    if run.facts.config["no_clip"] or not np.isfinite(low).any():
        return None
    chart = LineChart("Clip factors", "sync", "clip factor", bottom=0)
    chart.add("median unit", x, middle, COLORS[0])
    chart.add("smallest", x, low, COLORS[1])
    if (constant := chart.constant) is not None:
        text = f"{constant:.2f} of each unit at every sync (1 is no clip)."
        return Chart(chart.title, "", text)
    return chart.draw(
        f"Clip factors by sync: the median unit's is {number(float(np.nanmean(middle)), '.2f')} on "
        f"average, the smallest of all {number(float(np.nanmin(low)), '.2f')}.",
        "1 is no clip.",
    )


def _rounds(run: MonitoredRun) -> Array:
    """Return the sync number of each row; the last one where a row merges several syncs."""
    return run.syncs.rows.vector("round")


def _add_by_sync(chart: LineChart, run: MonitoredRun, table: Array) -> None:
    """Add a line for each column of a table whose rows are syncs."""
    curves = [(_rounds(run), column) for column in table.T]
    chart.add_each(_labels(run, len(curves)), curves)


def _fill_gaps(table: Array) -> Array:
    """Fill gaps with the row before: with fragments a unit does not take part in every sync."""
    filled = table.copy()
    for row, before in zip(filled[1:], filled[:-1], strict=True):
        gaps = np.isnan(row)
        row[gaps] = before[gaps]
    return filled


def _mark_rollbacks(chart: LineChart, run: MonitoredRun) -> None:
    places = _rounds(run)[run.syncs.rows.vector("rollbacks") > 0]
    chart.marks.append((places.tolist(), "roll-back", {"color": COLORS[3], "alpha": 0.7}))
