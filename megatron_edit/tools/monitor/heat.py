"""Heat maps: norms by unit and sync, replicas left out by sync."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_edit.tools.monitor.series import Array
from megatron_edit.tools.monitor.syncs import Syncs
from megatron_edit.tools.pages.drawing import COLORS, SVG_INCHES, Drawing, svg_drawing

if TYPE_CHECKING:
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize

MOST_LABELS = 14
MOST_COLUMNS = 256


def norms_by_unit(syncs: Syncs) -> tuple[str, float, float]:
    """The picture, and the smallest and largest norm in it."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    columns = list(syncs.units.values())
    table = _filled(syncs.rows.column("unit_norm")[:, columns]).T
    rollbacks = syncs.rows.column("unit_rollbacks")[:, columns].T
    known = table[np.isfinite(table) & (table > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    with svg_drawing("norms", height=_height(len(table))) as drawing:
        scale = LogNorm(low, max(high, low * 1.001))
        bar = _draw(drawing, table, syncs, list(syncs.units), scale, "viridis",
                    "norm (in units of the parameters)")  # fmt: skip
        bar.locator = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
        bar.minorlocator = NullLocator()
        bar.formatter = StrMethodFormatter("{x:g}")
        bar.update_ticks()
        units, places = np.nonzero(np.nan_to_num(rollbacks))
        x = syncs.rows.column("round")[places, 0]
        drawing.axes.plot(x, units, "x", color=COLORS[1], markersize=4)
    return drawing.svg, low, high


def anomalies_by_replica(syncs: Syncs) -> str:
    """The picture."""
    from matplotlib.colors import Normalize

    left_out = syncs.rows.column("replica_anomalies")
    shares = 100 * (left_out / np.maximum(1, syncs.rows.column("replica_pairs"))).T
    names = [f"replica {replica}" for replica in range(len(shares))]
    with svg_drawing("anomalies", height=_height(len(shares))) as drawing:
        _draw(drawing, shares, syncs, names, Normalize(0, 100), "cividis", "% of its units")
    return drawing.svg


def _draw(
    drawing: Drawing,
    table: Array,
    syncs: Syncs,
    names: Sequence[str],
    scale: Normalize,
    colors: str,
    title: str,
) -> Colorbar:
    """Rows from the top down, syncs from left to right."""
    from matplotlib.ticker import MaxNLocator

    axes, rounds = drawing.axes, syncs.rows.column("round")[:, 0]
    axes.grid(visible=False)
    half = max(0.5, (rounds[-1] - rounds[0]) / max(1, rounds.size - 1) / 2)
    step = -(-table.shape[1] // MOST_COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        thinned = np.array([np.nanmean(table[:, i : i + step], axis=1)
                            for i in range(0, table.shape[1], step)]).T  # fmt: skip
    box = (rounds[0] - half, rounds[-1] + half, len(table) - 0.5, -0.5)
    image = axes.imshow(thinned, aspect="auto", interpolation="nearest", extent=box, norm=scale,
                        cmap=colors)  # fmt: skip
    every = math.ceil(len(names) / MOST_LABELS)
    axes.set_yticks(range(0, len(names), every), list(names)[::every])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.set_xlabel("sync")
    bar = drawing.figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label(title)
    bar.outline.set_visible(False)
    return bar


def _filled(table: Array) -> Array:
    """With fragments a unit has not met at every sync: it keeps the norm of its last one."""
    filled = table.copy()
    for row, before in zip(filled[1:], filled[:-1], strict=True):
        gaps = np.isnan(row)
        row[gaps] = before[gaps]
    return filled


def _height(num_rows: int) -> float:
    return float(np.clip(1.2 + 0.2 * num_rows, SVG_INCHES[1], 1.3 * SVG_INCHES[1]))
