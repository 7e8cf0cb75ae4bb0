"""Texts about a run that the page and the terminal share."""

from __future__ import annotations

import math
import time

from megatron_edit.observe.records import Ending
from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.membership import (
    MembershipChange,
    MemberSpan,
    describe_end,
    end_after,
)
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.pages.texts import MAX_NAMES_SHOWN, UNKNOWN, join_names

MAX_RESUMES_SHOWN = 8
MAX_NAME_LETTERS = 16  # of a name in a picture


def describe_resumes(run: MonitoredRun) -> str:
    """Return how often and where the training was resumed; empty if it was not."""
    if not run.resumed_at:
        return ""
    shown = ", ".join(f"{iteration:,}" for iteration in run.resumed_at[:MAX_RESUMES_SHOWN])
    more = ", ..." if len(run.resumed_at) > MAX_RESUMES_SHOWN else ""
    times = "once" if len(run.resumed_at) == 1 else f"{len(run.resumed_at)} times"
    return f"resumed {times}, after iteration {shown}{more}"


def describe_layout(facts: Facts) -> str:
    """Return the numbers of replicas and ranks, and the device."""
    replicas, ranks = facts.num_replicas, facts.ranks_per_replica
    elastic = "elastic, nominally " if facts.is_elastic else ""
    return (
        f"{elastic}{replicas} replica{'s' if replicas != 1 else ''} x {ranks} rank"
        f"{'s' if ranks != 1 else ''} on {facts.device}"
    )


def describe_schedule(facts: Facts) -> str:
    """Return when replicas sync."""
    if facts.strategy.endless_warmup:
        return "gradients are averaged at every step"
    if facts.num_choices == 0:
        return f"warm-up {facts.warmup_steps} steps, then syncs as --edit-auto chooses"
    is_timed = facts.strategy.is_timed
    interval = f"{facts.sync_seconds:g} s" if is_timed else f"{facts.sync_interval} steps"
    delayed = f", landing {facts.delay_steps} steps later" if facts.delay_steps else ""
    delayed += " (chosen by --edit-auto)" if facts.num_choices else ""
    final = ""
    if facts.last_local_step is not None:
        final = f"; after step {facts.last_local_step} gradients are averaged at every step"
    return f"warm-up {facts.warmup_steps} steps, then a sync every {interval}{delayed}{final}"


def describe_speed_source(run: MonitoredRun) -> str:
    """Return which replicas the speed covers, and whether it is estimated."""
    known, total = run.num_with_speed, len(run.members)
    if known in (0, total):
        return "all replicas"
    if run.speed is None:
        return f"not known: only {known} of {total} replicas are seen here"
    return f"all replicas, estimated from {known} of {total}"


def latest_loss(run: MonitoredRun) -> float:
    """Return the newest mean loss over the replicas, else the mean of the known newest losses."""
    if math.isfinite(run.loss):
        return run.loss
    known = [replica.loss for replica in run.members if math.isfinite(replica.loss)]
    return sum(known) / len(known) if known else math.nan


# ---- elastic runs


def short_name(name: str, letters: int = MAX_NAME_LETTERS) -> str:
    """Return a name for a picture: the middle of a long one is left out."""
    if len(name) <= letters:
        return name
    half = (letters - 1) // 2
    return f"{name[:half]}\u2026{name[-half:]}"


def describe_members(run: MonitoredRun) -> str:
    """Return members, epoch and leader of an elastic run."""
    members = join_names([replica.name for replica in run.members]) or "none"
    epoch = f"epoch {run.membership.epoch}" if run.membership.members else "before the first sync"
    leader = "give --state-dir of the hub to see the leader"
    if run.journal is not None:
        leader = f"leader: {run.journal.leader or 'none'}"
    return f"Members: {members} ({epoch}); {leader}"


def describe_news(run: MonitoredRun) -> str:
    """Return what the hub's journal has that no sync shows yet; empty if there is nothing."""
    journal = run.journal
    if journal is None or run.is_over:
        return ""
    leaves = journal.leaves_since(run.membership.epoch)[-MAX_NAMES_SHOWN:]
    parts = [
        f"{leave.name} has left ({leave.reason}, {clock_time(leave.time)})" for leave in leaves
    ]
    if journal.joining:
        parts.append(f"{join_names(sorted(journal.joining))} joining")
    return "; ".join(parts)


def describe_leave(run: MonitoredRun, span: MemberSpan) -> str:
    """Return the name of a former member, and why it left."""
    reason = None if run.journal is None else run.journal.reason_of(span)
    return f"{span.name} ({reason or describe_end(end_of(run, span))})"


def change_cells(run: MonitoredRun, change: MembershipChange) -> list[str]:
    """Return a change of the epoch as cells: time, sync, epoch, who came, who left, members."""
    left = [describe_leave(run, span) for span in change.left]
    return [
        clock_time(change.time), f"{change.round:,}", f"{change.epoch:,}",
        join_names(change.came) or UNKNOWN, join_names(left) or UNKNOWN,
        f"{len(change.members):,}",
    ]  # fmt: skip


def end_of(run: MonitoredRun, span: MemberSpan) -> Ending | None:
    """Return the end record of the process that was a member; None where it wrote none."""
    ends = next((replica.ends for replica in run.replicas if replica.name == span.name), [])
    return end_after(span, ends)


def clock_time(seconds: float) -> str:
    """Return the local time of Unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
