"""Problems of a run, each in sentences with a remedy."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median_high
from typing import Any, NamedTuple

from megatron_edit.config import STEP_COUNT_SETTINGS, EditConfig
from megatron_edit.constants import LOW_CLIP, WATCHED_SYNCS
from megatron_edit.elastic.hub_state import LeaveReason, failed_joins_text
from megatron_edit.errors import UsageError
from megatron_edit.observe.records import FAILED
from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.membership import MemberSpan, describe_end, is_fault
from megatron_edit.tools.monitor.run import LOST, MonitoredRun
from megatron_edit.tools.monitor.spikes import Spike
from megatron_edit.tools.monitor.summary import end_of
from megatron_edit.tools.monitor.syncs import LossRejections
from megatron_edit.tools.pages.texts import MAX_NAMES_SHOWN, duration, number, percent

EXPOSED_SHARE = 0.05
WAIT_SHARE = 0.10
ANOMALY_SHARE = 0.05
SLOW_SHARE = 0.8
SKIPPED_SHARE = 0.01
LEVELS = ("error", "warning", "note")  # worst first
A_EDIT = "a-edit"
LEAVE_VERBS: Mapping[str, str] = {  # by the reason in the hub's journal
    LeaveReason.EVICTED: "was evicted by the hub",
    LeaveReason.DRIFTED: "was evicted by the hub, as its state differed from the others',",
}


class MonitorFinding(NamedTuple):
    """One problem of a run.

    Attributes:
        level: one of `LEVELS`; an error means a failed run, drift between replicas, or damaged
            lines.
        text: sentences, with a remedy.
    """

    level: str
    text: str


_error, _warning, _note = (partial(MonitorFinding, level) for level in LEVELS)


def list_findings(run: MonitoredRun) -> list[MonitorFinding]:
    """Return all findings, worst first."""
    return sorted(_all_findings(run), key=lambda finding: LEVELS.index(finding.level))


def _all_findings(run: MonitoredRun) -> Iterator[MonitorFinding]:
    yield from _end_findings(run)
    yield from _file_findings(run)
    yield from _loss_findings(run)
    facts = run.facts
    if facts is None:
        return
    if facts.is_elastic:
        yield from _membership_findings(run, facts)
    yield from _speed_finding(run, facts)
    if not run.syncs.count:
        yield _note(_no_sync_text(facts))
        return
    yield from _weight_findings(run, facts)


def _end_findings(run: MonitoredRun) -> Iterator[MonitorFinding]:
    if run.failure is not None:
        replica, end = run.failure
        reason = f": {end.reason}" if end.reason else ""
        name = run.name_of(replica)
        yield _error(f"Replica {name} failed with exit code {end.exit_code}{reason}.")
    if run.state == LOST:
        yield _warning(
            f"No line for {duration(run.silence)}, and no end record: the run was killed or hangs.",
        )
    if lost := run.lines_lost:
        yield _warning(
            f"{lost} line{'s' if lost > 1 else ''} of the event files could not be written: look "
            "at the disk of --edit-log-dir.",
        )


def _file_findings(run: MonitoredRun) -> Iterator[MonitorFinding]:
    if run.drift is not None:
        number, replica = run.drift
        yield _error(
            f"After sync {number} the parameters of replica {run.name_of(replica)} differed "
            "from those of the other replicas (digests differ): the run cannot be trusted from "
            "there.",
        )
    if damaged := run.num_damaged:
        lines = ", ".join(f"{count} in {name}" for name, count in damaged.items())
        yield _error(f"Lines that could not be read and were skipped: {lines}.")
    if missing := run.missing:
        yield _warning(
            f"No file of replica {_join_replicas(run, missing)} in this folder: with one launch "
            "per replica, --edit-log-dir must be a folder that all machines share. "
            f"Tokens/s and time left {_speed_estimate_text(run)}.",
        )


def _speed_estimate_text(run: MonitoredRun) -> str:
    if run.speed is None:
        return "cannot be computed without it"
    return "are estimated from the others"


def _join_replicas(run: MonitoredRun, numbers: Sequence[int]) -> str:
    return ", ".join(run.name_of(number) for number in numbers[:MAX_NAMES_SHOWN]) + (
        ", ..." if len(numbers) > MAX_NAMES_SHOWN else ""
    )


def _membership_findings(run: MonitoredRun, facts: Facts) -> Iterator[MonitorFinding]:
    """Yield findings on replicas that were lost, and on the hub, of an elastic run."""
    faults: dict[str, list[MemberSpan]] = defaultdict(list)
    for name, spans in sorted(run.membership.spans.items()):
        for span in spans:
            if span.next_round is not None and _is_fault(run, span):
                faults[name].append(span)
    last = sorted(faults.values(), key=lambda spans: -(spans[-1].next_round or 0))
    for spans in last[:MAX_NAMES_SHOWN]:
        is_back = math.isfinite(spans[-1].returned_at)
        yield (_note if is_back else _warning)(_fault_text(run, spans, is_back=is_back))
    if (more := len(last) - MAX_NAMES_SHOWN) > 0:
        yield _warning(f"{more} more replica{'s were' if more > 1 else ' was'} lost.")
    members = len(run.members)
    if run.membership.members and members < facts.num_replicas and not run.is_over:
        yield _note(f"{members} of nominally {facts.num_replicas} replicas take part.")
    failed_joins = {} if run.journal is None else run.journal.failed_joins
    for name, count in sorted(failed_joins.items()):
        if count > 1:
            yield _warning(f"Replica {name} was lost{failed_joins_text(count)}.")
    if run.journal is not None and (starts := run.journal.term - 1) > 0:
        yield _note(f"The hub was started again {starts} time{'s' if starts > 1 else ''}.")


def _is_fault(run: MonitoredRun, span: MemberSpan) -> bool:
    reason = None if run.journal is None else run.journal.reason_of(span)
    return is_fault(reason, end_of(run, span))


def _fault_text(run: MonitoredRun, spans: Sequence[MemberSpan], *, is_back: bool) -> str:
    """Return the text for one replica.

    Args:
        run: the run.
        spans: after which it was lost, in order.
        is_back: whether it has come back since.
    """
    last, end = spans[-1], end_of(run, spans[-1])
    recorded = None if run.journal is None else run.journal.reason_of(last)
    verb = LEAVE_VERBS.get(recorded or "", "was lost")
    times = "" if len(spans) == 1 else f" (the last of {len(spans)} times)"
    how = describe_end(end)
    if end is not None and end.end == FAILED and end.reason:
        how += f": {end.reason}"
    text = f"Replica {last.name} {verb} before sync {last.next_round:,}{times}; {how}."
    if is_back:
        return f"{text} It has come back."
    return f"{text} Look at its output, and start it again under the same name."


def _loss_findings(run: MonitoredRun) -> Iterator[MonitorFinding]:
    spikes: dict[int, list[tuple[int, Spike]]] = defaultdict(list)
    for replica in run.replicas:
        if replica.spikes.worst is not None:
            spikes[replica.spikes.worst.iteration].append((replica.number, replica.spikes.worst))
    for iteration in sorted(spikes)[:MAX_NAMES_SHOWN]:
        yield _warning(_spike_text(run, spikes[iteration]))
    skipped = {
        replica.number: replica.num_skipped / replica.num_iterations
        for replica in run.replicas
        if replica.num_skipped > SKIPPED_SHARE * max(1, replica.num_iterations)
    }
    for replica_number, share in list(skipped.items())[:MAX_NAMES_SHOWN]:
        yield _warning(
            f"Replica {run.name_of(replica_number)} has no finite loss for {percent(share)} "
            "of its iterations.",
        )


def _spike_text(run: MonitoredRun, spikes: Sequence[tuple[int, Spike]]) -> str:
    """Return the text for the replicas whose worst spike began at the same iteration."""
    replicas = [replica for replica, _ in spikes]
    spike = max((spike for _, spike in spikes), key=lambda each: each.sigmas)
    whose = f"replica {_join_replicas(run, replicas)}"
    if len(replicas) == len(run.replicas):
        whose = "all replicas" if len(replicas) > 1 else "the replica"
    back = "it has not recovered"
    if spike.length:
        back = f"it recovered after {spike.length} iteration{'s' if spike.length > 1 else ''}"
    others = max(run.replicas[replica].spikes.count for replica in replicas) - 1
    more = f" ({others} more, smaller)" if others else ""
    return (
        f"The loss of {whose} jumped to {number(spike.loss, '.4g')} at iteration "
        f"{spike.iteration:,}, {spike.sigmas:,.0f} standard deviations above the "
        f"{number(spike.mean, '.4g')} before; {back}{more}. Look at the data of that iteration, "
        "the learning rate and the gradient norms."
    )


def _no_sync_text(facts: Facts) -> str:
    if facts.strategy.endless_warmup:
        return "This strategy averages gradients at every step: there are no syncs to show."
    return (
        f"No sync yet: {facts.warmup_steps} steps of warm-up come first, then a "
        "round of local steps."
    )


def _weight_findings(run: MonitoredRun, facts: Facts) -> Iterator[MonitorFinding]:
    syncs = run.syncs
    if syncs.low_effective >= WATCHED_SYNCS:
        yield _warning(
            f"For {syncs.low_effective} syncs in a row the median unit had fewer "
            f"{_fewer_text(run)}: "
            f"{_join((_raise_temperature(facts), 'look at the anomalies'))}.",
        )
    if syncs.low_clip >= WATCHED_SYNCS:
        yield _warning(
            f"For {syncs.low_clip} syncs in a row the median unit was clipped below "
            f"{LOW_CLIP:g}: {_join((_raise_clip(facts), 'lower the learning rate'))}.",
        )
    for replica, share in enumerate(syncs.anomaly_shares().tolist()):
        if share > ANOMALY_SHARE:
            yield _warning(
                f"Replica {run.name_of(replica)} was left out as anomalous in "
                f"{percent(share)} of its units and syncs: look at its data and "
                "hardware.",
            )
    for replica, rejections in sorted(syncs.loss_rejections.items())[:MAX_NAMES_SHOWN]:
        yield _warning(_rejection_text(run.name_of(replica), rejections))
    if rollbacks := int(syncs.sums["rollbacks"]):
        yield _warning(
            f"{rollbacks} roll-back{'s' if rollbacks > 1 else ''}: units "
            "whose replicas were all left out went back to their anchor.",
        )


def _fewer_text(run: MonitoredRun) -> str:
    if run.is_elastic:
        return "effective replicas than half of the members"
    return f"than {run.syncs.half:g} effective replicas"


def _rejection_text(replica: str, rejections: LossRejections) -> str:
    count, comparison = rejections.num_syncs, ""
    if math.isfinite(rejections.others):
        comparison = f", the others' median {number(rejections.others, '.4g')}"
    return (
        f"Replica {replica} was left out of {count} sync{'s' if count > 1 else ''} because of its "
        f"loss: before the last one, at iteration {rejections.iteration:,}, its mean loss was "
        f"{number(rejections.loss, '.4g')}{comparison}. Look at the data that it read there."
    )


def _speed_finding(run: MonitoredRun, facts: Facts) -> Iterator[MonitorFinding]:
    """Yield at most one finding: on waiting, a slow replica or exposed syncs."""
    exposed, wait = run.syncs.share("exposed"), run.syncs.share("wait")
    is_waiting = wait is not None and wait > WAIT_SHARE
    slow = _slow_replica(run, is_waiting=is_waiting)
    if is_waiting:
        why = "" if slow is None else f", as replica {slow[0]} is slow ({slow[1]})"
        remedies = (
            _use_a_edit(facts),
            "look at " + ("what delays them" if slow is None else "its machine"),
        )
        yield _warning(
            f"{_timed_replica(run)} waited for the others {percent(wait)} of the time{why}: "
            f"{_join(remedies)}.",
        )
    elif slow is not None and facts.strategy.is_timed:
        yield _note(f"Replica {slow[0]} is slow, and makes fewer steps than the others: {slow[1]}.")
    elif slow is not None:
        yield _warning(f"Replica {slow[0]} is slow: {slow[1]}.")
    elif exposed is not None and exposed > EXPOSED_SHARE:
        yield _warning(
            f"Exposed syncs took {percent(exposed)} of the time: {_join(_shorten_sync(facts))}.",
        )


def _timed_replica(run: MonitoredRun) -> str:
    """Return whose times the lines of syncs have."""
    return "The leader" if run.is_elastic else "Replica 0"


def _slow_replica(run: MonitoredRun, *, is_waiting: bool) -> tuple[str, str] | None:
    """Return the slowest replica and its speed as text; None where none is much slower.

    Args:
        run: the run.
        is_waiting: whether replica 0, or the leader, waits for the others, so that it cannot be
            the slow one.
    """
    speeds = {replica.name: replica.speed_between_syncs for replica in run.members}
    speeds = {replica: speed for replica, speed in speeds.items() if math.isfinite(speed)}
    if len(speeds) < 2:
        return None
    slowest, usual = min(speeds, key=speeds.__getitem__), median_high(speeds.values())
    leader = "0"
    if run.is_elastic:
        leader = "" if run.journal is None else run.journal.leader
    if speeds[slowest] >= SLOW_SHARE * usual or (is_waiting and slowest == leader):
        return None
    text = (
        f"between syncs it makes {speeds[slowest]:,.0f} tokens/s, the median replica {usual:,.0f}"
    )
    return slowest, text


# ---- remedies: only settings that are valid with the run's strategy


def _is_valid(facts: Facts, **changes: Any) -> bool:
    """Return whether the settings of a run, with some changes, are valid.

    Args:
        facts: of the run.
        changes: new values, by the names of the settings.
    """
    if facts.is_elastic:
        changes["num_replicas"] = None  # as given; `run.json` has the nominal number
    known = {spec.name for spec in dataclasses.fields(EditConfig)} & facts.config.keys()
    known -= {"auto", "auto_share"}  # in `run.json` nothing is left to choose
    try:
        EditConfig(**{name: facts.config[name] for name in known} | changes)
    except (UsageError, TypeError, ValueError):
        return False
    return True


def _join(remedies: Sequence[str]) -> str:
    """Join the remedies that are not empty into one sentence."""
    return ", or ".join(remedy for remedy in remedies if remedy)


def _use_a_edit(facts: Facts) -> str:
    """Return the remedy for replicas of unequal speed; empty where A-EDiT is not possible."""
    fields = EditConfig.__dataclass_fields__
    usual = {name: fields[name].default for name in STEP_COUNT_SETTINGS}
    if facts.strategy.is_timed or not _is_valid(facts, strategy=A_EDIT, **usual):
        return ""
    return f"replicas of unequal speed do better with --edit-strategy {A_EDIT}"


def _raise_temperature(facts: Facts) -> str:
    """Return the remedy for weights near one-hot; empty where the temperature cannot be raised."""
    value = facts.config.get("weight_temperature")  # None is auto
    if not isinstance(value, int | float) or not _is_valid(facts, weight_temperature=2 * value):
        return ""
    return "give a higher --edit-weight-temperature, or auto"


def _raise_clip(facts: Facts) -> str:
    """Return the remedy for a clip that always applies; empty where there is no clip to raise."""
    value = facts.config.get("clip")
    if not isinstance(value, int | float) or not _is_valid(facts, clip=2 * value):
        return ""
    return "raise --edit-clip"


def _shorten_sync(facts: Facts) -> list[str]:
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
