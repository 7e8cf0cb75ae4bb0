"""What the hub knows, how a journal leads to it, and inputs and outputs of its decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

from megatron_edit.elastic.journal import JournalEntry
from megatron_edit.elastic.messages import (
    Arrive,
    Blocks,
    Deal,
    Failed,
    Formed,
    FromHub,
    Healed,
    Hello,
    Leave,
    Ready,
)

NO_STATE = -1
KEY_DIGITS = 32  # hexadecimal
RELAPSE_ROUNDS = 16  # within which a removal after a return counts as one more in a row
LONGEST_BAR = 64  # rounds
MIN_HOLDERS = 2  # of the state: with fewer, one loss would void all commits since a checkpoint


class LeaveReason(StrEnum):
    """Why a replica does not take part any more, as the journal has it."""

    FINISHED = "finished"  # no sample is left
    SIGNAL = "signal"
    LOST = "lost"
    EVICTED = "evicted"  # it makes no progress, or the others cannot exchange with it
    DRIFTED = "drifted"


# By the hub, whoever is to blame: one that takes part again and again costs the others time.
REMOVED = (LeaveReason.EVICTED, LeaveReason.DRIFTED)


class Standing(StrEnum):
    """What a start of a replica is in the run now."""

    LEADER = "leader"
    MEMBER = "member"  # or about to be one
    NONE = "none"  # it was taken out, has left, or was never in this run


class Phase(Enum):
    """What the hub waits for."""

    OPENING = "opening"  # for the replicas that the run begins with
    GATHER = "gather"  # for the expected replicas to arrive
    FORM = "form"  # for the members of a new epoch to form its groups
    EXCHANGE = "exchange"  # for all members to be ready
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Removals:
    """How often a replica was taken out, one time soon after the other.

    Attributes:
        count: times in a row.
        admitted_from: round from which it may take part again.
    """

    name: str
    count: int
    admitted_from: int

    @classmethod
    def after(cls, earlier: Removals | None, name: str, round: int) -> Removals:
        """With one more in a round. After the first one there is no wait, then 1, 2, 4 rounds."""
        is_relapse = earlier is not None and round < earlier.admitted_from + RELAPSE_ROUNDS
        count = 1 + (earlier.count if earlier is not None and is_relapse else 0)
        return cls(name, count, round + min(1 << count >> 2, LONGEST_BAR))


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes part, or is about to.

    Attributes:
        handles: addresses of its ranks; empty after a restart of the hub, until it reconnects.
        applied: commits whose result it holds or, being a member, will hold; `NO_STATE` for one
            that has still to copy the state.
        order: when it joined, relative to others.
        is_connected: whether it has a connection now.
        is_arrived: whether it waits at the meeting of the current round.
        is_formed: whether it has formed the groups of the current epoch.
        num_late: meetings that have stopped waiting for it while it copied the state.
        awaited_from: the round from which meetings wait for it again.
        steps: its inner steps in the round that it has last arrived for, where it trains on during
            the exchange; else None.
        is_abandoning: whether it puts an exchange aside, and has not arrived again.
        ready: its result of the current round.
        lost: who it could not exchange with, since the round began.
        failures: exchanges of the round that were abandoned because it reported a failure first.
    """

    name: str
    incarnation: str
    handles: tuple[str, ...]
    applied: int
    order: int
    is_connected: bool = True
    is_arrived: bool = False
    is_formed: bool = False
    steps: int | None = None
    is_abandoning: bool = False
    ready: Ready | None = None
    lost: tuple[str, ...] = ()
    failures: int = 0
    num_late: int = 0
    awaited_from: int = 0

    def late_in(self, count: int) -> Member:
        """The replica, whose copy was too slow for the meeting of round `count`: the next one waits
        for it again; after the second time every other one, then one of four, and so on."""
        return replace(self, num_late=self.num_late + 1, awaited_from=count + (1 << self.num_late))


