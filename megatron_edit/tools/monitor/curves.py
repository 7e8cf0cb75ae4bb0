"""The pictures over the length of a training: losses and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_edit.tools.monitor.run import VALIDATION, MonitoredRun
from megatron_edit.tools.monitor.series import Array
from megatron_edit.tools.monitor.strokes import Chart, band_note, finish, marker, replica_curves
from megatron_edit.tools.monitor.texts import number
from megatron_edit.tools.pages.drawing import INK, PAPER, running_mean, svg_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_SHARE = 50  # a running mean takes that part of a curve
Curve = tuple[Array, Array]


@dataclass(frozen=True)
class Length:
    """How far a training has come, as an axis.

    Attributes:
        label: of the axis, with its unit.
        unit: iterations, or samples of all replicas, of one unit of the axis.
    """

    label: str
    unit: float

    @classmethod
    def of(cls, run: MonitoredRun, curves: Sequence[Curve]) -> Length:
        """By iteration, or by samples of all replicas, where their steps differ."""
        last = max((float(x[-1]) for x, _ in curves if x.size), default=0.0)
        name = "samples of all replicas" if run.is_by_samples else "iteration"
        for unit, word in ((1e6, "million"), (1e3, "thousand")):
            if run.is_by_samples and last >= 10 * unit:
                return cls(f"{word} {name}", unit)
        return cls(name, 1.0)

    def curve(self, curve: Curve) -> Curve:
        """A curve on this axis."""
        return curve[0] / self.unit, curve[1]


def loss_chart(run: MonitoredRun, curves: Sequence[Curve]) -> Chart:
    """Training loss of each replica, the mean, and validation losses.

    Args:
        run: of it.
        curves: iterations, or samples of all replicas, and losses of each replica.
    """
    length = Length.of(run, curves)
    with svg_drawing("losses") as drawing:
        axes = drawing.axes
        replica_curves(axes, [length.curve((x, _smooth(y))) for x, y in curves])
        x, y = length.curve(run.losses.curve())
        if x.size and len(curves) > 1:
            _mean(axes, run, x, y)
        highest = _limit(axes, [y for _, y in curves])
        x, y = length.curve(run.validation.curve())
        if x.size:
            x, y = x[y <= highest], y[y <= highest]
            axes.plot(x, y, "D", color=PAPER, markeredgecolor=INK, markersize=5,
                      label=VALIDATION, clip_on=False, zorder=3)  # fmt: skip
        _mark_events(axes, run, length)
        finish(axes, length.label, "loss (nats per token)")
    last = run.loss if math.isfinite(run.loss) else next(
        (r.loss for r in run.replicas if math.isfinite(r.loss)), math.nan)  # fmt: skip
    text = f"Training loss; at present {number(last, '.4f')}."
    note = f"Lines: training, running means of neighbours. {band_note(run, 'replica')}".strip()
    if run.has_one_loss_per_round:
        note += " Steps: means of whole rounds."
    if VALIDATION in run.evaluations:
        note += " Diamonds: validation."
    return Chart("Loss", drawing.svg, text, note)


def validation_chart(run: MonitoredRun) -> Chart | None:
    """Validation losses alone, on an axis of their own; None where there are fewer than two."""
    curve = run.validation.curve()
    if curve[0].size < 2:
        return None
    length = Length.of(run, [curve])
    x, y = length.curve(curve)
    with svg_drawing("validation") as drawing:
        axes = drawing.axes
        axes.plot(x, y, color=INK, label="validation loss", **marker(x))
        _mark_events(axes, run, length)
        _limit(axes, [y])
        finish(axes, length.label, "loss (nats per token)")
    text = (
        f"Validation loss: {number(float(y[0]), '.4f')} at first, {number(float(y[-1]), '.4f')} at "
        f"last, {number(float(y.min()), '.4f')} at its lowest."
    )
    return Chart("Validation loss", drawing.svg, text)


def speed_chart(run: MonitoredRun, curves: Sequence[Curve]) -> Chart:
    """Speed of each replica.

    Args:
        run: of it.
        curves: iterations, or samples of all replicas, and tokens per second of each replica.
    """
    length = Length.of(run, curves)
    with svg_drawing("speeds") as drawing:
        axes = drawing.axes
        replica_curves(axes, [length.curve((x, y / 1e3)) for x, y in curves])
        _mark_events(axes, run, length)
        axes.set_ylim(bottom=0)
        finish(axes, length.label, "thousand tokens/s")
    means = [float(y.mean()) for _, y in curves if y.size]
    text = (
        f"Tokens per second of each replica; on average {number(min(means), ',.0f')} to "
        f"{number(max(means), ',.0f')}."
    )
    note = "Medians of eight steps: a step with a sync in it is as long as that of the slowest."
    return Chart("Speed of each replica", drawing.svg, text, note)


def _mean(axes: Axes, run: MonitoredRun, x: Array, y: Array) -> None:
    """Mean over the replicas; where there is one of a whole round, it stands for all of it."""
    if run.has_one_loss_per_round:
        axes.plot(x, y, color=INK, linewidth=1.4, drawstyle="steps-pre", label="mean")
    else:
        axes.plot(x, _smooth(y), color=INK, linewidth=1.6, label="mean")


def _smooth(values: Array) -> Array:
    """A running mean, over a part of the curve."""
    return np.array(running_mean(values.tolist(), max(1, values.size // SMOOTH_SHARE)))


def _mark_events(axes: Axes, run: MonitoredRun, length: Length) -> None:
    """Vertical lines: the end of the warm-up, the begin of the final synchronous phase, and where
    the training was resumed."""
    assert run.facts is not None
    batch = (run.facts.batch_size or 1) if run.is_by_samples else 1
    first, last = axes.get_xlim()
    final = [] if run.facts.last_local_step is None else [run.facts.last_local_step]
    for places, style, label in (
        ([run.facts.warmup_steps], ":", "end of warm-up"),
        (final, "--", "final synchronous phase"),
        (run.resumed_at, "-.", "resumed"),
    ):
        shown = [place * batch / length.unit for place in places]
        for number_, place in enumerate(place for place in shown if first < place < last):
            axes.axvline(place, color=INK, linewidth=1, linestyle=style,
                         label=None if number_ else label)  # fmt: skip
    axes.set_xlim(first, last)


def _limit(axes: Axes, columns: Sequence[Array]) -> float:
    """Cut off what would press everything else flat: the first, high losses and rare peaks.

    Returns:
        the highest loss that is shown; infinite where all are.
    """
    values = np.concatenate([y for y in columns if y.size])
    low, usual, high = values.min(), np.quantile(values, 0.98), values.max()
    if values.size >= 50 and high - low > 2 * (usual - low) > 0:
        margin = 0.08 * (usual - low)
        axes.set_ylim(low - margin, usual + 3 * margin)
        return float(usual + 3 * margin)
    return math.inf
