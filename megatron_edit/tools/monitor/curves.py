"""The progress of a run as curves over tokens: seconds, losses, bytes."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from megatron_edit.observe.records import VALIDATION
from megatron_edit.tools.compare.console_log import NUM_EXCLUDED_ITERATIONS
from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.syncs import Bins
from megatron_edit.tools.pages.charts import EMPTY, Curve, RunCurves


def curves_of(name: str, run: MonitoredRun) -> RunCurves:
    """Return the curves of a run; they are empty where tokens are not known."""
    facts, batch = run.facts, run.facts.batch_tokens
    found = [each.loss for each in run.evaluations.values()
             if each.split == VALIDATION and math.isfinite(each.loss)]  # fmt: skip
    final_loss = fmean(found) if found else None
    if not batch or not facts.batch_size:
        return RunCurves(name, final_loss=final_loss)
    scale = batch / facts.batch_size if facts.is_plotted_by_samples else batch
    seconds = _scaled(_clock(run), scale)
    return RunCurves(
        name,
        seconds=seconds,
        training=_scaled(_losses(run).curve(), scale),
        validation=_scaled(run.validation.curve(), scale),
        sent=_scaled(_sent(run), batch),
        final_loss=final_loss,
        speed=_speed(seconds, facts, batch),
    )


def _scaled(curve: Curve, scale: float) -> Curve:
    return curve[0] * scale, curve[1]


def _speed(curve: Curve, facts: Facts, batch: int) -> float | None:
    """Return tokens per second after the warm-up; of all steps where there are none.

    Without evaluations, saves and the first steps, but with syncs. None where not known.
    """
    tokens, seconds = curve
    if tokens.size < 2:
        return None
    first_steps = tokens[0] + NUM_EXCLUDED_ITERATIONS * batch
    for start in (max(first_steps, facts.warmup_steps * batch), first_steps, 0):
        kept = tokens >= start
        if kept.sum() >= 2:
            length = float(np.ptp(seconds[kept]))
            return float(np.ptp(tokens[kept])) / length if length > 0 else None
    return None


def _losses(run: MonitoredRun) -> Bins:
    """Return the mean losses, those of the first replica with a file where there are none."""
    known = [replica.losses for replica in run.replicas if replica.num_iterations]
    return run.losses if run.losses.curve()[0].size or not known else known[0]


def _clock(run: MonitoredRun) -> Curve:
    """Return seconds of training by the x value of the run's charts.

    Replicas that are present at the same time take equally long for the same progress; those of an
    elastic run come and go.
    """
    curves = [replica.paces.curve() for replica in run.replicas]
    curves = [(x, y) for x, y in curves if x.size]
    if not curves:
        return EMPTY
    places = np.unique(np.concatenate([x for x, _ in curves]))
    sums, counts = np.zeros_like(places), np.zeros_like(places)
    for x, y in curves:
        index = np.searchsorted(x, places)  # a pace holds from the line before to its own
        is_known = (places >= x[0]) & (index < x.size)
        sums[is_known] += y[index[is_known]]
        counts += is_known
    paces = sums / np.maximum(1, counts)
    return places, np.cumsum(paces * np.diff(places, prepend=places[0]))


def _sent(run: MonitoredRun) -> Curve:
    """Return the bytes sent in syncs by the iteration of the sync."""
    rows = run.syncs.rows
    if not rows.count:
        return EMPTY
    sizes = rows.vector("wire_bytes")
    merged = np.full(sizes.size, rows.width)
    merged[-1] = rows.count - rows.width * (sizes.size - 1)
    return rows.vector("iteration"), np.cumsum(sizes * merged)
