"""The pictures by iteration: loss and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.series import Array
from megatron_edit.tools.monitor.strokes import Chart, band_note, finish, replica_curves
from megatron_edit.tools.monitor.texts import number
from megatron_edit.tools.pages.drawing import INK, running_mean, svg_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_SHARE = 50  # a running mean takes that part of a curve


def loss_chart(run: MonitoredRun, curves: Sequence[tuple[Array, Array]]) -> Chart:
    """Training loss of each replica, and the mean.

    Args:
        run: of it.
        curves: iterations and losses of each replica.
    """
    with svg_drawing("losses") as drawing:
        axes = drawing.axes
        replica_curves(axes, [(x, _smooth(y)) for x, y in curves])
        x, y = run.losses.curve()
        if x.size and len(curves) > 1:
            axes.plot(x, _smooth(y), color=INK, linewidth=1.6, label="mean")
        _mark_warmup(axes, run)
        _limit(axes, [y for _, y in curves])
        finish(axes, "iteration", "nats per token")
    last = run.loss if math.isfinite(run.loss) else next(
        (r.loss for r in run.replicas if math.isfinite(r.loss)), math.nan)  # fmt: skip
    text = f"Training loss by iteration; at present {number(last, '.4f')}."
    note = f"Running means of neighbours. {band_note(run, 'replica')}"
    return Chart("Training loss", drawing.svg, text, note)


def speed_chart(run: MonitoredRun, curves: Sequence[tuple[Array, Array]]) -> Chart:
    """Speed of each replica.

    Args:
        run: of it.
        curves: iterations and tokens per second of each replica.
    """
    with svg_drawing("speeds") as drawing:
        axes = drawing.axes
        replica_curves(axes, [(x, y / 1e3) for x, y in curves])
        _mark_warmup(axes, run)
        axes.set_ylim(bottom=0)
        finish(axes, "iteration", "thousand tokens/s")
    means = [float(y.mean()) for _, y in curves if y.size]
    text = (
        f"Tokens per second of each replica; on average {number(min(means), ',.0f')} to "
        f"{number(max(means), ',.0f')}."
    )
    note = "Medians of eight steps: a step with a sync in it is as long as that of the slowest."
    return Chart("Speed of each replica", drawing.svg, text, note)


def _smooth(values: Array) -> Array:
    """A running mean, over a part of the curve."""
    return np.array(running_mean(values.tolist(), max(1, values.size // SMOOTH_SHARE)))


def _mark_warmup(axes: Axes, run: MonitoredRun) -> None:
    assert run.facts is not None
    warmup = run.facts.warmup_steps
    if 0 < warmup < run.iteration:
        axes.axvline(warmup, color=INK, linewidth=1, linestyle=":", label="end of warm-up")


def _limit(axes: Axes, columns: Sequence[Array]) -> None:
    """Cut off what would press everything else flat: the first, high losses and rare peaks."""
    values = np.concatenate([y for y in columns if y.size])
    low, usual, high = values.min(), np.quantile(values, 0.98), values.max()
    if values.size >= 50 and high - low > 2 * (usual - low) > 0:
        margin = 0.08 * (usual - low)
        axes.set_ylim(low - margin, usual + 3 * margin)
