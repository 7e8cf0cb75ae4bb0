"""A replica's side of the protocol: a pure state machine, the counterpart of `machine`.

The ranks of a replica act on one ordered sequence of orders, which are the hub's messages that are
valid where the replica stands. What the ranks have done comes back as a report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from msgspec import structs

from megatron_edit.elastic.hub_state import NO_STATE
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Commit,
    End,
    Failed,
    Fenced,
    Formed,
    FormEpoch,
    FromHub,
    FromReplica,
    Go,
    Heal,
    Healed,
    Hello,
    Leave,
    Ready,
    Refused,
    Welcome,
)
from megatron_edit.errors import FencedError, UsageError, to_one_line


class Task(Enum):
    """What the ranks of a replica do."""

    COPY = "copy"  # the state, from another replica
    TRAIN = "train"
    WAIT = "wait"  # at the meeting
    FORM = "form"  # the groups of an epoch
    STAND = "stand"  # the groups are formed; wait for the others'
    EXCHANGE = "exchange"
    READY = "ready"  # the result is complete; wait for the decision
    FAILED = "failed"  # forming or exchanging has failed; wait until it is abandoned
    ABANDON = "abandon"  # put the exchange aside
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Where a replica stands.

    Attributes:
        hello: as it was at the start.
        task: see there.
        applied: commits whose result it holds; `NO_STATE`: none.
        digest: of that state.
        epoch: whose groups the task is about.
        ready: the result that waits for the decision.
        steps: see `Arrive`.
        leave: why the ranks end; empty while they do not.
        admitted_from: the round that it waits for before it copies the state; 0: none.
        has_begun: whether the ranks train, or have trained, in this run. The first groups are
            formed before that; after a failure all start again.
    """

    hello: Hello
    task: Task
    applied: int
    digest: str
    epoch: int = 0
    ready: Ready | None = None
    handles: tuple[str, ...] = ()
    steps: int | None = None
    leave: str = ""
    admitted_from: int = 0
    has_begun: bool = False

    @classmethod
    def fresh(cls, hello: Hello) -> ReplicaState:
        """Of a replica that has just started."""
        return cls(hello, Task.WAIT, hello.applied, hello.digest)


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to the hub stands, again or for the first time."""


@dataclass(frozen=True, slots=True)
class RoundDue:
    """The ranks are at the meeting: a round's training is over, or an exchange is put aside.

    Attributes:
        steps: see `Arrive`; after an exchange that was put aside the same as before it.
    """

    handles: tuple[str, ...]
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class GroupsFormed:
    """All ranks have formed the groups of an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All ranks hold the complete result of a round."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class ExchangeFailed:
    """A rank could not form the groups, or exchange, with these replicas."""

    epoch: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateCopied:
    """All ranks hold the state after a round, with this digest, and wait at the meeting.

    Attributes:
        steps: see `Arrive`; 0 for a replica that trains on during the exchange.
    """

    round: int
    digest: str
    handles: tuple[str, ...]
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    """The ranks end at the next step."""

    reason: str


