"""What all charts are made of: the record of one, lines of replicas or their band, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.series import Array
from megatron_edit.tools.pages.drawing import COLORS, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_REPLICAS = 8  # more of them are drawn as a band
FLAT_SHARE = 0.005  # on an axis from zero, a curve that varies by less is a flat line


class Chart(NamedTuple):
    """One picture, or only its sentence where all values are the same.

    Attributes:
        title: what it shows.
        svg: the picture; empty where there is nothing to see in it.
        text: what is to be seen, in a sentence.
        note: how it is to be read; may be empty.
    """

    title: str
    svg: str
    text: str
    note: str = ""


def replica_curves(axes: Axes, curves: Sequence[tuple[Array, Array]]) -> None:
    """A line each where there are few, else the band from the lowest to the highest."""
    if len(curves) <= MANY_REPLICAS:
        for replica, (x, y) in enumerate(curves):
            axes.plot(x, y, color=COLORS[replica % len(COLORS)], linewidth=1, alpha=0.75,
                      label=f"replica {replica}" if len(curves) > 1 else None)  # fmt: skip
        return
    places = max((x for x, _ in curves), key=len)
    known = [(x, y) for x, y in curves if x.size]
    table = np.array([np.interp(places, x, y) for x, y in known])
    band(axes, places, table)


def band(axes: Axes, x: Array, table: Array) -> None:
    """Lowest to highest row, and the median row."""
    known = np.isfinite(table).any(axis=0)  # scores are not there before detectors are armed
    x, table = x[known], table[:, known]
    axes.fill_between(x, np.nanmin(table, axis=0), np.nanmax(table, axis=0), alpha=0.3,
                      color=COLORS[0], linewidth=0, label="all replicas")  # fmt: skip
    axes.plot(x, np.nanmedian(table, axis=0), color=COLORS[0], label="median replica")


def band_note(run: MonitoredRun, what: str) -> str:
    """How a band is to be read; empty where there is none."""
    many = len(run.replicas) > MANY_REPLICAS
    return f"The band goes from the lowest {what} to the highest." if many else ""


def marker(x: Array) -> dict[str, Any]:
    """A line of few points has marks: one point alone would not be seen."""
    return {"marker": "o", "markersize": 3.5} if x.size <= 12 else {}


def is_flat(*columns: Array) -> bool:
    """Whether a picture of these would show a flat line and nothing else."""
    values = np.concatenate([column[np.isfinite(column)] for column in columns])
    if values.size < 2:
        return False
    return bool(np.ptp(values) <= FLAT_SHARE * np.abs(values).max())


def finish(axes: Axes, x: str, y: str) -> None:
    """Name both axes, and say below the picture what the lines are."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    first, last = axes.get_xlim()
    if last - first < 1:  # of a single point
        axes.set_xlim(first - 0.5, last + 0.5)
    legend_below(axes)
