"""The progress of a run as curves over tokens: seconds, losses, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from megatron_edit.observe.records import VALIDATION, Array
from megatron_edit.tools.compare.console_log import NUM_EXCLUDED_ITERATIONS
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.syncs import Bins
from megatron_edit.tools.pages.drawing import EMPTY, Curve, smoothed

WIDTH_SHARE = 25  # training losses are means over 1/25 of the longest training


@dataclass(frozen=True, eq=False)
class RunCurves:
    """A run and its curves. Tokens are those of all replicas together since the start."""

    name: str
    run: MonitoredRun
    seconds: Curve = EMPTY  # without the first step of each process, evaluations and saves
    training: Curve = EMPTY
    validation: Curve = EMPTY
    sent: Curve = EMPTY  # bytes that one replica has sent to others in syncs

    @classmethod
    def of(cls, name: str, run: MonitoredRun) -> RunCurves:
        """Return the curves of a run; they are empty where tokens are not known."""
        facts = run.facts
        if not facts.batch_size or not facts.seq_length:
            return cls(name, run)
        batch = facts.batch_size * facts.seq_length
        scale = facts.seq_length if facts.is_plotted_by_samples else batch
        return cls(
            name, run,
            seconds=_scaled(_clock(run), scale),
            training=_scaled(_losses(run).curve(), scale),
            validation=_scaled(run.validation.curve(), scale),
            sent=_scaled(_sent(run), batch),
        )  # fmt: skip

    @property
    def speed(self) -> float | None:
        """Tokens per second of all replicas after the warm-up; of all steps where there are none.

        Without evaluations, saves and the first steps, but with syncs. None where not known.
        """
        tokens, seconds = self.seconds
        if tokens.size < 2:
            return None
        batch = self.run.facts.batch_tokens or 0
        first_steps = tokens[0] + NUM_EXCLUDED_ITERATIONS * batch
        for start in (max(first_steps, self.run.facts.warmup_steps * batch), first_steps, 0):
            kept = tokens >= start
            if kept.sum() >= 2:
                length = float(np.ptp(seconds[kept]))
                return float(np.ptp(tokens[kept])) / length if length > 0 else None
        return None

    def seconds_at(self, tokens: Array) -> Array:
        """Return seconds of training; NaN where no step has been timed."""
        if not self.seconds[0].size:
            return np.full_like(tokens, math.nan)
        seconds: Array = np.interp(tokens, *self.seconds)
        return seconds

    @property
    def final_loss(self) -> float | None:
        """Validation loss of the last evaluation, mean over the validation sets."""
        found = [each for each in self.run.evaluations.values()
                 if each.split == VALIDATION and math.isfinite(each.loss)]  # fmt: skip
        return fmean(each.loss for each in found) if found else None

    def training_loss(self, width: float) -> float:
        """Return the training loss at the end, mean over `width` tokens."""
        losses = smoothed(*self.training, width)[1]
        return float(losses[-1]) if losses.size else self.run.latest_loss


def smoothing_tokens(runs: Sequence[RunCurves]) -> float:
    """Return the tokens over which each training loss is averaged, in all runs."""
    return max((float(np.max(run.training[0], initial=0)) for run in runs), default=0) / WIDTH_SHARE


def _scaled(curve: Curve, scale: float) -> Curve:
    return curve[0] * scale, curve[1]


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
