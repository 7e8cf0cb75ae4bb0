"""The charts of a run, each with a sentence for screen readers."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.observe.records import VALIDATION, Array
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.syncs import effective_replicas
from megatron_edit.tools.pages import Chart
from megatron_edit.tools.pages.charts import PARTS, Band, Curve, LineChart, heat_map, thinned
from megatron_edit.tools.pages.drawing import COLORS, INK, PAPER, smoothed
from megatron_edit.tools.pages.texts import (
    join_names,
    number,
    percent,
    plural,
    short_name,
)

SMOOTH_SHARE = 50  # a running mean spans 1 / 50 of a curve
SPEED_POINTS = 128
LOSS = "loss (nats per token)"


# ---- over the length of a training


def loss_charts(run: MonitoredRun) -> list[Chart]:
    """Return training losses with validation losses, and validation losses alone."""
    curves = [replica.losses for replica in run.replicas]
    if not any(x.size for x, _ in curves):
        return []
    by_round = run.facts.has_one_loss_per_round
    chart = _over_training(run, "Loss", LOSS)
    chart.add_each(_labels(run), [_smooth(curve) for curve in curves])
    if run.losses[0].size and len(curves) > 1:  # one per round is constant over the round
        curve = run.losses if by_round else _smooth(run.losses)
        style = "steps-pre" if by_round else "default"
        chart.add("mean", *curve, drawstyle=style, marker="")
    x, y = run.validation
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
    medians = [thinned(SPEED_POINTS, *replica.medians[:3]) for replica in run.replicas]
    curves = [(x, tokens / np.maximum(seconds, 1e-9)) for x, tokens, seconds in medians]
    means = [float(y.mean()) for _, y in curves if y.size]
    if means:
        chart = _over_training(run, "Speed of each replica", "thousand tokens/s")
        chart.share, chart.bottom = 1.0, 0
        chart.add_each(_labels(run), [(x, y / 1e3) for x, y in curves])
        slowest, fastest = number(min(means), ",.0f"), number(max(means), ",.0f")
        text = f"Tokens per second of each replica; on average {slowest} to {fastest}."
        note = "Medians of eight steps: a step with a sync takes as long as that of the slowest."
        found.append(chart.draw(text, note))
    if run.syncs.count:
        found += filter(None, [_norm_chart(run), _score_chart(run), _rejection_chart(run)])
    return found


def _norm_chart(run: MonitoredRun) -> Chart | None:
    norms = run.syncs.by_replica(lambda sync: np.nanmean(sync.norms, axis=0), len(run.replicas))
    known = np.isfinite(norms).any(axis=1)
    if len(run.replicas) < 2 or not known.any():
        return None
    norms[known] /= np.nanmedian(norms[known], axis=1, keepdims=True)
    low, high = float(np.nanmin(norms)), float(np.nanmax(norms))
    chart = LineChart("Pseudo-gradient norms by replica", "sync", "norm (median replica: 1)")
    chart.is_logarithmic = high > 4
    chart.add_each(_labels(run), [(_rounds(run), column) for column in norms.T])
    return chart.draw(
        "Mean norm of each replica, as a multiple of the median replica's: from "
        f"{number(low)} to {number(high)}."
    )


def _score_chart(run: MonitoredRun) -> Chart | None:
    config, x = run.facts.config, _rounds(run)
    scores = run.syncs.by_replica(lambda sync: np.nanmax(sync.z, axis=0), len(run.replicas))
    if config["no_anomaly"] or not np.isfinite(scores).any():
        return None
    threshold = config["anomaly_threshold"]
    chart = LineChart("Anomaly scores", "sync", "standard deviations")
    limited = np.clip(scores, -4 * threshold, 4 * threshold)
    chart.add_each(_labels(run), [(x, column) for column in limited.T])
    line = np.full(x.size, threshold)
    chart.add("left out above", x, line, COLORS[1], linestyle="--", marker="")
    _mark_rollbacks(chart, run)
    return chart.draw(
        f"Largest z score of each replica by sync; the highest is "
        f"{number(float(np.nanmax(scores)))}, and norms above {threshold:g} are left out.",
        f"Of the unit where it is largest; cut off at {4 * threshold:g}.",
    )


def _rejection_chart(run: MonitoredRun) -> Chart | None:
    if not run.syncs.num_anomalies:
        return None
    names, count = _labels(run), len(run.replicas)
    table = 100 * run.syncs.by_replica(lambda sync: sync.anomalous.mean(axis=0), count).T
    svg = heat_map("Left out", table, _rounds(run), names, "% of its units", clim=(0, 100),
                   cmap="cividis")  # fmt: skip
    shares = run.syncs.anomaly_shares(count)
    text = (
        "Share of its units in which each replica was left out, by sync; most often "
        f"replica {run.replicas[int(np.argmax(shares))].name}, in {percent(float(shares.max()))}."
    )
    return Chart("Left out as anomalous", svg, text)


def _member_chart(run: MonitoredRun) -> Chart | None:
    """Draw who took part in an elastic run, and with which weight."""
    if not run.is_elastic or not run.syncs.count:
        return None
    weights = run.syncs.by_replica(lambda sync: sync.weights.mean(axis=0), len(run.replicas))
    names = [short_name(replica.name) for replica in run.replicas]
    svg = heat_map("Members", weights.T, _rounds(run), names, "weight in the average",
                   cmap="viridis")  # fmt: skip
    text = (
        f"Members by sync: {len(run.membership.spans)} replicas in all, "
        f"{plural(len(run.membership.changes) - 1, 'change')} of the epoch; at the last sync "
        f"{join_names([replica.name for replica in run.members])}."
    )
    return Chart("Members", svg, text, "Empty where a replica was no member.")


def _over_training(run: MonitoredRun, title: str, y: str) -> LineChart:
    """Return an empty chart with marks: end of warm-up, final synchronous phase, resumes."""
    facts = run.facts
    batch = facts.batch_size if facts.has_unequal_steps else 1
    final = [] if facts.last_local_step is None else [facts.last_local_step]
    x = "samples of all replicas" if facts.has_unequal_steps else "iteration"
    chart = LineChart(title, x, y, share=0.98)
    for iterations, style, label in (([facts.warmup_steps], ":", "end of warm-up"),
                                     (final, "--", "final synchronous phase"),
                                     (run.resumed_at, "-.", "resumed")):  # fmt: skip
        places = [iteration * batch for iteration in iterations]
        chart.marks.append((places, label, {"color": INK, "linestyle": style}))
    return chart


def _labels(run: MonitoredRun) -> list[str]:
    return [f"replica {short_name(replica.name)}" for replica in run.replicas]


def _smooth(curve: Curve) -> Curve:
    """Return a running mean of a long curve; a short one as it is."""
    x, y = curve
    if x.size < 2 * SMOOTH_SHARE:
        return curve
    return smoothed(x, y, float(np.ptp(x)) / SMOOTH_SHARE)


# ---- by sync


def sync_charts(run: MonitoredRun) -> list[Chart]:
    """Return charts of what syncs cost and do."""
    if not run.syncs.count:
        return []
    found = [_time_chart(run), _byte_chart(run), _unit_chart(run), _weight_chart(run)]
    return [chart for chart in (*found, _clip_chart(run)) if chart is not None]


def _time_chart(run: MonitoredRun) -> Chart:
    *parts, _, total = run.syncs.values(lambda sync: 1e3 * sync.seconds).T
    chart, x = LineChart("Time of syncs", "sync", "milliseconds", bottom=0), _rounds(run)
    for name, own, top in zip(SYNC_TIMES[:3], parts, np.cumsum(parts, axis=0), strict=True):
        chart.bands.append(Band(name, x, top - own, top, PARTS[name], is_bars=True))
    chart.add("total", x, total, linestyle="", marker=".", markersize=4)
    whose = "the leader" if run.is_elastic else "replica 0"
    return chart.draw(
        "Time of each sync: waiting for other replicas, for the exchange, and the outer step.",
        f"Bars: exposed time ({whose}). Points: start to last landing.",
    )


def _byte_chart(run: MonitoredRun) -> Chart:
    chart, x = LineChart("Bytes between replicas", "sync", "MB sent by a replica"), _rounds(run)
    sizes = run.syncs.values(lambda sync: sync.wire_bytes / 1e6)
    note = "Payload; 1 MB = 10^6 bytes."
    chart.bands.append(Band("", x, np.zeros_like(x), sizes, COLORS[0], is_bars=True))
    if (size := chart.constant) is not None:
        return Chart(chart.title, "", f"{size:,.2f} MB sent by a replica at every sync.", note)
    return chart.draw("Megabytes that one replica sent to others in each sync.", note)


def _unit_chart(run: MonitoredRun) -> Chart:
    from matplotlib.colors import LogNorm

    table = _fill_gaps(run.syncs.by_unit(lambda sync: np.nanmean(sync.norms, axis=1))).T
    known = table[np.isfinite(table) & (table > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    svg = heat_map(
        "Unit norms",
        table,
        _rounds(run),
        run.syncs.units,
        "norm (in units of the parameters)",
        run.syncs.by_unit(lambda sync: sync.rollback).T,
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
    x, counts = _rounds(run), run.syncs.values(lambda sync: sync.weights.shape[1])
    if counts.max() < 2:
        return None
    found = run.syncs.values(lambda sync: np.quantile(effective_replicas(sync), (0.5, 0, 1)))
    middle, low, high = found.T
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
        f"{number(float(middle.mean()), '.2f')} on average.",
        "All replicas for equal weights, 1 where one replica has all the weight.",
    )


def _clip_chart(run: MonitoredRun) -> Chart | None:
    clips = run.syncs.values(lambda sync: np.nanquantile(sync.clip, (0.5, 0)))
    x, (middle, low) = _rounds(run), clips.T
    if run.facts.config["no_clip"] or not np.isfinite(low).any():
        return None
    chart = LineChart("Clip factors", "sync", "clip factor", bottom=0)
    chart.add("median unit", x, middle, COLORS[0])
    chart.add("smallest", x, low, COLORS[1])
    if (constant := chart.constant) is not None:
        return Chart(chart.title, "", f"{constant:.2f} of each unit at every sync (1 is no clip).")
    return chart.draw(
        f"Clip factors by sync: the median unit's is {number(float(np.nanmean(middle)), '.2f')} on "
        f"average, the smallest of all {number(float(np.nanmin(low)), '.2f')}.",
        "1 is no clip.",
    )


def _rounds(run: MonitoredRun) -> Array:
    return run.syncs.values(lambda sync: sync.round)


def _fill_gaps(table: Array) -> Array:
    """Fill gaps with the row before: with fragments a unit does not take part in every sync."""
    filled = table.copy()
    for row, before in zip(filled[1:], filled[:-1], strict=True):
        gaps = np.isnan(row)
        row[gaps] = before[gaps]
    return filled


def _mark_rollbacks(chart: LineChart, run: MonitoredRun) -> None:
    places = _rounds(run)[run.syncs.values(lambda sync: sync.rollback.any()) > 0]
    chart.marks.append((places.tolist(), "roll-back", {"color": COLORS[3], "alpha": 0.7}))