@dataclass(frozen=True, slots=True)
class HubState:
    """All that the hub knows. What outlives it is in the journal; see `replay`.

    Attributes:
        nominal: replicas that the run begins with; 0 before the first one has said it.
        minimum: no round begins to be exchanged with fewer.
        layout: that all replicas must have; empty before the first one.
        term: how often the hub has been started on its journal.
        epoch: number of the current membership; 0 before the first.
        members: of the epoch, in the order of the groups' ranks.
        digest: of anchor and momentum after the last commit.
        commit_epoch: epoch of the last commit.
        holes: blocks that were dealt until the last commit, and that no replica has consumed.
        known: keys of all states that training may start again from; see `state_key`.
        phase: see there.
        roster: all replicas, by name.
        is_epoch_used_up: whether the groups of the epoch may hold parts of an abandoned exchange.
        is_suspicious: whether an exchange has failed, and not begun again: who is not connected
            is taken for lost at once.
        retries: exchanges of this round that have failed with all members alive.
        disagreements: attempts at this round whose results were not good.
        drifted: the replica whose result differed from the others' in the last attempt.
        is_stopping: whether the run ends on request: after the next round that has no deal yet.
        removals: of replicas that were taken out, since training was started from a checkpoint.
        failed_joins: replicas that were lost before they took part, and how often in a row.
        joins: replicas that have ever joined.
        first_epoch: the epoch that the replicas begin to train in.
        lineage: how often training was started again from a checkpoint, after all replicas were
            lost.
        announced: the leader of the epoch, as its members were told; it saves at the end.
        is_over: whether the last commit was the last one: nobody joins any more.
        is_finished: whether the announced leader has left because of that, after its save.
        reached: commits before all replicas were lost.
        is_last: whether the round that is exchanged is the last, on request.
        dealt: the deal of the current round; see `Go.dealt`. It stands until the commit, and until
            then no other replica takes part in the round: none copies the state.
        end: why the run has ended, and the exit code of its ranks.
    """

    nominal: int = 0
    minimum: int = 1
    layout: str = ""
    term: int = 1
    epoch: int = 0
    members: tuple[str, ...] = ()
    round: int = 0
    digest: str = ""
    commit_epoch: int = 0
    samples: int = 0
    holes: Blocks = ()
    known: tuple[str, ...] = ()
    phase: Phase = Phase.OPENING
    roster: tuple[Member, ...] = ()
    is_epoch_used_up: bool = False
    is_suspicious: bool = False
    retries: int = 0
    disagreements: int = 0
    drifted: str = ""
    is_stopping: bool = False
    removals: tuple[Removals, ...] = ()
    failed_joins: tuple[tuple[str, int], ...] = ()
    joins: int = 0
    first_epoch: int = 1
    lineage: int = 0
    announced: str = ""
    is_over: bool = False
    is_finished: bool = False
    reached: int = 0
    is_last: bool = False
    dealt: Deal = ()
    end: tuple[str, int] = ("the run has ended", 0)

    def member(self, name: str) -> Member | None:
        """The replica of a name."""
        return next((each for each in self.roster if each.name == name), None)

    @property
    def expected(self) -> tuple[Member, ...]:
        """Replicas that the meeting of the current round waits for, by name."""
        return tuple(each for each in self.roster if each.applied == self.round)

    @property
    def present(self) -> tuple[Member, ...]:
        """The members of the epoch that have not left, by name."""
        return tuple(each for each in self.roster if each.name in self.members)

    @property
    def leader(self) -> str:
        """The member of the epoch that has taken part for longest; empty before the first."""
        members = self.present
        return min(members, key=lambda each: each.order).name if members else ""

    def standing(self, name: str, incarnation: str) -> Standing:
        """What this start of a replica is now."""
        member = self.member(name)
        if member is None or member.incarnation != incarnation:
            return Standing.NONE
        return Standing.LEADER if self.leader == name else Standing.MEMBER

    @property
    def num_void(self) -> int:
        """Commits that do not count any more, where training starts again from here."""
        return max(0, self.reached - self.round)

    @property
    def needs_all(self) -> bool:
        """Whether the run must not begin with fewer than all nominal replicas: all commits would be
        void, as none of those that are there has a checkpoint."""
        return self.round == 0 and self.num_void > 0

    @property
    def is_beginning(self) -> bool:
        """Whether the first groups are being formed. The members can form no others before they
        train: if one of them is lost, all start again."""
        return self.phase is Phase.FORM and self.epoch == self.first_epoch

    @property
    def is_copied(self) -> bool:
        """Whether replicas may copy the state: not before the first commit nor after the last
        one, and not while the members train on without its result."""
        is_there = self.round > 0 and not self.is_beginning
        return is_there and not (self.is_over or self.dealt)

    @property
    def joiners(self) -> tuple[Member, ...]:
        """Replicas that copy the state."""
        if not self.is_copied:
            return ()
        return tuple(m for m in self.roster if m.applied != self.round and m.is_connected)

    @property
    def is_short(self) -> bool:
        """Whether replicas are needed, whatever they have done before."""
        return len(self.expected) < max(self.minimum, MIN_HOLDERS)

    def is_barred(self, member: Member) -> bool:
        """Whether a replica has to wait before it copies the state. Not where it is needed."""
        return self.admitted_from(member.name) > self.round and not self.is_short

    @property
    def copying(self) -> tuple[Member, ...]:
        """Replicas that copy the state, and that the meeting waits for, too."""
        return tuple(m for m in self.joiners if not (self.is_late(m) or self.is_barred(m)))

    def is_late(self, member: Member) -> bool:
        """Whether a replica copies the state for too long: this meeting does not wait for it."""
        return member.applied != self.round and member.awaited_from > self.round

    def with_member(self, member: Member) -> HubState:
        """The state with a replica added, or replaced."""
        others = [each for each in self.roster if each.name != member.name]
        return replace(self, roster=tuple(sorted([*others, member], key=lambda each: each.name)))

    def without(self, name: str) -> HubState:
        """The state without a replica."""
        return replace(self, roster=tuple(each for each in self.roster if each.name != name))

    @property
    def is_vacant(self) -> bool:
        """Whether no replica holds the state any more, in a run that has begun, or that others wait
        to begin again."""
        is_waited_for = bool(self.roster) or self.phase is not Phase.OPENING
        return is_waited_for and self.phase is not Phase.ENDED and not self.expected

    def vacated(self) -> HubState:
        """The state that waits for replicas which start the run again, from a checkpoint."""
        # What was reached counts until the first commit of training that was started again.
        reached = self.reached if self.phase is Phase.OPENING else max(self.reached, self.round)
        return replace(
            self, phase=Phase.OPENING, members=(), roster=(), first_epoch=self.epoch + 1,
            is_epoch_used_up=False, is_suspicious=False, retries=0, disagreements=0, drifted="",
            reached=reached, is_over=False, removals=(), failed_joins=(), dealt=(),
        )  # fmt: skip

    def after_leave(self, name: str, reason: str, failed_joins: int = 0) -> HubState:
        """The state after a replica has left. Training is over when the leader has left because no
        sample is left: the others do so while it still saves."""
        is_over = reason == LeaveReason.FINISHED and name == self.announced
        removals = self.removals
        if reason in REMOVED:
            earlier = next((each for each in removals if each.name == name), None)
            others = tuple(each for each in removals if each.name != name)
            removals = (*others, Removals.after(earlier, name, self.round))
        failed = dict(self.failed_joins) | {name: failed_joins}
        return replace(
            self.without(name), is_finished=self.is_finished or is_over, removals=removals,
            failed_joins=tuple((each, count) for each, count in failed.items() if count),
        )  # fmt: skip

    def failed_joins_after(self, member: Member, reason: str) -> int:
        """How often in a row a replica that leaves was lost before it took part."""
        is_loss = reason in (LeaveReason.LOST, LeaveReason.EVICTED)
        took_part = self.phase is not Phase.OPENING and member.applied != NO_STATE
        return 1 + dict(self.failed_joins).get(member.name, 0) if is_loss and not took_part else 0

    def admitted_from(self, name: str) -> int:
        """The round from which a replica that joins may copy the state; 0: any."""
        return next((each.admitted_from for each in self.removals if each.name == name), 0)

    def in_epoch(self, epoch: int, handles: Mapping[str, tuple[str, ...]], leader: str) -> HubState:
        """The state after an epoch has been opened, with the handles of its members."""
        roster = tuple(
            replace(each, applied=self.round, handles=handles[each.name])
            if each.name in handles
            else each
            for each in self.roster
        )
        return replace(
            self, epoch=epoch, members=tuple(handles), phase=Phase.GATHER, roster=roster,
            announced=leader,
        )  # fmt: skip

    def with_deal(self, dealt: Deal) -> HubState:
        """The state in a round with a deal. A replica that has copied the state since the epoch was
        opened is not in it, and has to copy the next one."""
        names = dict(dealt)
        roster = tuple(
            each if each.name in names else replace(each, applied=NO_STATE) for each in self.roster
        )
        return replace(self, dealt=dealt, roster=roster)

    def is_known(self, count: int, digest: str) -> bool:
        """Whether training may start again from this state: from the beginning, from a state that
        was committed in any lineage, or from any state before the first epoch."""
        begins = (count, digest) == (0, "") or self.epoch == 0
        return begins or state_key(count, digest) in self.known

    def in_lineage(self, lineage: int, count: int, digest: str) -> HubState:
        """The state that goes on from a checkpoint: the commits after it are void. Replicas that
        wait with an older one have the state still to copy."""
        known = (*self.known, state_key(count, digest))
        roster = tuple(replace(each, applied=NO_STATE) for each in self.roster)
        return replace(
            self, lineage=lineage, round=count, digest=digest, holes=(), known=known, roster=roster
        )

    def committed(
        self, count: int, digest: str, samples: int, holes: Blocks, epoch: int, *, is_over: bool
    ) -> HubState:
        """The state after `count` commits, the last of them in an epoch, and perhaps of all."""
        roster = tuple(
            replace(
                each, applied=count if each.name in self.members else each.applied,
                is_arrived=False, ready=None, lost=(), failures=0,
            )
            for each in self.roster
        )  # fmt: skip
        return replace(
            self, round=count, digest=digest, samples=samples, holes=holes, roster=roster,
            retries=0, disagreements=0, drifted="", phase=Phase.GATHER, commit_epoch=epoch,
            known=(*self.known, state_key(count, digest)), reached=0, is_over=is_over, dealt=(),
        )  # fmt: skip

    @property
    def open_fields(self) -> dict[str, Any]:
        """What the journal's `open` has: which training goes on, and from which commit."""
        return {"lineage": self.lineage, "round": self.round, "digest": self.digest,
                "void": self.num_void}  # fmt: skip


