"""Texts about a run that the page and the terminal share."""

from __future__ import annotations

import math

from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.run import MonitoredRun

MAX_RESUMES_SHOWN = 8


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
    return (
        f"{replicas} replica{'s' if replicas != 1 else ''} x {ranks} rank"
        f"{'s' if ranks != 1 else ''} on {facts.device}"
    )


def describe_schedule(facts: Facts) -> str:
    """Return when replicas sync."""
    if facts.strategy.endless_warmup:
        return "gradients are averaged at every step"
    is_timed = facts.strategy.is_timed
    interval = f"{facts.sync_seconds:g} s" if is_timed else f"{facts.sync_interval} steps"
    delayed = f", landing {facts.delay_steps} steps later" if facts.delay_steps else ""
    final = ""
    if facts.last_local_step is not None:
        final = f"; after step {facts.last_local_step} gradients are averaged at every step"
    return f"warm-up {facts.warmup_steps} steps, then a sync every {interval}{delayed}{final}"


def describe_speed_source(run: MonitoredRun) -> str:
    """Return which replicas the speed covers, and whether it is estimated."""
    known, total = run.num_with_speed, len(run.replicas)
    if known in (0, total):
        return "all replicas"
    if run.speed is None:
        return f"not known: only {known} of {total} replicas are seen here"
    return f"all replicas, estimated from {known} of {total}"


def latest_loss(run: MonitoredRun) -> float:
    """Return the newest mean loss over the replicas, else the mean of the known newest losses."""
    if math.isfinite(run.loss):
        return run.loss
    known = [replica.loss for replica in run.replicas if math.isfinite(replica.loss)]
    return sum(known) / len(known) if known else math.nan
