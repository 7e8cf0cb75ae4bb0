"""The page of a run: one HTML file without anything from outside."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.charts import charts_of
from megatron_edit.tools.monitor.findings import findings_of
from megatron_edit.tools.monitor.run import RUNNING, MonitoredRun
from megatron_edit.tools.monitor.summary import layout, loss_of, resumes, rhythm, whose_speed
from megatron_edit.tools.monitor.texts import (
    UNKNOWN,
    duration,
    megabytes,
    milliseconds,
    number,
    percent,
)
from megatron_edit.tools.pages.rendering import render

TEMPLATE = Path(__file__).with_name("page.html")
SYNC_HEAD = (
    "sync", "after iteration", "norm: smallest", "median", "largest", "effective replicas",
    "clip", "left out", "rolled back", "wait (ms)", "exposed (ms)", "total (ms)", "MB sent",
)  # fmt: skip


class Tile(NamedTuple):
    """A number that everybody looks for first."""

    title: str
    value: str
    more: str = ""


def page_of(run: MonitoredRun) -> str:
    """The page.

    Args:
        run: that has been read, with its `run.json`.
    """
    from markupsafe import Markup  # comes with jinja2

    facts = run.facts
    assert facts is not None
    charts = list(charts_of(run))
    values: dict[str, Any] = {
        "title": title(run),
        "state": run.state,
        "state_text": run.state_text,
        "subtitle": subtitle(run),
        "progress": run.progress,
        "tiles": list(tiles(run)),
        "findings": findings_of(run),
        "charts": [chart._replace(svg=Markup(chart.svg)) for chart in charts if chart.svg],
        "unchanged": [chart for chart in charts if not chart.svg],
        "replica_head": replica_head(run),
        "replica_rows": list(replica_rows(run)),
        "sync_head": SYNC_HEAD,
        "sync_rows": list(sync_rows(run)),
        "versions": ", ".join(f"{name} {text}" for name, text in sorted(facts.versions.items()))
        + f"; host {facts.host}.",
        "command": shlex.join(facts.argv),
        "settings": [(name, "unset" if value is None else str(value))
                     for name, value in sorted(facts.config.items())],
        "made": f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(run.read_at))} from "
        f"{run.folder.resolve()}",
    }  # fmt: skip
    return render(TEMPLATE, values)


def title(run: MonitoredRun) -> str:
    """Strategy, model, machine and date."""
    facts = run.facts
    assert facts is not None
    model = model_of(facts.argv)
    what = f" of {model}" if model else ""
    return f"{facts.strategy.name}: training{what} on {facts.host}, {date(run)}"


def date(run: MonitoredRun) -> str:
    """On which it began: a copied file may be younger than the first sync."""
    known = [at for at in (run.began_at, run.syncs.first_time) if at is not None]
    began_at = min(known, default=run.read_at)
    return time.strftime("%Y-%m-%d", time.localtime(began_at))


def subtitle(run: MonitoredRun) -> str:
    """Layout, rhythm and the newest news, in a sentence."""
    assert run.facts is not None
    parts = [layout(run.facts), rhythm(run.facts), resumes(run)]
    if run.syncs.last_time is not None:
        age = duration(max(0.0, run.read_at - run.syncs.last_time))
        parts.append("" if run.is_over else f"last sync {age} ago")
    if not run.is_over:
        parts.append(f"last news {duration(run.silence)} ago")
    return "; ".join(part for part in parts if part) + "."


def tiles(run: MonitoredRun) -> Iterator[Tile]:
    """The numbers at the top."""
    facts, syncs = run.facts, run.syncs
    assert facts is not None
    total = f"of {facts.train_iters:,}" if facts.train_iters else ""
    if run.progress is not None:
        total += f" ({percent(run.progress)})"
    yield Tile("iteration", f"{run.iteration:,}", total)
    if run.state == RUNNING:
        yield Tile("time left", duration(run.remaining_seconds), "at the present speed")
    yield Tile("training loss", number(loss_of(run), ".4f"), "mean over the replicas")
    for data, evaluation in run.evaluations.items():
        yield Tile(f"{data} loss", number(evaluation.loss, ".4f"),
                   f"after iteration {evaluation.iteration:,}")  # fmt: skip
    when = "in the newest steps" if run.is_over else "at present"
    yield Tile("tokens/s", number(run.speed, ",.0f"), f"{whose_speed(run)}, {when}")
    if not syncs.count:
        return
    yield Tile("syncs", f"{syncs.count:,}", duration(syncs.elapsed) + " from first to last")
    if len(run.replicas) > 1:
        yield Tile("effective replicas", number(syncs.recent[-1].effective, ".2f"),
                   f"of {len(run.replicas)}, at the last sync")  # fmt: skip
    left_out, back = int(syncs.sums["anomalies"]), int(syncs.sums["rollbacks"])
    yield Tile("left out", f"{left_out:,}", f"replica-units; {back:,} roll-backs")
    yield Tile("exposed", percent(syncs.share("exposed")), "of the time between syncs")
    yield Tile("MB between replicas", megabytes(syncs.sums["wire_bytes"] / syncs.count),
               "sent by a replica per sync")  # fmt: skip
    if facts.inside_bytes:
        yield Tile("MB inside a replica", megabytes(facts.inside_bytes), "per step, computed")
    if syncs.state_bytes:
        yield Tile("outer state, MB", megabytes(syncs.state_bytes), "of a replica")


def replica_head(run: MonitoredRun) -> tuple[str, ...]:
    """Names of its columns: where replicas make different numbers of steps, each has its own."""
    step = "replica step" if run.has_own_steps else "iteration"
    return ("replica", step, "loss", "tokens/s now", "tokens/s in all", "between syncs",
            "mean weight", "left out")  # fmt: skip


def replica_rows(run: MonitoredRun) -> Iterator[list[str]]:
    """A line for each replica."""
    weights = run.syncs.rows.column("replica_weight")
    for replica in run.replicas:
        number_, has_syncs = replica.number, bool(run.syncs.count)
        shares = run.syncs.anomaly_shares() if has_syncs else None
        yield [
            str(number_),
            f"{replica.step:,}" if replica.num_iterations else UNKNOWN,
            number(replica.loss, ".4f"),
            number(replica.speed, ",.0f"),
            number(replica.mean_speed, ",.0f"),
            number(replica.speed_between_syncs, ",.0f"),
            number(float(np.nanmean(weights[:, number_])), ".3f") if has_syncs else UNKNOWN,
            UNKNOWN if shares is None else percent(float(shares[number_])),
        ]


def sync_rows(run: MonitoredRun) -> Iterator[list[str]]:
    """The newest syncs, newest first."""
    for sync in reversed(run.syncs.recent):
        yield [
            f"{sync.round:,}", f"{sync.iteration:,}", number(sync.norm_min),
            number(sync.norm_median), number(sync.norm_max), number(sync.effective, ".2f"),
            number(sync.clip, ".2f"), str(sync.anomalies), str(sync.rollbacks),
            milliseconds(sync.wait), milliseconds(sync.exposed), milliseconds(sync.total),
            megabytes(sync.wire_bytes),
        ]  # fmt: skip
