"""What a run shows on the page and in the terminal: texts, tables and quantities."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.flags import FLAG_PREFIXES, flag, format_value
from megatron_edit.observe.records import VALIDATION, SyncRecord
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.monitor.files import Facts
from megatron_edit.tools.monitor.findings import how_left, list_findings
from megatron_edit.tools.monitor.membership import MembershipChange
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.syncs import effective_replicas
from megatron_edit.tools.pages import LEVELS, Column, Table
from megatron_edit.tools.pages.charts import RunCurves, smoothing_tokens
from megatron_edit.tools.pages.drawing import smoothed
from megatron_edit.tools.pages.texts import (
    MAX_NAMES_SHOWN,
    UNKNOWN,
    clock_time,
    duration,
    join_names,
    megabytes,
    milliseconds,
    number,
    percent,
    plural,
)

MAX_RESUMES_SHOWN = 8
SHOWN_LEVELS = LEVELS[:2]  # errors and warnings
UNSET, GIVEN = "unset", "on"
LEFT_OUT = ("log_dir",)  # differs in any case


# ---- texts


def describe_layout(facts: Facts) -> str:
    """Return the numbers of replicas and ranks, and the device."""
    elastic = "elastic, nominally " if facts.is_elastic else ""
    replicas, ranks = plural(facts.num_replicas, "replica"), plural(facts.ranks_per_replica, "rank")
    return f"{elastic}{replicas} x {ranks} on {facts.device}"


def describe_schedule(facts: Facts) -> str:
    """Return when replicas sync."""
    if facts.strategy.endless_warmup:
        return "gradients are averaged at every step"
    if facts.num_choices == 0:
        return f"warm-up {facts.warmup_steps} steps, then syncs as chosen at its end"
    is_timed = facts.strategy.is_timed
    interval = f"{facts.config['sync_seconds']:g} s" if is_timed else f"{facts.sync_interval} steps"
    delayed = f", landing {plural(facts.delay_steps, 'step')} later" if facts.delay_steps else ""
    delayed += " (chosen in the warm-up)" if facts.num_choices else ""
    final = ""
    if facts.last_local_step is not None:
        what = "parameters" if facts.is_elastic else "gradients"
        final = f"; after step {facts.last_local_step} {what} are averaged at every step"
    return f"warm-up {facts.warmup_steps} steps, then a sync every {interval}{delayed}{final}"


def describe_run(run: MonitoredRun) -> str:
    """Return layout, schedule, and how often and where the training was resumed."""
    parts = [describe_layout(run.facts), describe_schedule(run.facts)]
    if run.resumed_at:
        shown = ", ".join(f"{iteration:,}" for iteration in run.resumed_at[:MAX_RESUMES_SHOWN])
        more = ", ..." if len(run.resumed_at) > MAX_RESUMES_SHOWN else ""
        times = "once" if len(run.resumed_at) == 1 else f"{len(run.resumed_at)} times"
        parts.append(f"resumed {times}, after iteration {shown}{more}")
    return "; ".join(parts)


def describe_speed(run: MonitoredRun) -> str:
    """Return the present speed, and of which replicas it is if some are not known."""
    known, total = run.num_with_speed, len(run.members)
    source = ""
    if known not in (0, total):
        source = f" (all replicas, estimated from {known} of {total})"
        if run.speed is None:
            source = f" (not known: only {known} of {total} replicas are seen here)"
    return f"{number(run.speed, ',.0f')}{source}"


def describe_iteration(run: MonitoredRun) -> str:
    """Return the iteration and the length of the training."""
    return f"{run.iteration:,} of {run.facts.train_iters:,}"


def describe_members(run: MonitoredRun) -> str:
    """Return members, epoch and leader of an elastic run, and what no sync shows yet."""
    members = join_names([replica.name for replica in run.members]) or "none"
    epoch = f"epoch {run.membership.epoch}" if run.membership.members else "before the first sync"
    leader = (
        "give --state-dir of the hub to see the leader"
        if run.journal is None
        else f"leader: {run.journal.leader or 'none'}"
    )
    news = _news(run)
    return f"Members: {members} ({epoch}); {leader}." + (
        f" Since the last sync: {news}." if news else ""
    )


def _news(run: MonitoredRun) -> str:
    """Return what the hub's journal has that no sync shows yet; empty if there is nothing."""
    journal = run.journal
    if journal is None or run.is_over:
        return ""
    leaves = journal.leaves_since(run.membership.epoch)[-MAX_NAMES_SHOWN:]
    parts = [f"{each.name} has left ({each.reason}, {clock_time(each.time)})" for each in leaves]
    if journal.joining:
        parts.append(f"{join_names(sorted(journal.joining))} joining")
    return "; ".join(parts)


