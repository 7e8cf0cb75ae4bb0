"""What deserves attention in a run, in sentences with a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median_high
from typing import Literal, NamedTuple

from megatron_edit.constants import LOW_CLIP, WATCHED_SYNCS
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.texts import duration, percent

EXPOSED_SHARE = 0.05
WAIT_SHARE = 0.10
ANOMALY_SHARE = 0.05
SLOW_SHARE = 0.8
SKIPPED_SHARE = 0.01


class MonitorFinding(NamedTuple):
    """One of them. `error` is about a run that is lost, or a report that is not whole."""

    level: Literal["error", "warning", "note"]
    text: str


def findings_of(run: MonitoredRun) -> list[MonitorFinding]:
    """Everything that is to be said, the worst first."""
    order = ("error", "warning", "note")
    return sorted(_all(run), key=lambda finding: order.index(finding.level))


def _all(run: MonitoredRun) -> Iterator[MonitorFinding]:
    yield from _of_files(run)
    yield from _of_replicas(run)
    if run.facts is None:
        return
    if not run.syncs.count:
        yield MonitorFinding("note", _without_syncs(run))
        return
    yield from _of_weights(run)
    yield from _of_time(run)


def _of_files(run: MonitoredRun) -> Iterator[MonitorFinding]:
    if run.drift is not None:
        number, replica = run.drift
        yield MonitorFinding(
            "error",
            f"After sync {number} replica {replica} held other parameters than "
            "the others (digests differ): the run cannot be trusted from there.",
        )
    if damaged := run.num_damaged:
        lines = ", ".join(f"{count} in {name}" for name, count in damaged.items())
        yield MonitorFinding("error", f"Lines that could not be read, and are left out: {lines}.")
    if missing := run.missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield MonitorFinding(
            "warning",
            f"No file of replica {shown} in this folder: with one launch per "
            "replica, --edit-log-dir must be a folder that all machines share. "
            f"Tokens/s and time left {_estimates(run)}.",
        )
    if run.state == "silent":
        yield MonitorFinding(
            "warning", f"Nothing new for {duration(run.silence)}: it has been stopped, or hangs."
        )


def _estimates(run: MonitoredRun) -> str:
    if run.speed is None:
        return "cannot be told without it"
    return "are estimated from the others"


def _of_replicas(run: MonitoredRun) -> Iterator[MonitorFinding]:
    speeds = {replica.number: replica.speed_between_syncs for replica in run.replicas}
    speeds = {number: speed for number, speed in speeds.items() if math.isfinite(speed)}
    if len(speeds) > 1:
        slowest, usual = min(speeds, key=speeds.__getitem__), median_high(speeds.values())
        if speeds[slowest] < SLOW_SHARE * usual:
            yield MonitorFinding(
                "warning",
                f"Replica {slowest} is slow: between syncs it makes {speeds[slowest]:,.0f} "
                f"tokens/s, the median replica {usual:,.0f}.",
            )
    skipped = {
        replica.number: replica.num_skipped / replica.num_iterations
        for replica in run.replicas
        if replica.num_skipped > SKIPPED_SHARE * max(1, replica.num_iterations)
    }
    for number, share in list(skipped.items())[:8]:
        yield MonitorFinding(
            "warning",
            f"Replica {number} has no finite loss for {percent(share)} of its iterations.",
        )


def _without_syncs(run: MonitoredRun) -> str:
    assert run.facts is not None
    if run.facts.strategy.endless_warmup:
        return "This strategy averages gradients at every step: there are no syncs to show."
    return (
        f"No sync yet: {run.facts.warmup_steps} steps of warm-up come first, then a "
        "round of steps apart."
    )


def _of_weights(run: MonitoredRun) -> Iterator[MonitorFinding]:
    syncs = run.syncs
    if syncs.low_effective >= WATCHED_SYNCS:
        yield MonitorFinding(
            "warning",
            f"For {syncs.low_effective} syncs in a row the median unit stood "
            f"on fewer than {syncs.half:g} replicas: give a higher "
            "--edit-weight-temperature, or auto, or look at the anomalies.",
        )
    if syncs.low_clip >= WATCHED_SYNCS:
        yield MonitorFinding(
            "warning",
            f"For {syncs.low_clip} syncs in a row the median unit was clipped "
            f"below {LOW_CLIP:g}: raise --edit-clip, or lower the learning rate.",
        )
    for replica, share in enumerate(syncs.anomaly_shares().tolist()):
        if share > ANOMALY_SHARE:
            yield MonitorFinding(
                "warning",
                f"Replica {replica} was left out as anomalous in "
                f"{percent(share)} of its units and syncs: look at its data and "
                "hardware.",
            )
    if rollbacks := int(syncs.sums["rollbacks"]):
        yield MonitorFinding(
            "warning",
            f"{rollbacks} roll-back{'s' if rollbacks > 1 else ''}: units "
            "whose replicas were all left out went back to their anchor.",
        )


def _of_time(run: MonitoredRun) -> Iterator[MonitorFinding]:
    exposed, wait = run.syncs.share("exposed"), run.syncs.share("wait")
    if wait is not None and wait > WAIT_SHARE:
        yield MonitorFinding(
            "warning",
            f"Replica 0 waited for the others {percent(wait)} of the time: "
            "replicas of unequal speed do better with --edit-strategy a-edit.",
        )
    elif exposed is not None and exposed > EXPOSED_SHARE:
        yield MonitorFinding(
            "warning",
            f"Exposed syncs took {percent(exposed)} of the time: "
            "raise --edit-sync-interval, or hide the exchange (--edit-delay-steps, "
            "--overlap-param-gather).",
        )
