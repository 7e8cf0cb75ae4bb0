"""What the page and the terminal both say of a run."""

from __future__ import annotations

import math

from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.run import MonitoredRun

MOST_RESUMES = 8


def resumes(run: MonitoredRun) -> str:
    """Whether and where it was resumed; empty if it was not."""
    if not run.resumed_at:
        return ""
    shown = ", ".join(f"{iteration:,}" for iteration in run.resumed_at[:MOST_RESUMES])
    more = ", ..." if len(run.resumed_at) > MOST_RESUMES else ""
    times = "once" if len(run.resumed_at) == 1 else f"{len(run.resumed_at)} times"
    return f"resumed {times}, after iteration {shown}{more}"


def layout(facts: Facts) -> str:
    """Replicas and ranks."""
    replicas, ranks = facts.num_replicas, facts.ranks_per_replica
    return (
        f"{replicas} replica{'s' if replicas != 1 else ''} x {ranks} rank"
        f"{'s' if ranks != 1 else ''} on {facts.device}"
    )


def rhythm(facts: Facts) -> str:
    """When replicas meet."""
    if facts.strategy.endless_warmup:
        return "gradients are averaged at every step"
    is_timed = facts.strategy.is_timed
    apart = f"{facts.sync_seconds:g} s" if is_timed else f"{facts.sync_interval} steps"
    delayed = f", landing {facts.delay_steps} steps later" if facts.delay_steps else ""
    final = ""
    if facts.last_local_step is not None:
        final = f"; after step {facts.last_local_step} gradients are averaged at every step"
    return f"warm-up {facts.warmup_steps} steps, then a sync every {apart}{delayed}{final}"


def whose_speed(run: MonitoredRun) -> str:
    """Which replicas the speed is of, and how that is known."""
    heard, total = run.num_heard, len(run.replicas)
    if heard in (0, total):
        return "all replicas"
    if run.speed is None:
        return f"not known: only {heard} of {total} replicas are seen here"
    return f"all replicas, estimated from {heard} of {total}"


def loss_of(run: MonitoredRun) -> float:
    """The newest mean over the replicas, else of those that said one."""
    if math.isfinite(run.loss):
        return run.loss
    known = [replica.loss for replica in run.replicas if math.isfinite(replica.loss)]
    return sum(known) / len(known) if known else math.nan