# ---- tables


def replica_table(run: MonitoredRun, most: int | None = None) -> Table:
    """Return the table of the replicas; where there are more than `most`, of the slowest ones."""
    is_elastic, members = run.is_elastic, run.members

    def rank(replica: Replica) -> tuple[bool, float]:
        known = filter(math.isfinite, (replica.speed_between_syncs(run.facts), replica.speed))
        return replica not in members, next(known, math.inf)

    found = sorted(run.replicas, key=rank)
    shown = sorted(found[:most], key=lambda each: each.name if is_elastic else each.number)
    count = len(run.replicas)
    weights = run.syncs.by_replica(lambda sync: sync.weights.mean(axis=0), count)
    shares = run.syncs.anomaly_shares(count)
    rows = []
    for each in shown:
        is_member, own = each in members, weights[:, each.number]
        own = own[np.isfinite(own)]
        part = ["yes" if is_member else "no", percent(run.membership.share(each.name))]
        rows.append([
            each.name, *(part if is_elastic else ()),
            number(each.step if each.steps else None, ","), number(each.loss, ".4f"),
            number(each.speed if is_member else None, ",.0f"),
            number(each.mean_speed, ",.0f"),
            number(each.speed_between_syncs(run.facts), ",.0f"),
            number(own.mean() if own.size else None, ".3f"),
            percent(shares[each.number] if run.syncs.count else None),
        ])  # fmt: skip
    step = "replica step" if run.facts.has_unequal_steps else "iteration"
    head = ["replica", *(("member", "syncs") if is_elastic else ()), step, "loss", "tokens/s now",
            "on average", "between syncs", "weight", "left out"]  # fmt: skip
    caption = f"The slowest {len(shown)} of {len(found)}." if len(found) > len(shown) else ""
    return Table("Replicas", head, rows, caption)


def sync_table(run: MonitoredRun, most: int) -> Table:
    """Return the table of the last syncs; its cells have no spaces at which a terminal wraps."""
    head = ("sync", "iteration", "norms", "effective", "clip", "left out", "rolled back",
            "wait ms", "exposed ms", "total ms", "MB sent")  # fmt: skip
    syncs = run.syncs
    caption = (
        f"{plural(syncs.count, 'sync')}; exposed {percent(syncs.share('exposed'))} of the "
        f"time; {megabytes(syncs.sent_bytes)} MB sent by a replica in total."
    )
    return Table("Last syncs", head, [_sync_cells(sync) for sync in syncs.records[-most:]], caption)


def _sync_cells(sync: SyncRecord) -> list[str]:
    norms, clip = sync.norms[np.isfinite(sync.norms)], sync.clip[np.isfinite(sync.clip)]
    lowest, highest = (norms.min(), norms.max()) if norms.size else (None, None)
    seconds = dict(zip(SYNC_TIMES, sync.seconds.tolist(), strict=True))
    return [
        f"{sync.round:,}", f"{sync.iteration:,}", f"{number(lowest)}-{number(highest)}",
        f"{np.median(effective_replicas(sync)):.2f}/{sync.weights.shape[1]}",
        number(np.median(clip) if clip.size else None, ".2f"),
        str(int(sync.anomalous.sum())), str(int(sync.rollback.sum())),
        *(milliseconds(seconds[name]) for name in ("wait", "exposed", "total")),
        megabytes(sync.wire_bytes),
    ]  # fmt: skip


