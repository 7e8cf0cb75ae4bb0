"""Every state that hub and replicas can reach together, with few replicas, rounds and faults.

Replicas are killed, cut off, replaced, taken for lost; the hub is killed between any two of its
actions and started again on its journal. Would catch: a replica that applies what was not
committed, two results for one round, a commit of replicas that differ, a wait that nothing ends.

The replicas that a run begins with compare their parameters once they have formed the first groups,
and before their first step. That is a collective: where one is lost it may end on some of the
others, and fail on the rest.

With a delay replicas train on after each `Go`. That changes nothing at the hub, so the model does
not count the steps: a replica applies a commit at any time after it has heard of it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_edit.elastic.hub_state import (
    Disconnected,
    EpochOverdue,
    HubState,
    Late,
    LeaveReason,
    Lost,
    OpeningOverdue,
    Phase,
    Record,
    Send,
    Stop,
    replay,
)
from megatron_edit.elastic.journal import JournalEntry
from megatron_edit.elastic.machine import step
from megatron_edit.elastic.messages import Abandon, Commit, Deal, End, Go, Heal, Hello, Ready
from megatron_edit.elastic.replica import (
    Connected,
    Exchanged,
    ExchangeFailed,
    GroupsFormed,
    Outcome,
    Quit,
    ReplicaState,
    RoundDue,
    StateCopied,
    Task,
    receive,
    report,
)

Queue = tuple[Any, ...]
CHECKPOINT = "/checkpoint"  # digest


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica and its connection.

    Attributes:
        steps: that it reports in each round, which differ from those of its other starts; None: it
            does not train on during an exchange.
        deal: that it trains on, in a round that is not committed.
        earlier: commits whose result it holds, and digest, while a newer one waits to be applied.
        compared: the epoch at whose begin it has sent its parameters to the others; 0: none.
        is_comparing: whether it waits for theirs.
    """

    state: ReplicaState
    is_alive: bool = True
    is_linked: bool = False
    to_hub: Queue = ()
    from_hub: Queue = ()
    may_copy: bool = False
    starts: int = 1
    steps: int | None = None
    deal: Deal = ()
    earlier: tuple[int, str] | None = None
    compared: int = 0
    is_comparing: bool = False

    @property
    def at_meeting(self) -> RoundDue:
        return RoundDue(("handle",), self.steps)

    @property
    def holds(self) -> tuple[int, str]:
        """Commits whose result its ranks hold, and its digest."""
        return self.earlier or (self.state.applied, self.state.digest)


@dataclass(frozen=True, slots=True)
class World:
    """Everything: the hub, its journal, the replicas, and the faults that may still happen."""

    hub: HubState
    journal: tuple[str, ...]
    peers: tuple[Peer, ...]
    faults: int

    def with_peer(self, index: int, peer: Peer) -> World:
        return replace(self, peers=(*self.peers[:index], peer, *self.peers[index + 1 :]))


def hello(index: int, start: int, applied: int, num: int, minimum: int = 1) -> Hello:
    """Of a replica that begins anew, or from a checkpoint after one commit."""
    name, digest = "abc"[index], CHECKPOINT if applied else ""
    return Hello(name, f"{start}", "layout", num, minimum, (name,), True, applied, digest)


def beginning(
    num: int, faults: int, applied: int = 0, minimum: int = 1, steps: int | None = None
) -> World:
    peers = tuple(
        Peer(ReplicaState.fresh(hello(i, 1, applied, num, minimum)), steps=steps)
        for i in range(num)
    )
    hub = HubState(minimum=minimum)
    return World(hub, (line("open", 1, 0, hub.open_fields),), peers, faults)


def line(event: str, term: int, epoch: int, fields: dict[str, Any]) -> str:
    return json.dumps([event, term, epoch, fields])


@cache
def entries(journal: tuple[str, ...]) -> list[JournalEntry]:
    parsed = (json.loads(text) for text in journal)
    return [JournalEntry(0, 0.0, term, epoch, e, fields, "") for e, term, epoch, fields in parsed]


