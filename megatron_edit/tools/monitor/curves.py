"""The progress of a run as curves over tokens: seconds, losses, bytes."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from megatron_edit.observe.records import VALIDATION
from megatron_edit.tools.compare.console_log import NUM_EXCLUDED_ITERATIONS
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.pages.charts import EMPTY, Curve, RunCurves


def curves_of(name: str, run: MonitoredRun) -> RunCurves:
    """Return the curves of a run."""
    facts = run.facts
    found = [each.loss for each in run.evaluations.values()
             if each.split == VALIDATION and math.isfinite(each.loss)]  # fmt: skip
    scale = facts.seq_length if facts.has_unequal_steps else facts.batch_tokens
    seconds = _scaled(_clock(run), scale)
    known = [replica.losses for replica in run.replicas if replica.steps]
    training = run.losses if run.losses[0].size or not known else known[0]
    sent = np.cumsum(run.syncs.values(lambda sync: sync.wire_bytes))
    iterations = run.syncs.values(lambda sync: sync.iteration)
    return RunCurves(
        name,
        seconds=seconds,
        training=_scaled(training, scale),
        validation=_scaled(run.validation, scale),
        sent=_scaled((iterations, sent), facts.batch_tokens),
        final_loss=fmean(found) if found else None,
        speed=_speed(seconds, facts.warmup_steps, facts.batch_tokens),
        local=[step * facts.batch_tokens
               for step in (facts.warmup_steps, facts.last_local_step or facts.train_iters)],
        exposed=sum((sync.seconds[:3] for sync in run.syncs.records
                     if facts.has_local_steps(sync.iteration)), np.zeros(3)),
    )  # fmt: skip


def _scaled(curve: Curve, scale: float) -> Curve:
    return curve[0] * scale, curve[1]


def _speed(curve: Curve, warmup_steps: int, batch: int) -> float | None:
    """Return tokens per second after the warm-up; of all steps where there are none.

    Without evaluations, saves and the first steps, but with syncs. None where not known.
    """
    tokens, seconds = curve
    if tokens.size < 2:
        return None
    first_steps = tokens[0] + NUM_EXCLUDED_ITERATIONS * batch
    for start in (max(first_steps, warmup_steps * batch), first_steps, 0):
        kept = tokens >= start
        if kept.sum() >= 2:
            length = float(np.ptp(seconds[kept]))
            return float(np.ptp(tokens[kept])) / length if length > 0 else None
    return None


def _clock(run: MonitoredRun) -> Curve:
    """Return seconds of training by place on the x axis of the run's charts.

    Replicas that are present at the same time take equally long for the same progress; those of an
    elastic run come and go.
    """
    curves = [(x, y) for x, y in (replica.paces for replica in run.replicas) if x.size]
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