def change_table(run: MonitoredRun, most: int) -> Table:
    """Return the table of the last changes of an elastic run's members."""
    changes = run.membership.changes
    rows = [_change_cells(run, change) for change in changes[-most:]]
    earlier = len(changes) - len(rows)
    caption = f"{plural(earlier, 'earlier change')} of the epoch." if earlier else ""
    head = ("time", "first sync", "epoch", "came", "left", "members")
    return Table("Changes of the members", head, rows, caption)


def _change_cells(run: MonitoredRun, change: MembershipChange) -> list[str]:
    left = [f"{span.name} ({how_left(run, span)})" for span in change.left]
    return [
        clock_time(change.time), f"{change.round:,}", f"{change.epoch:,}",
        join_names(change.came) or UNKNOWN, join_names(left) or UNKNOWN,
        f"{len(change.members):,}",
    ]  # fmt: skip


# ---- quantities


@dataclass(frozen=True, eq=False)
class ResultColumn:
    """One run among those that are put side by side."""

    run: MonitoredRun
    curves: RunCurves
    base: float | None  # final validation loss of the first run; None for that run
    width: float  # tokens over which training losses are averaged


def result_columns(runs: Sequence[MonitoredRun], curves: Sequence[RunCurves]) -> list[ResultColumn]:
    """Return the columns of the results; losses are compared with those of the first run."""
    width, first = smoothing_tokens(curves), curves[0].final_loss
    return [
        ResultColumn(run, own, None if own is curves[0] else first, width)
        for run, own in zip(runs, curves, strict=True)
    ]


def _training_loss(column: ResultColumn) -> str:
    losses = smoothed(*column.curves.training, column.width)[1]
    return number(float(losses[-1]) if losses.size else column.run.latest_loss, ".4f")


def _tokens(column: ResultColumn) -> str:
    progress = column.run.progress
    shown = f"{column.run.tokens / 1e6:,.4g}"
    return f"{shown} ({percent(progress)})" if progress not in (None, 1.0) else shown


def _seconds(column: ResultColumn) -> str:
    seconds = column.curves.seconds[1]
    return duration(float(seconds[-1])) if seconds.size else UNKNOWN


def _evaluations(column: ResultColumn) -> str:
    found = column.run.evaluations.items()
    texts = [f"{data} {number(each.loss, '.4f')}" for data, each in found if data != VALIDATION]
    return "; ".join(texts) or UNKNOWN


def _difference(column: ResultColumn) -> str:
    loss = column.curves.final_loss
    return UNKNOWN if loss is None or column.base is None else f"{loss - column.base:+.4f}"


def _bytes(column: ResultColumn) -> str:
    syncs = column.run.syncs
    return f"{megabytes(syncs.sent_bytes)} in {syncs.count:,}" if syncs.count else UNKNOWN


def _effective(column: ResultColumn) -> str:
    recent = column.run.syncs.records[-1:]
    if not recent or recent[0].weights.shape[1] < 2:
        return UNKNOWN
    return f"{np.median(effective_replicas(recent[0])):.2f} of {recent[0].weights.shape[1]}"


def _rejected(column: ResultColumn) -> str:
    syncs = column.run.syncs
    if not syncs.count:
        return UNKNOWN
    back = f", {plural(syncs.num_rollbacks, 'roll-back')}" if syncs.num_rollbacks else ""
    return f"{syncs.num_anomalies:,}{back}"


def _problems(column: ResultColumn) -> str:
    found = Counter(finding.level for finding in list_findings(column.run))
    return (
        ", ".join(plural(found[level], level) for level in SHOWN_LEVELS if found[level]) or "none"
    )