def before_first_commit(
    num: int, faults: int, *, minimum: int = 1, steps: int | None = None
) -> World:
    """All replicas take their first step."""
    world = beginning(num, 0, minimum=minimum, steps=steps)
    while not all(peer.compared and not peer.is_comparing for peer in world.peers):
        world = next(moves(world, 1))
    assert (world.hub.round, world.hub.phase) == (0, Phase.GATHER)
    return replace(world, faults=faults)


def after_first_commit(num: int, faults: int, *, minimum: int = 1) -> World:
    """All replicas train on during exchanges, and the first round is over."""
    world = beginning(num, 0, minimum=minimum, steps=1)
    while world.hub.round == 0:
        world = next(moves(world, 1))
    return replace(world, faults=faults)


def with_joiner(world: World) -> World:
    """The last replica is lost, and started again."""
    index, num = len(world.peers) - 1, len(world.peers)
    dead = world.with_peer(index, killed(world.peers[index]))
    (lost,) = hub_steps(dead, "abc"[index], Lost(), may_crash=False)
    (back,) = returns(lost, num)
    return back


@cache
def open_deal(journal: tuple[str, ...]) -> Deal:
    """The deal of the round that is not committed, as the journal has it: one at most, until the
    commit, or until all replicas of it have left. Only those that have not are in the commit."""
    deal: dict[str, int] = {}
    left: set[str] = set()
    for entry in entries(journal):
        if entry.event == "deal":
            assert not deal
            deal, left = entry.fields["steps"], set()
        elif entry.event == "leave":
            left.add(entry.fields["name"])
            deal = {} if left >= set(deal) else deal
        elif entry.event == "commit":
            assert not deal or set(entry.fields["members"]) <= set(deal) - left
            deal = {}
    return tuple(deal.items())


def members_of(world: World, epoch: int) -> list[str]:
    """As the journal has them."""
    found = [e for e in entries(world.journal) if (e.event, e.epoch) == ("epoch", epoch)]
    return list(found[-1].fields["members"])


def outcome(world: World, index: int, result: Outcome) -> World:
    peer = world.peers[index]
    check_orders(world, index, peer.state, result)
    sent = (*peer.to_hub, *result.messages) if peer.is_linked else peer.to_hub
    may_copy = any(isinstance(order, Heal) for order in result.orders) or (
        peer.may_copy and result.state.task is Task.COPY
    )
    now = replace(peer, state=result.state, to_hub=sent, may_copy=may_copy)
    for order in result.orders:
        if isinstance(order, Go):
            now = replace(now, deal=order.dealt)
        elif isinstance(order, Commit) and peer.deal:
            now = replace(now, deal=(), earlier=peer.holds)
        elif isinstance(order, Abandon) and not peer.state.has_begun:
            now = killed(now, now.to_hub)  # it cannot form other groups
    if result.state.task is Task.TRAIN and not peer.state.has_begun:
        now = replace(now, compared=result.state.epoch, is_comparing=True)
    return world.with_peer(index, now)


def killed(peer: Peer, kept: Queue = ()) -> Peer:
    """A replica whose process has ended; `kept` arrives at the hub before that."""
    return replace(peer, is_alive=False, is_linked=False, to_hub=kept, from_hub=())


def check_orders(world: World, index: int, before: ReplicaState, result: Outcome) -> None:
    for order in result.orders:
        if isinstance(order, Commit):
            commits = [e for e in entries(world.journal) if e.event == "commit"]
            commit = [e for e in commits if e.fields["round"] == order.round][-1]
            assert before.hello.name in commit.fields["members"]
            assert commit.fields["digest"] == order.digest == result.state.digest
            assert (commit.epoch, before.ready is not None) == (order.epoch, True)
        if isinstance(order, Go) and order.dealt:
            # Of this start, and what it trains on already does not change.
            assert (before.hello.name, before.steps) in order.dealt
            assert world.peers[index].deal in ((), order.dealt)
        assert not (isinstance(order, End) and "not this replica's" in order.reason)


