"""The page of a run: one HTML file without anything from outside."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.charts import charts_of
from megatron_edit.tools.monitor.findings import findings_of
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import layout, loss_of, resumes, rhythm, whose_speed
from megatron_edit.tools.pages import render
from megatron_edit.tools.pages.texts import duration, megabytes, milliseconds, number, percent

TEMPLATE = Path(__file__).with_name("page.html")
FILTERS = {each.__name__: each for each in (duration, megabytes, milliseconds, number, percent)}


def page_of(run: MonitoredRun) -> str:
    """The page.

    Args:
        run: that has been read, with its `run.json`.
    """
    facts, syncs = run.facts, run.syncs
    assert facts is not None
    charts = list(charts_of(run))
    weights = shares = np.full(len(run.replicas), math.nan)
    if syncs.count:
        weights = np.nanmean(syncs.rows.column("replica_weight"), axis=0)
        shares = syncs.anomaly_shares()
    values: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "syncs": syncs,
        "title": _title(run),
        "state": run.state,
        "state_text": run.state_text,
        "subtitle": _subtitle(run),
        "progress": run.progress,
        "loss": loss_of(run),
        "whose_speed": whose_speed(run),
        "weights": weights,
        "shares": shares,
        "findings": findings_of(run),
        "charts": [chart._replace(svg=Markup(chart.svg)) for chart in charts if chart.svg],
        "unchanged": [chart for chart in charts if not chart.svg],
        "versions": ", ".join(f"{name} {text}" for name, text in sorted(facts.versions.items()))
        + f"; host {facts.host}.",
        "command": shlex.join(facts.argv),
        "made": f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(run.read_at))} from "
        f"{run.folder.resolve()}",
    }
    return render(TEMPLATE, values, FILTERS)


def _title(run: MonitoredRun) -> str:
    """Strategy, model, machine and the date on which it began: a copied file may be younger than
    the first sync."""
    facts = run.facts
    assert facts is not None
    model = model_of(facts.argv)
    what = f" of {model}" if model else ""
    known = [at for at in (run.began_at, run.syncs.first_time) if at is not None]
    date = time.strftime("%Y-%m-%d", time.localtime(min(known, default=run.read_at)))
    return f"{facts.strategy.name}: training{what} on {facts.host}, {date}"


def _subtitle(run: MonitoredRun) -> str:
    """Layout, rhythm and the newest news, in a sentence."""
    assert run.facts is not None
    parts = [layout(run.facts), rhythm(run.facts), resumes(run)]
    if run.syncs.last_time is not None and not run.is_over:
        parts.append(f"last sync {duration(max(0.0, run.read_at - run.syncs.last_time))} ago")
    if not run.is_over:
        parts.append(f"last news {duration(run.silence)} ago")
    return "; ".join(part for part in parts if part) + "."
