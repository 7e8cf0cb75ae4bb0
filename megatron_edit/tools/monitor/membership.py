"""Which replicas took part in an elastic run: by sync, and from the journal of its hub."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_edit.elastic.hub_state import LeaveReason
from megatron_edit.elastic.journal import FILE_NAME
from megatron_edit.errors import to_one_line
from megatron_edit.observe.records import (
    FAILED,
    Ending,
    SyncRecord,
    as_count,
    as_number,
    as_replica_name,
    members_of,
)
from megatron_edit.tools.monitor.files import EventFile

FAULTS = (LeaveReason.LOST, LeaveReason.EVICTED, LeaveReason.DRIFTED)


@dataclass
class MemberSpan:
    """Consecutive syncs with one replica as a member; times are Unix seconds."""

    name: str
    began_at: float
    epoch: int  # of the last of these syncs
    next_round: int | None = None  # the first sync without it; None while it is a member
    next_epoch: int = 0
    returned_at: float = math.inf


class MembershipChange(NamedTuple):
    """A new epoch, as the first sync in it shows it."""

    time: float  # Unix seconds
    round: int
    epoch: int
    members: tuple[str, ...]
    came: tuple[str, ...]
    left: tuple[MemberSpan, ...]


@dataclass
class MembershipHistory:
    """The members of all syncs of an elastic run."""

    epoch: int = 0  # of the newest sync
    members: tuple[str, ...] = ()  # of the newest sync; empty before the first sync of a run
    changes: list[MembershipChange] = field(default_factory=list)  # the first epoch included
    spans: dict[str, list[MemberSpan]] = field(default_factory=lambda: defaultdict(list))
    num_syncs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    count: int = 0  # of all syncs
    _current: dict[str, MemberSpan] = field(default_factory=dict)

    def add(self, sync: SyncRecord) -> None:
        """Add a sync with members."""
        assert sync.epoch is not None, "a sync without an epoch"
        came = tuple(name for name in sync.members if name not in self._current)
        left = tuple(self._current.pop(name) for name in sorted(self._current)
                     if name not in sync.members)  # fmt: skip
        for span in left:
            span.next_round, span.next_epoch = sync.round, sync.epoch
        for name in sync.members:
            self._extend(name, sync, sync.epoch)
        if came or left or sync.epoch != self.epoch:
            change = MembershipChange(sync.time, sync.round, sync.epoch, sync.members, came, left)
            self.changes.append(change)
        self.epoch, self.members = sync.epoch, sync.members
        self.count += 1

    def _extend(self, name: str, sync: SyncRecord, epoch: int) -> None:
        spans = self.spans[name]
        if name not in self._current:
            if spans:
                spans[-1].returned_at = sync.time
            self._current[name] = MemberSpan(name, sync.time, epoch)
            spans.append(self._current[name])
        self._current[name].epoch = epoch
        self.num_syncs[name] += 1

    def start_run(self) -> None:
        """The syncs of the next run follow: its members are not known yet."""
        self.members = ()

    def share(self, name: str) -> float:
        """Return the share of all syncs in which a replica was a member; NaN before the first."""
        return self.num_syncs.get(name, 0) / self.count if self.count else math.nan


class RecordedLeave(NamedTuple):
    """A `leave` of the journal; the time is that of the hub's clock."""

    time: float
    epoch: int
    name: str
    reason: str


class HubJournal(EventFile[None]):
    """The journal of a hub in its `--state-dir`, read while it grows: `records` reads new lines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, self._add)

    def start_over(self) -> None:
        """Forget what was read."""
        super().start_over()
        self.term, self.leader = 0, ""  # starts of the hub; of the newest epoch
        self.joining: set[str] = set()
        self.leaves: dict[str, list[RecordedLeave]] = defaultdict(list)
        # How often in a row replicas were lost before they took part.
        self.failed_joins: dict[str, int] = {}

    def _add(self, record: Mapping[str, Any]) -> None:
        event, epoch = record["event"], as_count(record["epoch"])
        if event == "open":
            self.term = as_count(record["term"])
        elif event == "join":
            self.joining.add(as_replica_name(record["name"]))
        elif event == "leave":
            name = as_replica_name(record["name"])
            when, reason = as_number(record["time"]), to_one_line(str(record["reason"]))
            self.leaves[name].append(RecordedLeave(when, epoch, name, reason))
            self.failed_joins[name] = as_count(record.get("failed_joins", 0))
            self.joining.discard(name)
        elif event == "epoch":
            members = members_of(record)
            self.leader = as_replica_name(record["leader"])
            self.joining.difference_update(members)
            self.failed_joins |= dict.fromkeys(members, 0)

    def reason_of(self, span: MemberSpan) -> str | None:
        """Return why a replica was no member any more after a span; None where not recorded."""
        reasons = [leave.reason for leave in self.leaves.get(span.name, ())
                   if span.epoch <= leave.epoch < span.next_epoch]  # fmt: skip
        return reasons[-1] if reasons else None

    def leaves_since(self, epoch: int) -> list[RecordedLeave]:
        """Return who has left in an epoch or later; not those without samples left to train on."""
        found = [leave for leaves in self.leaves.values() for leave in leaves
                 if leave.epoch >= epoch and leave.reason != LeaveReason.FINISHED]  # fmt: skip
        return sorted(found)


def end_after(span: MemberSpan, ends: Sequence[Ending]) -> Ending | None:
    """Return the end record of the process whose membership ended; None where it wrote none."""
    return next((end for end in ends if span.began_at < end.time < span.returned_at), None)


def describe_end(end: Ending | None) -> str:
    """Return how a process ended, in a few words."""
    if end is None:
        return "no end record"
    if end.end == FAILED:
        return f"failed with exit code {end.exit_code}"
    return end.end if end.reason is None else f"{end.end}: {end.reason}"


def is_fault(reason: str | None, end: Ending | None) -> bool:
    """Return whether a replica left without having been asked to: by the journal, or its end."""
    if reason is not None:
        return reason in FAULTS
    return end is None or end.end == FAILED