def hub_steps(world: World, name: str, given: Any, *, may_crash: bool) -> Iterator[World]:
    """The hub takes an input; where it may crash, also each way to end in the middle."""
    state, outputs = step(world.hub, name, given)
    now = world
    for done in outputs:
        if may_crash and world.faults > 0:
            yield crash(now)
        if isinstance(done, Record):
            check_record(world.hub, name, given, done)
            now = replace(
                now, journal=(*now.journal, line(done.event, state.term, done.epoch, done.fields))
            )
        else:
            if isinstance(done.message, Go):
                assert done.message.dealt == open_deal(now.journal)
                assert not (done.message.dealt and done.message.is_last)
            now = deliver_to(now, done)
    yield replace(now, hub=state)


def check_record(hub: HubState, name: str, given: Any, record: Record) -> None:
    """All members of a commit have reported its digest, the last one just now. The last round of a
    run that ends on request has no deal."""
    assert record.event != "deal" or not hub.is_stopping
    if record.event == "commit":
        for each in record.fields["members"]:
            member = hub.member(each)
            ready = given if each == name else member and member.ready
            assert isinstance(ready, Ready) and ready.digest == record.fields["digest"]


def deliver_to(world: World, send: Send) -> World:
    for index, peer in enumerate(world.peers):
        # The hub knows a connection only after the `Hello` that comes first over it.
        is_known = not (peer.to_hub and isinstance(peer.to_hub[0], Hello))
        is_there = peer.is_linked and peer.is_alive and is_known
        if peer.state.hello.name == send.name and is_there:
            return world.with_peer(index, replace(peer, from_hub=(*peer.from_hub, send.message)))
    return world


def crash(world: World) -> World:
    """The hub is killed, and started again on its journal. What was on its way is lost."""
    first = entries(world.journal)
    hub = replay(first, world.hub.minimum)
    journal = (*world.journal, line("open", hub.term, hub.epoch, hub.open_fields))
    peers = tuple(replace(p, is_linked=False, to_hub=(), from_hub=()) for p in world.peers)
    return World(hub, journal, peers, world.faults - 1)


def moves(world: World, rounds: int) -> Iterator[World]:
    """What happens without a fault: each is enabled until it has happened.

    Once no fault is left, what a replica does by itself with what it has received happens at once:
    the order of such moves of different replicas makes no difference.
    """
    if world.faults == 0 and (local := next(local_moves(world), None)) is not None:
        yield local
        return
    for index, peer in enumerate(world.peers):
        name = peer.state.hello.name
        if peer.to_hub:
            rest = world.with_peer(index, replace(peer, to_hub=peer.to_hub[1:]))
            yield from hub_steps(rest, name, peer.to_hub[0], may_crash=True)
        elif not (peer.is_linked and peer.is_alive) or peer.state.task is Task.ENDED:
            member = world.hub.member(name)
            if member is not None and member.is_connected:
                yield from hub_steps(world, name, Disconnected(), may_crash=False)
            elif member is not None and world.hub.phase is not Phase.ENDED:
                yield from hub_steps(world, name, Lost(), may_crash=False)
        if peer.is_alive and peer.is_linked and peer.state.task is not Task.ENDED:
            yield from ranks(world, index, peer, rounds)
    yield from local_moves(world)


def local_moves(world: World) -> Iterator[World]:
    """Replicas connect, and take what the hub has sent."""
    for index, peer in enumerate(world.peers):
        if not peer.is_alive or peer.state.task is Task.ENDED:
            continue
        if not peer.is_linked:
            member = world.hub.member(peer.state.hello.name)
            if not peer.to_hub and (member is None or not member.is_connected):
                linked = world.with_peer(index, replace(peer, is_linked=True))
                yield outcome(linked, index, report(peer.state, Connected()))
        elif peer.from_hub:
            rest = world.with_peer(index, replace(peer, from_hub=peer.from_hub[1:]))
            yield outcome(rest, index, receive(peer.state, peer.from_hub[0]))


