"""The HTML page of a run: one file without external resources."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.charts import make_charts
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.membership_chart import membership_charts
from megatron_edit.tools.monitor.run import MonitoredRun
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
from megatron_edit.tools.pages import render
from megatron_edit.tools.pages.texts import duration, megabytes, milliseconds, number, percent

TEMPLATE = Path(__file__).with_name("page.html")
MAX_CHANGES_SHOWN = 50
FILTERS = {each.__name__: each for each in (duration, megabytes, milliseconds, number, percent)}


def render_page(run: MonitoredRun) -> str:
    """Return the HTML page of a run.

    Args:
        run: read already, its `run.json` included.
    """
    facts, syncs = run.facts, run.syncs
    assert facts is not None
    charts = [*membership_charts(run), *make_charts(run)]
    values: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "syncs": syncs,
        "title": _title(run),
        "state": run.state,
        "state_text": run.state_text,
        "subtitle": _subtitle(run),
        "progress": run.progress,
        "loss": latest_loss(run),
        "speed_source": describe_speed_source(run),
        "weights": syncs.mean_weights(),
        "shares": syncs.anomaly_shares(),
        "elastic": _elastic_values(run) if facts.is_elastic else None,
        "findings": list_findings(run),
        "charts": [chart._replace(svg=Markup(chart.svg)) for chart in charts if chart.svg],
        "unchanged": [chart for chart in charts if not chart.svg],
        "versions": ", ".join(f"{name} {text}" for name, text in sorted(facts.versions.items()))
        + f"; host {facts.host}.",
        "command": shlex.join(facts.argv),
        "made": f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(run.read_at))} from "
        f"{run.folder.resolve()}",
    }
    return render(TEMPLATE, values, FILTERS)


def _elastic_values(run: MonitoredRun) -> dict[str, Any]:
    """Return the values of the template that only an elastic run has."""
    membership = run.membership
    changes = membership.changes[-MAX_CHANGES_SHOWN:]
    members = {replica.name for replica in run.members}
    return {
        "members": describe_members(run),
        "news": describe_news(run),
        "changes": [change_cells(run, change) for change in reversed(changes)],
        "earlier_changes": len(membership.changes) - len(changes),
        "is_member": {replica.name: replica.name in members for replica in run.replicas},
        "share": membership.share,
        "replicas": sorted(run.replicas, key=lambda replica: replica.name),
    }


def _title(run: MonitoredRun) -> str:
    """Return strategy, model, machine and date of the start.

    The date is the earlier one of `run.json` and the first sync: a copied file may be newer.
    """
    facts = run.facts
    assert facts is not None
    model = model_of(facts.argv)
    what = f" of {model}" if model else ""
    known = [at for at in (run.began_at, run.syncs.first_time) if at is not None]
    date = time.strftime("%Y-%m-%d", time.localtime(min(known, default=run.read_at)))
    return f"{facts.strategy.name}: training{what} on {facts.host}, {date}"


def _subtitle(run: MonitoredRun) -> str:
    """Return layout, sync schedule and the time since the last sync and the last write."""
    assert run.facts is not None
    parts = [describe_layout(run.facts), describe_schedule(run.facts), describe_resumes(run)]
    if run.syncs.last_time is not None and not run.is_over:
        parts.append(f"last sync {duration(max(0.0, run.read_at - run.syncs.last_time))} ago")
    if not run.is_over:
        parts.append(f"last write {duration(run.silence)} ago")
    return "; ".join(part for part in parts if part) + "."
