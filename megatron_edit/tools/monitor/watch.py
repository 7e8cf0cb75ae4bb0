"""The terminal view of a run: one frame, from the event files as read so far."""

from __future__ import annotations

from collections.abc import Mapping

import rich.table
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.text import Text

from megatron_edit.errors import to_one_line
from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.run import RUNNING, MonitoredRun
from megatron_edit.tools.monitor.summary import (
    change_table,
    describe_iteration,
    describe_members,
    describe_run,
    describe_speed,
    replica_table,
    sync_table,
)
from megatron_edit.tools.pages import Table
from megatron_edit.tools.pages.texts import duration, number

LEFT_OUT = ("on average", "weight", "total ms")  # columns of the page: too wide
NUM_REPLICAS_SHOWN, NUM_SYNCS_SHOWN, NUM_CHANGES_SHOWN = 8, 6, 4
STATE_STYLES: Mapping[str, str] = {
    "running": "green", "finished": "green", "lost": "yellow", "stopped": "yellow",
    "waiting": "yellow", "failed": "red",
}  # fmt: skip
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def render_frame(run: MonitoredRun) -> RenderableType:
    """Return one frame of a run that was read just before."""
    if not run.has_begun:
        return Text(to_one_line(f"waiting for {run.folder / 'run.json'}"), style="yellow")
    parts: list[RenderableType] = [_header(run), _progress(run)]
    if run.is_elastic:
        parts.append(Text(describe_members(run)))
        if len(run.membership.changes) > 1:
            parts.append(_table(change_table(run, NUM_CHANGES_SHOWN)))
    parts.append(_table(replica_table(run, NUM_REPLICAS_SHOWN)))
    if run.syncs.count:
        parts.append(_table(sync_table(run, NUM_SYNCS_SHOWN)))
    findings = (
        Text(f"{each.level}: {each.text}", style=STYLES[each.level]) for each in list_findings(run)
    )
    return Group(*parts, *findings)


def _header(run: MonitoredRun) -> RenderableType:
    model = model_of(run.facts.argv)
    return Text.assemble(
        (run.facts.strategy.name, "bold"), "  ",
        (run.state_text, f"bold {STATE_STYLES[run.state]}"),
        f"  {f'{model}; ' if model else ''}{describe_run(run)}",
    )  # fmt: skip


def _progress(run: MonitoredRun) -> RenderableType:
    texts = [
        f"iteration {describe_iteration(run)}",
        f"loss {number(run.latest_loss, '.4f')}",
        *(f"{data} loss {number(each.loss, '.4f')}" for data, each in run.evaluations.items()),
        f"tokens/s {describe_speed(run)}",
    ]
    if run.state == RUNNING:
        texts.append(f"{duration(run.remaining_seconds)} left")
    row = rich.table.Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=1.0, completed=run.progress or 0.0, width=20), "  ".join(texts))
    return row


def _table(table: Table) -> RenderableType:
    shown = rich.table.Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1),
        caption=table.caption or None, caption_justify="left",
    )  # fmt: skip
    places = [place for place, title in enumerate(table.head) if title not in LEFT_OUT]
    for place in places:
        shown.add_column(table.head[place], justify="right")
    for row in table.rows:
        shown.add_row(*(escape(row[place]) for place in places))
    return shown