def ranks(world: World, index: int, peer: Peer, rounds: int) -> Iterator[World]:
    """What the ranks of a replica do by themselves."""
    state = peer.state
    if peer.is_comparing:
        yield from comparison(world, index, peer)
    elif peer.earlier is not None:  # the step at which the commit takes effect
        yield world.with_peer(index, replace(peer, earlier=None))
    elif state.task is Task.TRAIN:
        done = state.applied >= (world.hub.round if world.hub.is_over else rounds)
        yield outcome(world, index, report(state, Quit("finished") if done else peer.at_meeting))
    if state.task is Task.ABANDON:
        yield outcome(world, index, report(state, peer.at_meeting))
    if state.task is Task.COPY and peer.may_copy:
        yield from copies(world, index, peer)
    if state.task in (Task.FORM, Task.EXCHANGE):
        members = members_of(world, state.epoch)
        others = [p for p in world.peers if p.state.hello.name in members]
        if all(takes_part(p, state) for p in others):
            yield outcome(world, index, report(state, finished(state, members)))
        elif any(has_left(p, state) for p in others):
            yield outcome(world, index, report(state, ExchangeFailed(state.epoch)))


def comparison(world: World, index: int, peer: Peer) -> Iterator[World]:
    """How a comparison of parameters may end; a replica whose comparison fails ends."""
    members = members_of(world, peer.compared)
    others = [p for p in world.peers if p.state.hello.name in members]
    if all(p.compared == peer.compared for p in others):
        yield world.with_peer(index, replace(peer, is_comparing=False))
    if any(is_gone(p) or p.state.epoch != peer.compared for p in others):
        yield world.with_peer(index, killed(peer, peer.to_hub))


def is_gone(peer: Peer) -> bool:
    """Whether a replica does nothing any more."""
    return not peer.is_alive or peer.state.task is Task.ENDED


def takes_part(peer: Peer, state: ReplicaState) -> bool:
    """Whether another replica does the same collective, or has done it."""
    other = peer.state
    if not peer.is_alive or other.epoch != state.epoch:
        return False
    if state.task is Task.FORM:
        return other.task not in (Task.ENDED,)
    return other.applied > state.applied or (
        other.applied == state.applied and other.task in (Task.EXCHANGE, Task.READY)
    )


def has_left(peer: Peer, state: ReplicaState) -> bool:
    """Whether another replica will not take part any more."""
    other = peer.state
    gone = (Task.ENDED, Task.FAILED, Task.COPY)
    if not peer.is_alive or other.task in gone or other.epoch > state.epoch:
        return True
    return (
        state.task is Task.EXCHANGE
        and other.applied == state.applied
        and (other.task in (Task.WAIT, Task.ABANDON) and not peer.from_hub)
    )


def finished(state: ReplicaState, members: list[str]) -> GroupsFormed | Exchanged:
    if state.task is Task.FORM:
        return GroupsFormed(state.epoch)
    digest = f"{state.digest}/{state.applied}:{''.join(members)}"
    return Exchanged(Ready(state.epoch, state.applied, "plan", (digest,), 0, ()))


def copies(world: World, index: int, joiner: Peer) -> Iterator[World]:
    """A joiner copies what a replica that has applied holds."""
    for peer in world.peers:
        donor, (applied, digest) = peer.state, peer.holds
        is_donor = applied > 0 and donor.has_begun
        if peer.is_alive and is_donor and donor.hello.name != joiner.state.hello.name:
            copied = StateCopied(applied, digest, ("handle",), joiner.steps)
            yield outcome(world, index, report(joiner.state, copied))


def faults(world: World) -> Iterator[World]:
    """Each costs one of the faults that are left."""
    less = replace(world, faults=world.faults - 1)
    for index, peer in enumerate(world.peers):
        if peer.state.task is Task.ENDED:
            continue
        for kept in {(), peer.to_hub}:
            if peer.is_alive:
                yield less.with_peer(index, killed(peer, kept))
            if peer.is_linked:
                yield less.with_peer(
                    index, replace(peer, is_linked=False, to_hub=kept, from_hub=())
                )
        if (member := world.hub.member(peer.state.hello.name)) and member.is_connected:
            yield from hub_steps(less, member.name, Lost(), may_crash=False)
        if peer.is_alive:
            yield outcome(less, index, report(peer.state, Quit("signal")))
    if world.hub.phase is Phase.OPENING and world.hub.roster:
        yield from hub_steps(less, "", OpeningOverdue(), may_crash=False)
    elif world.hub.phase in (Phase.FORM, Phase.EXCHANGE):
        yield from hub_steps(less, "", EpochOverdue(world.hub.epoch), may_crash=False)
    yield crash(world)