QUANTITIES: tuple[Column[ResultColumn], ...] = (
    Column("strategy", "value of --edit-strategy", lambda one: one.run.facts.strategy.name),
    Column("state", "running, finished, stopped, failed, or lost: no new lines are written",
           lambda one: one.run.state_text),
    Column("iteration", "of the furthest replica; complete batches of all replicas where they make "
           "unequal steps", lambda one: describe_iteration(one.run)),
    Column("million tokens", "consumed by all replicas together, and the share of the training "
           "where it is not complete", _tokens),
    Column("time", "of training, without start-up, evaluations and saves", _seconds),
    Column("time left", "at the present speed", lambda one: duration(one.run.remaining_seconds)),
    Column("validation loss", "nats per token, of the last evaluation",
           lambda one: number(one.curves.final_loss, ".4f")),
    Column("difference", "of that loss to the first run's", _difference),
    Column("other losses", "of the last evaluation on each other data set", _evaluations),
    Column("training loss", "nats per token, at the end, smoothed like the curves",
           _training_loss),
    Column("tokens/s", "of all replicas together, after the warm-up, without start-up, "
           "evaluations and saves", lambda one: number(one.curves.speed, ",.0f")),
    Column("tokens/s now", "of all replicas together, in the last steps",
           lambda one: describe_speed(one.run)),
    Column("exposed", "share of the time between syncs in which training waited for a sync; with a "
           "hub of the rounds between warm-up and final phase",
           lambda one: percent(one.run.syncs.share("exposed"))),
    Column("waiting", "the part of it spent waiting for other replicas",
           lambda one: percent(one.run.syncs.share("wait"))),
    Column("MB in syncs", "(10^6 bytes) payload sent by one replica in all syncs; steps that "
           "average gradients are not included", _bytes),
    Column("MB inside a replica", "gradients and parameters that its data-parallel ranks exchange "
           "in a step, computed", lambda one: megabytes(one.run.facts.inside_bytes or None)),
    Column("outer state, MB", "of one replica, all of its ranks together",
           lambda one: megabytes(one.run.syncs.state_bytes or None)),
    Column("effective replicas", "1 / sum of squared weights, of the median unit at the last sync",
           _effective),
    Column("rejected updates", "units of replicas that were left out of a sync, and units that "
           "went back to their anchor", _rejected),
    Column("problems", "errors and warnings, listed beside the results", _problems),
)  # fmt: skip


# ---- several runs


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a part of each path by which they differ: one folder, if possible the last one.

    `a/log` and `b/log` are `a` and `b`.

    Raises:
        UsageError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for place, folder in enumerate(folders):
        if paths[place] in paths[:place]:
            raise UsageError(str(folder), "is given twice", "give each run once")
    while len({path.name for path in paths}) == 1 and all(path.name for path in paths):
        paths = [path.parent for path in paths]
    whole = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
    depth = min(len(path.parts) for path in paths)
    single = ([path.parts[-place] for path in paths] for place in range(1, depth))
    names = next((found for found in single if len(set(found)) == len(found)), whole)
    return [to_one_line(name) for name in names]


def differing_settings(runs: Sequence[Facts]) -> dict[str, list[str]]:
    """Return what differs: layout, EDiT's settings as used, Megatron's flags as given, versions."""
    tables = [_settings(facts) for facts in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    found = {name: [table.get(name, UNSET) for table in tables] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _settings(facts: Facts) -> Mapping[str, str]:
    given = canonical(facts.argv)
    script = given.pop("", [])
    return {
        "layout": describe_layout(facts),
        "script": PurePath(script[0]).name if script else UNSET,
        **{flag(name): format_value(value, none=UNSET)
           for name, value in facts.config.items() if name not in LEFT_OUT},
        **{name: " ".join(values) or GIVEN for name, values in given.items()
           if not name.startswith(FLAG_PREFIXES)},  # EDiT's are compared as used, not as given
        **{f"version of {name}": version for name, version in facts.versions.items()},
        "host": facts.host,
    }  # fmt: skip
