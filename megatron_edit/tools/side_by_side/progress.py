"""The progress of a run as curves over tokens: seconds, losses, bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from megatron_edit.observe.records import VALIDATION, Array
from megatron_edit.tools.compare.console_log import NUM_EXCLUDED_ITERATIONS
from megatron_edit.tools.compare.pictures import Curve, smoothed
from megatron_edit.tools.compare.readings import Point
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.series import Bins

EMPTY: Curve = (np.empty(0), np.empty(0))


@dataclass(frozen=True, eq=False)
class RunCurves:
    """One of several runs. Tokens are those of all replicas together since the start.

    Attributes:
        name: of the run.
        run: read already.
        tokens_per_x: tokens per x value of the run's own charts; None in files of old versions.
        seconds: of training by tokens, without the first step of each process, evaluations and
            saves.
        training, validation: losses by tokens.
        sent: bytes that one replica has sent to others in syncs, by tokens.
    """

    name: str
    run: MonitoredRun
    tokens_per_x: int | None
    seconds: Curve
    training: Curve
    validation: Curve
    sent: Curve

    @classmethod
    def of(cls, name: str, run: MonitoredRun) -> RunCurves:
        """Return the curves of a run; they are empty where tokens are not known."""
        facts = run.facts
        assert facts is not None
        if not facts.batch_size or not facts.seq_length:
            return cls(name, run, None, EMPTY, EMPTY, EMPTY, EMPTY)
        scale = facts.seq_length * (1 if run.is_plotted_by_samples else facts.batch_size)
        return cls(
            name, run, scale,
            seconds=_scaled(_clock(run), scale),
            training=_scaled(_losses(run).curve(), scale),
            validation=_scaled(run.validation.curve(), scale),
            sent=_scaled(_sent(run), facts.seq_length * facts.batch_size),
        )  # fmt: skip

    @property
    def tokens(self) -> float | None:
        """Consumed so far; None where not known."""
        facts = self.run.facts
        if facts is None or not facts.batch_size or not facts.seq_length:
            return None
        samples = self.run.samples
        if samples is None:
            samples = self.run.iteration * facts.batch_size
        return float(samples * facts.seq_length)

    @property
    def speed(self) -> float | None:
        """Tokens per second of all replicas after the warm-up; of all steps where there are none.

        Without evaluations, saves and the first steps, but with syncs. None where not known.
        """
        tokens, seconds = self.seconds
        facts = self.run.facts
        if tokens.size < 2 or facts is None:
            return None
        batch = (facts.batch_size or 0) * (facts.seq_length or 0)
        first_steps = tokens[0] + NUM_EXCLUDED_ITERATIONS * batch
        for start in (max(first_steps, facts.warmup_steps * batch), first_steps, tokens[0]):
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

    def smoothed(self, width: float) -> Curve:
        """Return the training loss as a moving mean.

        Args:
            width: of the window, tokens.
        """
        points = zip(*(values.tolist() for values in self.training), strict=True)
        return smoothed([Point(0, tokens, 0.0, loss) for tokens, loss in points], width)

    @property
    def final_loss(self) -> float | None:
        """Validation loss of the last evaluation, mean over the validation sets."""
        found = [each for each in self.run.evaluations.values()
                 if each.split == VALIDATION and math.isfinite(each.loss)]  # fmt: skip
        return fmean(each.loss for each in found) if found else None


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
    sizes, iterations = rows.column("wire_bytes")[:, 0], rows.column("iteration")[:, 0]
    merged = np.full(sizes.size, rows.width)
    merged[-1] = rows.count - rows.width * (sizes.size - 1)
    return iterations, np.cumsum(sizes * merged)