def other_inputs(world: World) -> Iterator[World]:
    """A copy takes too long. Somebody asks that the run ends, in a round with a deal."""
    for each in world.hub.copying:
        yield from hub_steps(world, each.name, Late(), may_crash=False)
    if world.hub.dealt and not world.hub.is_stopping:
        yield from hub_steps(world, "", Stop(), may_crash=False)


def returns(world: World, num: int, most: int = 2) -> Iterator[World]:
    """A replica that is dead, or has been fenced, is started again, until the start `most`."""
    for index, peer in enumerate(world.peers):
        if (
            is_gone(peer)
            and peer.starts < most
            and not peer.to_hub
            and world.hub.phase is not Phase.ENDED
        ):
            before = peer.state.hello
            again = hello(index, peer.starts + 1, before.applied, num, before.minimum)
            fresh = ReplicaState.fresh(again)
            steps = None if peer.steps is None else peer.starts + 1
            yield world.with_peer(index, Peer(fresh, starts=peer.starts + 1, steps=steps))


@cache
def restarted(journal: tuple[str, ...], minimum: int) -> HubState:
    return replay(entries(journal), minimum)


def durable(hub: HubState) -> tuple[Any, ...]:
    """What a hub knows, and must know again when it is started again."""
    roster = [(each.name, each.incarnation, hub.round == each.applied) for each in hub.roster]
    phase = hub.phase if hub.phase in (Phase.OPENING, Phase.ENDED) else None
    return (
        roster, hub.members, hub.epoch, hub.lineage, hub.round, hub.digest, hub.dealt, phase,
        hub.is_stopping, hub.is_over,
    )  # fmt: skip


def check(world: World) -> None:
    """What holds in every state. No loss, and no failure, ends the run before training is over."""
    assert world.hub.phase is not Phase.ENDED or world.hub.end == ("finished", 0)
    assert durable(restarted(world.journal, world.hub.minimum)) == durable(world.hub)
    commits: list[str] = []
    ever: set[str] = set()
    open_deal(world.journal)
    for entry in entries(world.journal):
        if entry.event == "open":
            del commits[entry.fields["round"] :]
            if len(commits) < entry.fields["round"]:
                commits.append(CHECKPOINT)
                ever.add(CHECKPOINT)
        elif entry.event == "commit":
            assert entry.fields["round"] == len(commits)
            commits.append(entry.fields["digest"])
            ever.add(commits[-1])
    for peer in world.peers:
        state, member = peer.state, world.hub.member(peer.state.hello.name)
        if state.applied > 0 and state.has_begun:  # of one that was cut off, it may be void now
            assert state.digest in ever
        if member is not None and member.incarnation == state.hello.incarnation:
            assert state.applied <= 0 or state.digest == commits[state.applied - 1]


def is_over(world: World) -> bool:
    """Whether nothing is left to happen that somebody waits for. A run that has not begun waits
    for replicas to be started, and so does one with too few, but not where nobody can join: before
    the first commit, and in a round with a deal."""
    ended = [is_gone(peer) for peer in world.peers]
    is_joined = world.hub.round > 0 and not open_deal(world.journal)
    is_short = len(world.hub.expected) < world.hub.minimum and is_joined
    return all(ended) or (any(ended) and (world.hub.phase is Phase.OPENING or is_short))


def explore(
    num_rounds: int, start: World, *, returning: bool, has_others: bool = False
) -> dict[str, int]:
    """Go through all states that follow from `start`, perhaps with `other_inputs`."""
    num = len(start.peers)
    seen, todo, ends = {start}, deque([start]), {"states": 0, "complete": 0, "ended": 0}
    while todo:
        world = todo.popleft()
        check(world)
        following = list(moves(world, num_rounds))
        if not following:
            if not is_over(world):
                raise AssertionError(repr(world))
            has_all = world.hub.round == num_rounds
            ends["complete" if has_all else "ended"] += 1
        if world.faults > 0:
            following += faults(world)
        if has_others:
            following += other_inputs(world)
        if returning:
            following += returns(world, num)
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    ends["states"] = len(seen)
    return ends


