"""The picture of who took part in an elastic run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from megatron_edit.tools.monitor.charts import MAX_LABELS, Chart
from megatron_edit.tools.monitor.membership import MembershipHistory, MemberSpan
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import short_name
from megatron_edit.tools.pages.drawing import COLORS, INK, SVG_INCHES, legend_below, svg_drawing
from megatron_edit.tools.pages.texts import join_names, time_unit

MAX_ROWS = 48
MAX_BARS = 256  # in a row, or lines of epochs; closer ones could not be told apart


class MemberBar(NamedTuple):
    """A time in which a replica was a member, in the unit of the picture.

    Attributes:
        start, end: since the first sync.
        has_joined: whether it was no member before.
        has_left: whether it was no member after.
    """

    start: float
    end: float
    has_joined: bool
    has_left: bool


def membership_charts(run: MonitoredRun) -> Iterator[Chart]:
    """Yield the picture, if there is a time to show."""
    membership, length = run.membership, run.syncs.elapsed
    if membership.count < 2 or length <= 0:
        return
    scale, unit = time_unit(length)
    rows = _rows(membership)
    height = float(np.clip(1.3 + 0.24 * len(rows), 2.4, 1.3 * SVG_INCHES[1]))
    with svg_drawing("members", height=height) as drawing:
        axes = drawing.axes
        axes.grid(visible=False, axis="y")
        for place, name in enumerate(rows):
            bars = _bars(membership.spans[name], length, scale)
            spans = [(bar.start, bar.end - bar.start) for bar in bars]
            axes.broken_barh(spans, (place - 0.32, 0.64), facecolors=COLORS[5])
            for bar in bars:
                _mark(drawing.axes, bar, place)
        for start in _epoch_starts(membership, scale):
            axes.axvline(start, color=INK, linewidth=0.8, linestyle=":", zorder=0)
        every = math.ceil(len(rows) / MAX_LABELS)
        axes.set_yticks(range(0, len(rows), every), [short_name(name) for name in rows[::every]])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-0.02 * length / scale, 1.02 * length / scale)
        axes.set_xlabel(f"{unit} of training since the first sync")
        _add_legend(axes)
    yield Chart("Members", drawing.svg, _text(run), _note(membership, rows))


def _rows(membership: MembershipHistory) -> list[str]:
    """Return the replicas that are shown, by name: those that came and went are preferred."""
    spans = membership.spans
    changing = [name for name in spans if not _is_constant(membership, name)]
    constant = [name for name in spans if _is_constant(membership, name)]
    return sorted([*sorted(changing), *sorted(constant)][:MAX_ROWS])


def _is_constant(membership: MembershipHistory, name: str) -> bool:
    return membership.num_syncs[name] == membership.count


def _bars(spans: Sequence[MemberSpan], length: float, scale: float) -> list[MemberBar]:
    """Return the bars of a row; those with a gap that could not be seen are joined."""
    bars: list[MemberBar] = []
    for span in spans:
        start, end = span.start / scale, span.end / scale
        has_left = span.next_round is not None
        if bars and start - bars[-1].end < length / scale / MAX_BARS:
            bars[-1] = bars[-1]._replace(end=end, has_left=has_left)
        else:
            bars.append(MemberBar(start, end, span.start > 0, has_left))
    return bars


def _mark(axes: Axes, bar: MemberBar, place: int) -> None:
    """Mark where a replica came and left."""
    if bar.has_joined:
        axes.plot(bar.start, place, ">", color=COLORS[2], markersize=6, zorder=3)
    if bar.has_left:
        axes.plot(bar.end, place, "X", color=COLORS[1], markersize=6, zorder=3)


def _epoch_starts(membership: MembershipHistory, scale: float) -> list[float]:
    """Return where epochs begin, without the first; at most `MAX_BARS` places."""
    places = [change.start / scale for change in membership.changes[1:]]
    return places[:: math.ceil(len(places) / MAX_BARS) or 1]


def _add_legend(axes: Axes) -> None:
    axes.plot([], [], "s", color=COLORS[5], label="member")
    axes.plot([], [], ">", color=COLORS[2], label="came")
    axes.plot([], [], "X", color=COLORS[1], label="left")
    axes.plot([], [], ":", color=INK, linewidth=0.8, label="new epoch")
    legend_below(axes)


def _text(run: MonitoredRun) -> str:
    membership = run.membership
    changes = len(membership.changes) - 1
    names = join_names([replica.name for replica in run.members])
    return (
        f"Members by time: {len(membership.spans)} replicas in all, "
        f"{changes} change{'' if changes == 1 else 's'} of the epoch; at the last sync {names}."
    )


def _note(membership: MembershipHistory, rows: Sequence[str]) -> str:
    note = "As of the syncs, without the time between two runs."
    if hidden := len(membership.spans) - len(rows):
        note += f" {hidden} more replicas are not shown."
    return note