Report = Connected | RoundDue | GroupsFormed | Exchanged | ExchangeFailed | StateCopied | Quit
LastOrder = Fenced | Refused | End  # nothing follows it
Order = FormEpoch | Go | Commit | Abandon | Heal | LastOrder
ACTIVE = (Task.FORM, Task.STAND, Task.EXCHANGE, Task.READY)
BUSY = (*ACTIVE, Task.FAILED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from an input.

    Attributes:
        state: the replica's state.
        messages: for the hub, in order.
        orders: for the ranks, in order.
    """

    state: ReplicaState
    messages: tuple[FromReplica, ...] = ()
    orders: tuple[Order, ...] = ()


def report(state: ReplicaState, given: Report) -> Outcome:
    """What follows where the ranks, or the connection, report something."""
    match given:
        case Connected():
            hello = structs.replace(
                state.hello, applied=state.applied, digest=state.digest, epoch=state.epoch,
                is_fresh=not state.has_begun and state.epoch == 0,
                is_busy=state.task in BUSY and state.has_begun,
            )  # fmt: skip
            return Outcome(state, (hello, *_outstanding(state)))
        case RoundDue(handles, steps) if state.task in (Task.TRAIN, Task.ABANDON):
            waiting = replace(
                state, task=Task.WAIT, handles=handles, steps=steps, has_begun=True
            )  # fmt: skip
            return Outcome(waiting, (Arrive(state.applied, handles, steps),))
        case GroupsFormed(epoch) if (state.task, state.epoch) == (Task.FORM, epoch):
            task = Task.STAND if state.has_begun else Task.TRAIN
            return Outcome(replace(state, task=task, has_begun=True), (Formed(epoch),))
        case Exchanged(ready) if (state.task, state.epoch) == (Task.EXCHANGE, ready.epoch):
            return Outcome(replace(state, task=Task.READY, ready=ready), (ready,))
        case ExchangeFailed(epoch, lost) if state.task in ACTIVE and state.epoch == epoch:
            return Outcome(replace(state, task=Task.FAILED), (Failed(epoch, lost),))
        case StateCopied(count, digest, handles, steps) if state.task is Task.COPY:
            copied = replace(
                state, task=Task.WAIT, applied=count, digest=digest, handles=handles, steps=steps
            )  # fmt: skip
            return Outcome(copied, (Healed(count, digest), Arrive(count, handles, steps)))
        case Quit(reason):
            return Outcome(replace(state, task=Task.ENDED, leave=reason), (Leave(reason),))
    return Outcome(state)


def exit_of(order: LastOrder) -> tuple[int, str]:
    """Exit code of a rank that ends by an order, and the reason in one line."""
    match order:
        case Fenced(reason):
            text = f"{reason}; start this replica again: it joins the others"
            return FencedError.exit_code, to_one_line(text)
        case Refused(value, rule, remedy):
            return UsageError.exit_code, str(UsageError(value, rule, remedy))
        case End(reason, exit_code):
            return exit_code, to_one_line(f"the run has ended: {reason}")


def receive(state: ReplicaState, message: FromHub) -> Outcome:
    """What follows from a message of the hub. What has been done already is not done again."""
    if state.task is Task.ENDED:
        return Outcome(state)
    match message:
        case Welcome(is_joiner=True) if not state.has_begun:
            return Outcome(replace(
                state, task=Task.COPY, applied=NO_STATE, digest="", has_begun=True,
                admitted_from=message.admitted_from,
            ))  # fmt: skip
        case FormEpoch(_, epoch) if epoch > state.epoch:
            aside = (Abandon(state.epoch),) if state.task in BUSY else ()
            forming = replace(state, task=Task.FORM, epoch=epoch, ready=None)
            return Outcome(forming, orders=(*aside, message))
        case FormEpoch(_, epoch) if state.task not in BUSY and epoch == state.epoch:
            return Outcome(state, (Formed(epoch),))
        case FormEpoch(_, epoch) if (state.task, state.epoch) == (Task.STAND, epoch):
            return Outcome(state, (Formed(epoch),))
        case Go(epoch, count) if state.task in (Task.STAND, Task.WAIT) and (
            (epoch, count) == (state.epoch, state.applied)
        ):
            return Outcome(replace(state, task=Task.EXCHANGE), orders=(message,))
        case Commit() if message.round >= state.applied:
            return _committed(state, message)
        case Abandon(epoch) if state.task in BUSY and epoch == state.epoch:
            return Outcome(replace(state, task=Task.ABANDON, ready=None), orders=(message,))
        case Heal(count, digest):
            if (count, digest) == (state.applied, state.digest):
                return Outcome(state, (Healed(count, digest), *_outstanding(state)))
            return Outcome(replace(state, task=Task.COPY), orders=(message,))
        case Fenced() | Refused() | End():
            return Outcome(replace(state, task=Task.ENDED), orders=(message,))
    return Outcome(state)


def _committed(state: ReplicaState, commit: Commit) -> Outcome:
    """The ranks apply the result that the hub has committed, and no other."""
    ready = state.ready
    decided = (commit.epoch, commit.round, commit.digest)
    if ready is None or (ready.epoch, ready.round, ready.digest) != decided:
        end = End(f"round {commit.round} was committed with a result that is not this replica's", 4)
        return Outcome(replace(state, task=Task.ENDED), orders=(end,))
    applied = replace(
        state, task=Task.TRAIN, applied=commit.round + 1, digest=commit.digest, ready=None
    )
    return Outcome(applied, orders=(commit,))


def _outstanding(state: ReplicaState) -> tuple[FromReplica, ...]:
    """What the hub may not have heard before the connection ended."""
    match state.task:
        case Task.WAIT if state.has_begun:
            return (Arrive(state.applied, state.handles, state.steps),)
        case Task.STAND:
            return (Formed(state.epoch),)
        case Task.ENDED if state.leave:
            return (Leave(state.leave),)
        case Task.FAILED:
            return (Failed(state.epoch),)
        case Task.READY:
            assert state.ready is not None, "ready without a result"
            return (state.ready,)
    return ()