@pytest.mark.parametrize(
    ("num", "rounds", "num_faults", "returning", "applied"),
    [
        (1, 2, 2, True, 0), (2, 2, 0, False, 0), (2, 2, 1, False, 0), (2, 1, 1, True, 0),
        (2, 2, 1, True, 1),
    ],
)  # fmt: skip
def test_no_reachable_state_breaks_the_protocol(
    num: int, rounds: int, num_faults: int, returning: bool, applied: int
) -> None:
    """All states of small runs; each that nothing follows must be a regular end."""
    ends = explore(rounds, beginning(num, num_faults, applied), returning=returning)
    assert ends["complete"] > 0


@pytest.mark.parametrize(("minimum", "steps"), [(2, None), (2, 1)])
def test_no_beginning_breaks_the_protocol(minimum: int, steps: int | None) -> None:
    """With too few for a while, and with a deal of the first round. Nobody can join before the
    first commit. Would catch: the others wait for that without end."""
    start = beginning(2, 1, minimum=minimum, steps=steps)
    ends = explore(1, start, returning=True, has_others=True)
    assert ends["complete"] > 0


@pytest.mark.parametrize(
    ("num", "rounds", "minimum", "steps"),
    [(2, 2, 1, None), (2, 1, 2, None), (2, 1, 2, 1), (3, 1, 1, None), (3, 1, 1, 1)],
)
def test_loss_before_the_first_commit_does_not_end_the_run(
    num: int, rounds: int, minimum: int, steps: int | None
) -> None:
    """The others go on, whatever fails, and although nobody comes back. Would catch: all have to
    start again."""
    start = before_first_commit(num, 1, minimum=minimum, steps=steps)
    ends = explore(rounds, start, returning=False)
    assert ends["complete"] > 0 and ends["ended"] == 0


@pytest.mark.full
@pytest.mark.timeout(900)  # half a million states
@pytest.mark.parametrize(
    ("num", "rounds", "num_faults", "returning"), [(2, 1, 2, False), (3, 1, 1, False)]
)
def test_no_reachable_state_of_larger_runs_breaks_the_protocol(
    num: int, rounds: int, num_faults: int, returning: bool
) -> None:
    ends = explore(rounds, beginning(num, num_faults), returning=returning)
    assert ends["complete"] > 0


