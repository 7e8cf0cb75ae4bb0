"""The terminal view of a run: one frame, from the event files as read so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_edit.errors import to_one_line
from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.run import RUNNING, MonitoredRun
from megatron_edit.tools.monitor.summary import (
    change_cells,
    describe_layout,
    describe_members,
    describe_news,
    describe_resumes,
    describe_schedule,
    describe_speed_source,
    latest_loss,
)
from megatron_edit.tools.pages.texts import (
    UNKNOWN,
    duration,
    megabytes,
    milliseconds,
    number,
    percent,
)

MAX_REPLICAS_SHOWN = 8
NUM_SYNCS_SHOWN = 6
NUM_CHANGES_SHOWN = 4
STATE_STYLES: Mapping[str, str] = {
    "running": "green", "finished": "green", "lost": "yellow", "stopped": "yellow",
    "waiting": "yellow", "failed": "red",
}  # fmt: skip
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def render_frame(run: MonitoredRun, folder: Path) -> RenderableType:
    """Return one frame.

    Args:
        run: read just before.
        folder: `--edit-log-dir`.
    """
    if run.facts is None:
        return Text(to_one_line(f"waiting for {folder / 'run.json'}"), style="yellow")
    parts: list[RenderableType] = [_header(run), _progress(run)]
    if run.is_elastic:
        parts += [*_members(run), _named_replicas(run)]
    else:
        parts.append(_replicas(run))
    if run.syncs.count:
        parts.append(_syncs(run))
    for finding in list_findings(run):
        parts.append(Text(f"{finding.level}: {finding.text}", style=STYLES[finding.level]))
    return Group(*parts)


def _header(run: MonitoredRun) -> RenderableType:
    facts = run.facts
    assert facts is not None
    parts = (
        model_of(facts.argv),
        describe_layout(facts),
        describe_schedule(facts),
        describe_resumes(run),
    )
    return Text.assemble(
        (facts.strategy.name, "bold"), "  ",
        (run.state_text, f"bold {STATE_STYLES[run.state]}"),
        "  " + "; ".join(part for part in parts if part),
    )  # fmt: skip


def _progress(run: MonitoredRun) -> RenderableType:
    facts = run.facts
    assert facts is not None
    total = f" of {facts.train_iters:,}" if facts.train_iters else ""
    texts = [f"iteration {run.iteration:,}{total}", f"loss {number(latest_loss(run), '.4f')}"]
    for data, evaluation in run.evaluations.items():
        texts.append(f"{data} loss {number(evaluation.loss, '.4f')}")
    source = (
        "" if run.num_with_speed in (0, len(run.members)) else f" ({describe_speed_source(run)})"
    )
    texts.append(f"{number(run.speed, ',.0f')} tokens/s{source}")
    if run.state == RUNNING:
        texts.append(f"{duration(run.remaining_seconds)} left")
    row = Table.grid(padding=(0, 2))
    if run.progress is not None:
        row.add_row(ProgressBar(total=1.0, completed=run.progress, width=20), "  ".join(texts))
    else:
        row.add_row("  ".join(texts))
    return row


def _replicas(run: MonitoredRun) -> RenderableType:
    """Return the table of the replicas; of the slowest ones where there are many."""
    step = "replica step" if run.has_unequal_steps else "iteration"
    table = _table("replica", step, "loss", "tokens/s", "between syncs", "left out")
    shown = sorted(run.replicas, key=_known_speed)[:MAX_REPLICAS_SHOWN]
    shares = run.syncs.anomaly_shares() if run.syncs.count else None
    for replica in sorted(shown, key=lambda each: each.number):
        table.add_row(
            str(replica.number), f"{replica.step:,}", number(replica.loss, ".4f"),
            number(replica.speed, ",.0f"),
            number(replica.speed_between_syncs, ",.0f"),
            UNKNOWN if shares is None else percent(float(shares[replica.number])),
        )  # fmt: skip
    if len(run.replicas) > len(shown):
        table.caption = f"the slowest {len(shown)} of {len(run.replicas)}"
        table.caption_justify = "left"
    return table


def _members(run: MonitoredRun) -> Iterator[RenderableType]:
    """Yield the members of an elastic run, and the last changes."""
    news = describe_news(run)
    yield Text(describe_members(run) + (f". Since the last sync: {news}" if news else ""))
    changes = run.membership.changes[-NUM_CHANGES_SHOWN:]
    if len(run.membership.changes) < 2:
        return
    table = _table("time", "first sync", "epoch", "came", "left", "members")
    for change in changes:
        table.add_row(*map(escape, change_cells(run, change)))
    if earlier := len(run.membership.changes) - len(changes):
        table.caption = f"{earlier:,} earlier change{'s' if earlier > 1 else ''} of the epoch"
        table.caption_justify = "left"
    yield table


def _named_replicas(run: MonitoredRun) -> RenderableType:
    """Return the table of the replicas of an elastic run; the slowest members where many."""
    members = {replica.name for replica in run.members}
    table = _table("replica", "member", "syncs", "replica step", "loss", "tokens/s",
                   "between syncs", "left out")  # fmt: skip
    by_speed = sorted(run.replicas, key=lambda r: (r.name not in members, _known_speed(r)))
    shown = by_speed[:MAX_REPLICAS_SHOWN]
    shares = run.syncs.anomaly_shares()
    for replica in sorted(shown, key=lambda each: each.name):
        is_member = replica.name in members
        table.add_row(
            replica.name, "yes" if is_member else "no",
            percent(run.membership.share(replica.name)), f"{replica.step:,}",
            number(replica.loss, ".4f"), number(replica.speed if is_member else None, ",.0f"),
            number(replica.speed_between_syncs, ",.0f"), percent(float(shares[replica.number])),
        )  # fmt: skip
    if len(run.replicas) > len(shown):
        table.caption = f"{len(shown)} of {len(run.replicas)}, the slowest members first"
        table.caption_justify = "left"
    return table


def _known_speed(replica: Replica) -> float:
    for speed in (replica.speed_between_syncs, replica.speed):
        if math.isfinite(speed):
            return speed
    return math.inf


def _syncs(run: MonitoredRun) -> RenderableType:
    table = _table("sync", "iteration", "norms", "effective", "clip", "left out", "rolled back",
                   "wait ms", "exposed ms", "MB")  # fmt: skip
    for cells in _sync_cells(run):
        table.add_row(*cells)
    table.caption = (
        f"{run.syncs.count:,} syncs; exposed {percent(run.syncs.share('exposed'))} of "
        f"the time; {megabytes(run.syncs.sums['wire_bytes'])} MB between replicas in total"
    )
    table.caption_justify = "left"
    return table


def _sync_cells(run: MonitoredRun) -> Iterator[list[str]]:
    for sync in list(run.syncs.recent)[-NUM_SYNCS_SHOWN:]:
        replicas = sync.num_replicas if run.is_elastic else len(run.replicas)
        yield [
            f"{sync.round:,}", f"{sync.iteration:,}",
            f"{number(sync.norm_min)} - {number(sync.norm_max)}",
            f"{number(sync.effective, '.2f')} of {replicas}", number(sync.clip, ".2f"),
            str(sync.anomalies), str(sync.rollbacks), milliseconds(sync.wait),
            milliseconds(sync.exposed), megabytes(sync.wire_bytes),
        ]  # fmt: skip


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for title in titles:
        table.add_column(title, justify="right")
    return table
