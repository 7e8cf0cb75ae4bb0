"""Problems of a run, each in sentences with a remedy."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median_high
from typing import Any

from megatron_edit.config import EditConfig
from megatron_edit.elastic.hub_state import LeaveReason, failed_joins_text
from megatron_edit.errors import UsageError
from megatron_edit.observe.records import FAILED, Ending
from megatron_edit.refusals import STEP_COUNT_SETTINGS
from megatron_edit.tools.monitor.files import Facts
from megatron_edit.tools.monitor.membership import MemberSpan, describe_end, end_after, is_fault
from megatron_edit.tools.monitor.replicas import Replica
from megatron_edit.tools.monitor.run import LOST, MonitoredRun
from megatron_edit.tools.pages import LEVELS, Finding
from megatron_edit.tools.pages.texts import (
    MAX_NAMES_SHOWN,
    duration,
    join_names,
    number,
    percent,
    plural,
)

EXPOSED_SHARE = 0.05
WAIT_SHARE = 0.10
ANOMALY_SHARE = 0.05
SLOW_SHARE = 0.8
SKIPPED_SHARE = 0.01
A_EDIT = "a-edit"
LEAVE_VERBS: Mapping[str, str] = {  # by the reason in the hub's journal
    LeaveReason.EVICTED: "was evicted by the hub",
    LeaveReason.DRIFTED: "was evicted by the hub, as its state differed from the others',",
}
_error, _warning, _note = (partial(Finding, level) for level in LEVELS)


def list_findings(run: MonitoredRun) -> list[Finding]:
    """Return all findings, worst first."""
    return sorted(_all_findings(run), key=lambda finding: LEVELS.index(finding.level))


def _all_findings(run: MonitoredRun) -> Iterator[Finding]:
    yield from _end_findings(run)
    yield from _file_findings(run)
    yield from _loss_findings(run)
    if run.is_elastic:
        yield from _membership_findings(run)
    yield from _speed_finding(run)
    yield from _rejection_findings(run) if run.syncs.count else [_note(_no_sync_text(run.facts))]


def _end_findings(run: MonitoredRun) -> Iterator[Finding]:
    if run.failure is not None:
        replica, end = run.failure
        reason = f": {end.reason}" if end.reason else ""
        yield _error(f"Replica {replica.name} failed with exit code {end.exit_code}{reason}.")
    if run.state == LOST:
        yield _warning(
            f"No line for {duration(run.silence)}, and no end record: the run was killed or hangs.",
        )


def _file_findings(run: MonitoredRun) -> Iterator[Finding]:
    if lost := sum(end.lines_lost for replica in run.replicas for end in replica.ends):
        yield _warning(
            f"{plural(lost, 'line')} of the event files could not be written: look "
            "at the disk of --edit-log-dir.",
        )
    if damaged := run.num_damaged:
        lines = ", ".join(f"{count} in {name}" for name, count in damaged.items())
        yield _error(f"Lines that could not be read and were skipped: {lines}.")
    if missing := run.missing:
        speed = (
            "cannot be computed without it"
            if run.speed is None
            else "are estimated from the others"
        )
        yield _warning(
            f"No file of replica {_names(missing)} in this folder: with one launch "
            "per replica, --edit-log-dir must be a folder that all machines share. "
            f"Tokens/s and time left {speed}.",
        )


def _names(replicas: Sequence[Replica]) -> str:
    return join_names([replica.name for replica in replicas])


# ---- members of an elastic run


def how_left(run: MonitoredRun, span: MemberSpan) -> str:
    """Return why a replica left, by the journal, or else by its end record."""
    return _reason_of(run, span) or describe_end(_end_of(run, span))


def _end_of(run: MonitoredRun, span: MemberSpan) -> Ending | None:
    ends = next((replica.ends for replica in run.replicas if replica.name == span.name), [])
    return end_after(span, ends)


def _reason_of(run: MonitoredRun, span: MemberSpan) -> str | None:
    return None if run.journal is None else run.journal.reason_of(span)


def _membership_findings(run: MonitoredRun) -> Iterator[Finding]:
    """Yield findings on replicas that were lost, and on the hub, of an elastic run."""
    faults: dict[str, list[MemberSpan]] = defaultdict(list)
    for name, spans in sorted(run.membership.spans.items()):
        for span in spans:
            has_left = span.next_round is not None
            if has_left and is_fault(_reason_of(run, span), _end_of(run, span)):
                faults[name].append(span)
    last = sorted(faults.values(), key=lambda spans: -(spans[-1].next_round or 0))
    for spans in last[:MAX_NAMES_SHOWN]:
        is_back = math.isfinite(spans[-1].returned_at)
        yield (_note if is_back else _warning)(_fault_text(run, spans, is_back=is_back))
    if (more := len(last) - MAX_NAMES_SHOWN) > 0:
        yield _warning(f"{more} more replica{'s were' if more > 1 else ' was'} lost.")
    members, nominal = len(run.members), run.facts.num_replicas
    if run.membership.members and members < nominal and not run.is_over:
        yield _note(f"{members} of nominally {nominal} replicas take part.")
    if run.journal is None:
        return
    for name, count in sorted(run.journal.failed_joins.items()):
        if count > 1:
            yield _warning(f"Replica {name} was lost{failed_joins_text(count)}.")
    if (starts := run.journal.term - 1) > 0:
        yield _note(f"The hub was started again {plural(starts, 'time')}.")


def _fault_text(run: MonitoredRun, spans: Sequence[MemberSpan], *, is_back: bool) -> str:
    """Return the text for one replica, given the spans after which it was lost."""
    last, end = spans[-1], _end_of(run, spans[-1])
    verb = LEAVE_VERBS.get(_reason_of(run, last) or "", "was lost")
    times = "" if len(spans) == 1 else f" (the last of {len(spans)} times)"
    how = describe_end(end)
    if end is not None and end.end == FAILED and end.reason:
        how += f": {end.reason}"
    text = f"Replica {last.name} {verb} before sync {last.next_round:,}{times}; {how}."
    if is_back:
        return f"{text} It has come back."
    return f"{text} Look at its output, and start it again under the same name."


# ---- losses and syncs


def _loss_findings(run: MonitoredRun) -> Iterator[Finding]:
    spikes: dict[int, list[Replica]] = defaultdict(list)
    for replica in run.replicas:
        if replica.spike is not None:
            spikes[replica.spike.iteration].append(replica)
    for iteration in sorted(spikes)[:MAX_NAMES_SHOWN]:
        yield _warning(_spike_text(run, spikes[iteration]))
    skipped = [replica for replica in run.replicas if replica.skipped_share > SKIPPED_SHARE]
    for replica in skipped[:MAX_NAMES_SHOWN]:
        share = percent(replica.skipped_share)
        yield _warning(f"Replica {replica.name} has no finite loss for {share} of its iterations.")


def _spike_text(run: MonitoredRun, replicas: Sequence[Replica]) -> str:
    """Return the text for the replicas whose highest spike is at the same iteration."""
    spike = max(
        (replica.spike for replica in replicas if replica.spike is not None),
        key=lambda each: each.sigmas,
    )
    whose = f"replica {_names(replicas)}"
    if len(replicas) == len(run.replicas):
        whose = "all replicas" if len(replicas) > 1 else "the replica"
    return (
        f"The loss of {whose} jumped to {number(spike.loss, '.4g')} at iteration "
        f"{spike.iteration:,}, {spike.sigmas:,.0f} standard deviations above the "
        f"{number(spike.mean, '.4g')} before. Look at the data of that iteration, "
        "the learning rate and the gradient norms."
    )


def _no_sync_text(facts: Facts) -> str:
    if facts.strategy.endless_warmup:
        return "This strategy averages gradients at every step: there are no syncs to show."
    if facts.is_elastic and facts.warmup_steps:
        return "No sync yet: in the warm-up there is one after each step."
    return (
        f"No sync yet: {facts.warmup_steps} steps of warm-up come first, then a "
        "round of local steps."
    )


def _rejection_findings(run: MonitoredRun) -> Iterator[Finding]:
    syncs, replicas = run.syncs, run.replicas
    for replica, share in zip(replicas, syncs.anomaly_shares(len(replicas)).tolist(), strict=True):
        if share > ANOMALY_SHARE:
            yield _warning(
                f"Replica {replica.name} was left out as anomalous in "
                f"{percent(share)} of its units and syncs: look at its data and "
                "hardware.",
            )
    rejections = sorted(syncs.loss_rejections().items())
    for column, (count, iteration, loss, others) in rejections[:MAX_NAMES_SHOWN]:
        median = f", the others' median {number(others, '.4g')}" if math.isfinite(others) else ""
        yield _warning(
            f"Replica {replicas[column].name} was left out of {plural(count, 'sync')} because of "
            f"its loss: before the last one, at iteration {iteration:,}, its mean loss was "
            f"{number(loss, '.4g')}{median}. Look at the data that it read there.",
        )
    if rollbacks := syncs.num_rollbacks:
        yield _warning(
            f"{plural(rollbacks, 'roll-back')}: units whose replicas were all left out went back "
            "to their anchor.",
        )


# ---- speed, with remedies that are valid with the run's settings


def _speed_finding(run: MonitoredRun) -> Iterator[Finding]:
    """Yield at most one finding: on waiting, a slow replica or exposed syncs."""
    facts, exposed, wait = run.facts, run.syncs.share("exposed"), run.syncs.share("wait")
    is_waiting = wait is not None and wait > WAIT_SHARE
    slow = _slow_replica(run, is_waiting=is_waiting)
    if is_waiting:
        who = "The leader" if run.is_elastic else "Replica 0"
        why = "" if slow is None else f", as replica {slow[0]} is slow ({slow[1]})"
        remedies = [
            *_use_a_edit(facts),
            "look at " + ("what delays them" if slow is None else "its machine"),
        ]
        yield _warning(
            f"{who} waited for the others {percent(wait)} of the time{why}: "
            f"{', or '.join(remedies)}.",
        )
    elif slow is not None and facts.strategy.is_timed:
        yield _note(f"Replica {slow[0]} is slow, and makes fewer steps than the others: {slow[1]}.")
    elif slow is not None:
        yield _warning(f"Replica {slow[0]} is slow: {slow[1]}.")
    elif exposed is not None and exposed > EXPOSED_SHARE:
        yield _warning(
            f"Exposed syncs took {percent(exposed)} of the time: "
            f"{', or '.join(shorten_sync(facts))}."
        )


def _slow_replica(run: MonitoredRun, *, is_waiting: bool) -> tuple[str, str] | None:
    """Return the slowest replica and its speed as text; None where none is much slower.

    Replica 0, or the leader, cannot be the slow one if it waits for the others.
    """
    speeds = {each.name: each.speed_between_syncs(run.facts) for each in run.members}
    speeds = {replica: speed for replica, speed in speeds.items() if math.isfinite(speed)}
    if len(speeds) < 2:
        return None
    slowest, usual = min(speeds, key=speeds.__getitem__), median_high(speeds.values())
    leader = "0"
    if run.is_elastic:
        leader = "" if run.journal is None else run.journal.leader
    if speeds[slowest] >= SLOW_SHARE * usual or (is_waiting and slowest == leader):
        return None
    return slowest, (
        f"between syncs it makes {speeds[slowest]:,.0f} tokens/s, the median replica {usual:,.0f}"
    )


def _is_valid(facts: Facts, **changes: Any) -> bool:
    """Return whether the settings of a run, with some changes, are valid."""
    if facts.is_elastic:
        changes["num_replicas"] = None  # as given; `run.json` has the nominal number
    known = {spec.name for spec in dataclasses.fields(EditConfig)} & facts.config.keys()
    known -= {"auto", "auto_share"}  # in `run.json` nothing is left to choose
    try:
        EditConfig(**{name: facts.config[name] for name in known} | changes)
    except UsageError:
        return False
    return True


def _use_a_edit(facts: Facts) -> list[str]:
    """Return the remedy for replicas of unequal speed; empty where A-EDiT is not possible."""
    fields = EditConfig.__dataclass_fields__
    usual = {name: fields[name].default for name in STEP_COUNT_SETTINGS}
    if facts.strategy.is_timed or not _is_valid(facts, strategy=A_EDIT, **usual):
        return []
    return [f"replicas of unequal speed do better with --edit-strategy {A_EDIT}"]


def shorten_sync(facts: Facts) -> list[str]:
    """Return the remedies for a large exposed time."""
    remedies = []
    if facts.strategy.is_timed:
        remedies.append("raise --edit-sync-seconds")
    elif _is_valid(facts, sync_interval=2 * facts.sync_interval):
        remedies.append("raise --edit-sync-interval")
    hiding = []
    if not facts.delay_steps and _is_valid(facts, delay_steps=1):
        hiding.append("--edit-delay-steps")
    if "--overlap-param-gather" not in facts.argv and not facts.is_elastic:
        hiding.append("--overlap-param-gather")
    if hiding:
        remedies.append(f"hide the exchange ({', '.join(hiding)})")
    return remedies