def failed_joins_text(count: int) -> str:
    """Say how often in a row a replica was lost before it took part; empty for 0."""
    again = f", {count} times in a row: look at its output" if count > 1 else ""
    return f" before it took part{again}" if count else ""


def state_key(count: int, digest: str) -> str:
    """A short text for the state after `count` commits with this digest."""
    return hashlib.sha256(f"{count} {digest}".encode()).hexdigest()[:KEY_DIGITS]


def replay(entries: Iterable[JournalEntry], minimum: int) -> HubState:
    """The state of a hub that is started on a journal, its term included.

    Nobody is connected, and whatever was under way between the replicas is not known any more:
    the epoch's groups may be formed in part, or hold parts of an exchange.
    """
    state = HubState(minimum=minimum, term=0)
    for entry in entries:
        has = entry.fields
        if entry.event == "open":
            state = replace(state, term=entry.term)
            if has["lineage"] != state.lineage:
                state = state.in_lineage(has["lineage"], has["round"], has["digest"])
        elif entry.event == "join":
            holds_state = has.get("holds_state", state.phase is Phase.OPENING)
            applied = state.round if holds_state else NO_STATE
            member = Member(
                has["name"], has["incarnation"], (), applied, state.joins, is_connected=False
            )
            state = replace(
                state, joins=state.joins + 1, layout=has["layout"], nominal=has["nominal"]
            ).with_member(member)
        elif entry.event == "copied":
            if (copied := state.member(has["name"])) is not None:
                state = state.with_member(replace(copied, applied=state.round))
        elif entry.event == "leave":
            state = state.after_leave(has["name"], has["reason"], has.get("failed_joins", 0))
            if state.is_vacant and state.is_finished:  # the hub ended before it recorded the end
                state = replace(state, phase=Phase.ENDED, end=(LeaveReason.FINISHED, 0))
            elif state.is_vacant:
                state = state.vacated()
        elif entry.event == "epoch":
            handles = zip(has["members"], map(tuple, has["handles"]), strict=True)
            state = state.in_epoch(entry.epoch, dict(handles), has["leader"])
        elif entry.event == "commit":
            holes = tuple((first, count) for first, count in has.get("holes", ()))
            state = state.committed(
                has["round"] + 1, has["digest"], has["samples"], holes, entry.epoch,
                is_over=has.get("is_over", False),
            )  # fmt: skip
        elif entry.event == "deal":
            state = state.with_deal(tuple(has["steps"].items()))
        elif entry.event == "stop":
            state = replace(state, is_stopping=True)
        elif entry.event == "end":
            state = replace(state, phase=Phase.ENDED, end=(has["reason"], has["exit_code"]))
    return replace(state, term=state.term + 1, is_epoch_used_up=state.epoch > 0)


# ---- Inputs and outputs of the decisions


@dataclass(frozen=True, slots=True)
class Record:
    """Write a line of the journal, and go on only when it is durable."""

    event: str
    epoch: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a replica; dropped where it is not connected."""

    name: str
    message: FromHub


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A replica's connection has ended."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is taken for lost: it was silent for too long."""

    reason: str = LeaveReason.LOST


@dataclass(frozen=True, slots=True)
class Late:
    """A replica copies the state for too long: the meeting has waited for it for so long."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asks that the run ends after the next commit; where a deal stands, the one after."""


@dataclass(frozen=True, slots=True)
class OpeningOverdue:
    """The replicas that are there have waited long enough for the others to begin."""


@dataclass(frozen=True, slots=True)
class EpochOverdue:
    """The members form the groups of an epoch, or exchange over them, for too long."""

    epoch: int


FromClock = Lost | Late | OpeningOverdue | EpochOverdue
Output = Record | Send
Input = Hello | Arrive | Formed | Ready | Failed | Healed | Leave | Disconnected | Stop | FromClock