@pytest.mark.parametrize(
    ("num", "rounds", "num_faults", "returning", "minimum"),
    [
        (1, 2, 2, True, 1), (2, 2, 1, True, 2),
        pytest.param(2, 3, 1, True, 1, marks=pytest.mark.full),
        pytest.param(2, 2, 2, False, 1, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_no_reachable_state_breaks_the_protocol_with_a_delay(
    num: int, rounds: int, num_faults: int, returning: bool, minimum: int
) -> None:
    """All states after the first commit, which the tests above lead to."""
    start = after_first_commit(num, num_faults, minimum=minimum)
    ends = explore(rounds, start, returning=returning, has_others=True)
    assert ends["complete"] > 0


def test_no_loss_of_three_breaks_the_protocol_with_a_delay() -> None:
    ends = explore(2, after_first_commit(3, 1), returning=False)
    assert ends["complete"] > 0


@pytest.mark.parametrize("has_others", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_joiner_breaks_the_protocol_with_a_delay(has_others: bool) -> None:
    """Its copy may end at any time, also during an exchange that does not wait for it."""
    start = with_joiner(after_first_commit(2, 1))
    ends = explore(2, start, returning=False, has_others=has_others)
    assert ends["complete"] > 0


class RandomRun(RuleBasedStateMachine):
    """Runs of three replicas and three rounds with up to eight faults, at random."""

    NUM, ROUNDS, FAULTS = 3, 3, 8

    def __init__(self) -> None:
        super().__init__()
        self.world = self.start()
        self.is_stopping = False

    def start(self) -> World:
        return beginning(self.NUM, self.FAULTS)

    def choose(self, options: list[World], pick: int) -> None:
        if options:
            self.world = options[pick % len(options)]

    @rule(picks=st.lists(st.integers(0, 999), min_size=1, max_size=20))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            self.choose(list(moves(self.world, self.ROUNDS)), pick)
            check(self.world)

    @precondition(lambda self: self.world.hub.phase is not Phase.ENDED)
    @rule()
    def stop(self) -> None:
        (self.world,) = hub_steps(self.world, "", Stop(), may_crash=False)
        self.is_stopping = True

    @precondition(lambda self: self.world.faults > 0)
    @rule(pick=st.integers(0, 999))
    def fail(self, pick: int) -> None:
        self.choose(list(faults(self.world)), pick)

    @rule(pick=st.integers(0, 999))
    def come_back(self, pick: int) -> None:
        self.choose(list(returns(self.world, self.NUM)), pick)

    @invariant()
    def nothing_contradicts(self) -> None:
        check(self.world)
        assert self.world.hub.is_stopping == self.is_stopping

    def teardown(self) -> None:
        """Without further faults every run comes to an end."""
        self.world = replace(self.world, faults=0)
        for number in range(2000):
            options = list(moves(self.world, self.ROUNDS))
            if not options:
                break
            self.choose(options, number * 7919)
            check(self.world)
        assert is_over(self.world), self.world


class RandomRunWithTwo(RandomRun):
    """Runs in which at least two are needed, and which train on during exchanges from the start."""

    def start(self) -> World:
        return beginning(self.NUM, self.FAULTS, minimum=2, steps=1)


class RandomRunWithDelay(RandomRun):
    """Runs in which replicas train on during exchanges."""

    def start(self) -> World:
        return after_first_commit(self.NUM, self.FAULTS)


class RandomRunWithRemovals(RandomRun):
    """Runs in which replicas are taken out again and again, and at least two are needed."""

    ROUNDS, FAULTS = 6, 8

    def __init__(self) -> None:
        super().__init__()
        world = beginning(self.NUM, self.FAULTS, minimum=2)
        join = {"incarnation": "0", "layout": "layout", "nominal": self.NUM, "holds_state": True}
        leave = {"reason": LeaveReason.EVICTED}
        earlier: list[tuple[str, dict[str, Any]]] = [("join", join), ("leave", leave)]
        lines = [
            line(event, 1, 0, {"name": name, **fields})
            for name in "abc"
            for event, fields in 2 * earlier
        ]
        journal = (*world.journal, *lines)
        world = replace(world, journal=journal, hub=replay(entries(journal), 2), faults=0)
        while world.hub.round == 0:
            world = next(moves(world, self.ROUNDS))
        self.world = replace(world, faults=self.FAULTS)

    @precondition(lambda self: self.world.faults > 0 and self.world.hub.round > 0)
    @rule(pick=st.integers(0, 999))
    def take_out(self, pick: int) -> None:
        names = [each.name for each in self.world.hub.roster]
        less, given = replace(self.world, faults=self.world.faults - 1), Lost(LeaveReason.EVICTED)
        self.choose(
            [each for name in names for each in hub_steps(less, name, given, may_crash=False)], pick
        )

    @rule(pick=st.integers(0, 999))
    def come_back(self, pick: int) -> None:
        self.choose(list(returns(self.world, self.NUM, 99)), pick)

    def teardown(self) -> None:
        """Where replicas come back, every run comes to an end."""
        self.world = replace(self.world, faults=0)
        for number in range(4000):
            options = list(moves(self.world, self.ROUNDS))
            options = options or list(returns(self.world, self.NUM, 99))
            if not options:
                break
            self.choose(options, number * 7919)
            check(self.world)
        assert self.world.hub.phase is Phase.ENDED and is_over(self.world), self.world


test_random_runs = RandomRun.TestCase
test_random_runs.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_random_runs_with_two = RandomRunWithTwo.TestCase
test_random_runs_with_two.settings = test_random_runs.settings
test_random_runs_with_delay = RandomRunWithDelay.TestCase
test_random_runs_with_delay.settings = test_random_runs.settings
test_random_runs_with_removals = RandomRunWithRemovals.TestCase
test_random_runs_with_removals.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None
)
