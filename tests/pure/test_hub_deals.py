"""Rounds with a deal: the replicas train on while a round is exchanged.

Would catch: replicas that train on different blocks after an exchange that has failed, and one
that trains on what the hub has forgotten.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.elastic import deadlines
from megatron_edit.elastic.deadlines import (
    ABANDONING_SECONDS,
    COPY_ROUNDS,
    FORMING_SECONDS,
    Deadlines,
    Liveness,
)
from megatron_edit.elastic.hub_state import (
    Disconnected,
    EpochOverdue,
    Late,
    LeaveReason,
    Lost,
    Phase,
    Record,
    Send,
    Stop,
)
from megatron_edit.elastic.machine import step
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Commit,
    Deal,
    Failed,
    Formed,
    FormEpoch,
    Go,
    Heal,
    Healed,
    Hello,
    Leave,
    MessageError,
    Welcome,
    decode,
    to_json,
)
from megatron_edit.elastic.replica import (
    Connected,
    GroupsFormed,
    ReplicaState,
    RoundDue,
    StateCopied,
    receive,
    report,
)
from tests.harness.hub import HubDecisions, PretendingReplica, read_journal, running_hub
from tests.pure.test_hub_server import wait_until

DEAL: Deal = (("a", 3), ("b", 5))


def dealt() -> HubDecisions:
    """A run of `a` and `b`, whose second round has a deal and is exchanged."""
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", steps=3)
    run.arrive("b", steps=5)
    assert run.records == ["deal"] and run.sent == {name: [Go(1, 1, dealt=DEAL)] for name in "ab"}
    return run


def exchange_again(run: HubDecisions, *names: str, steps: int = 7) -> Go:
    """These replicas arrive after an abandoned exchange, and form groups; what they are told."""
    run.arrive(*names, steps=steps)
    for name in names:
        assert isinstance(run.sent[name][0], FormEpoch) or name != names[-1]
    for name in names:
        run.take(name, Formed(run.state.epoch))
    (go,) = run.sent[names[0]]
    assert run.sent == {name: [go] for name in names} and isinstance(go, Go)
    return go


def back(run: HubDecisions, name: str, **more: Any) -> Hello:
    """What a replica reports to a hub that was started again."""
    epoch = run.state.epoch
    return run.hello(name, 2, is_fresh=False, applied=1, digest="d0", epoch=epoch, **more)


def test_deal_is_recorded_before_anybody_is_told() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", steps=3)
    _, outputs = step(run.state, "b", Arrive(1, ("b",), 5))
    assert [type(each) for each in outputs] == [Record, Send, Send]
    run = dealt()
    assert dict(run.journal[-1].fields) == {"round": 1, "steps": {"a": 3, "b": 5}}
    for name in "ab":
        run.ready(name)
    assert run.sent["a"] == [Commit(1, 1, "d1")] and run.state.dealt == ()
    run.arrive("a", "b", steps=2)
    assert run.sent["a"] == [Go(1, 2, dealt=(("a", 2), ("b", 2)))]


def test_deal_stays_the_same_after_a_loss() -> None:
    run = dealt()
    run.take("b", Lost())
    assert run.sent["a"] == [Abandon(1)]
    assert exchange_again(run, "a") == Go(2, 1, dealt=DEAL)
    assert run.records == [], "one deal in a round"
    run.ready("a")
    assert run.journal[-1].event == "commit" and run.journal[-1].fields["members"] == ["a"]
    run.arrive("a", steps=1)
    assert run.sent["a"] == [Go(2, 2, dealt=(("a", 1),))]


def test_deal_stays_the_same_after_a_failed_exchange() -> None:
    run = dealt()
    run.take("a", Failed(1))
    assert exchange_again(run, "a", "b") == Go(2, 1, dealt=DEAL)
    run.take("b", Disconnected())
    run.take("b", back(run, "b", is_busy=True))
    assert run.sent["b"][-1] == Go(2, 1, dealt=DEAL), "also where it is sent again"


@pytest.mark.parametrize("is_told", [False, True])
def test_deal_outlives_the_hub(is_told: bool) -> None:
    """Also one that no replica has heard of."""
    run = dealt()
    run.restart()
    assert run.state.dealt == DEAL
    for name in "ab":
        run.take(name, back(run, name, is_busy=is_told))
        assert isinstance(run.sent[name][-1], Abandon) == is_told
    assert exchange_again(run, "a", "b") == Go(2, 1, dealt=DEAL)


def test_round_without_steps_has_no_deal() -> None:
    """Would catch: a replica that waits for the result is taken to train on."""
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", steps=3)
    run.arrive("b")
    assert run.records == [] and run.sent["a"] == [Go(1, 1)]


def test_stop_takes_effect_at_once_only_before_the_deal() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.take("", Stop())
    run.arrive("a", "b", steps=3)
    assert run.records == [] and run.sent["a"] == [Go(1, 1, is_last=True)]
    late = dealt()
    late.take("", Stop())
    late.take("a", Failed(1))
    assert exchange_again(late, "a", "b") == Go(2, 1, dealt=DEAL)
    for name in "ab":
        late.ready(name)
    assert not late.state.is_over
    late.arrive("a", "b", steps=3)
    assert late.sent["a"] == [Go(2, 2, is_last=True)] and late.records == []


def test_replica_outside_of_the_deal_waits_for_the_commit() -> None:
    """Also the new incarnation of one that was in it."""
    run = dealt()
    run.take("c", run.hello("c", 2))
    assert [type(message) for message in run.sent["c"]] == [Welcome]
    run.take("b", Disconnected())
    run.take("b", run.hello("b", 2, "2"))
    assert [type(message) for message in run.sent["b"]] == [Welcome]
    assert exchange_again(run, "a") == Go(2, 1, dealt=DEAL)
    run.ready("a")
    assert run.sent["b"] == run.sent["c"] == [Heal(2, "d1", ("a",))]
    for name in "bc":
        run.take(name, Healed(2, "d1"))
    run.arrive("b", "c", steps=0)
    run.arrive("a", steps=4)
    assert run.state.members == ("a", "b", "c")


def test_copy_that_ends_during_the_exchange_is_of_no_use() -> None:
    """The meeting has stopped waiting for it before the deal."""
    run = HubDecisions("a", "b", rounds=1)
    run.take("c", run.hello("c", 2))
    run.take("c", Late())
    run.arrive("a", steps=3)
    run.arrive("b", steps=5)
    for given in (Healed(1, "d0"), Arrive(1, ("c",), 0), Late()):
        run.take("c", given)
        assert run.sent == {} and [each.name for each in run.state.expected] == ["a", "b"]
    run.take("a", Failed(1))
    assert exchange_again(run, "a", "b") == Go(2, 1, dealt=DEAL)
    for name in "ab":
        run.ready(name)
    assert run.sent["c"] == [Heal(2, "d1", ("a", "b"))]


def test_copy_that_ends_before_the_deal_is_of_no_use_either() -> None:
    """The replica holds the state, but is not a member of the epoch. The model check found that the
    run went on with it, and the old deal, where all others had left."""
    run = HubDecisions("a", "b", rounds=1)
    run.take("b", Lost())
    run.arrive("a", steps=3)
    assert isinstance(run.sent["a"][0], FormEpoch)
    run.join("c", 2)
    run.arrive("c", steps=0)
    run.take("a", Formed(2))
    assert run.records == ["deal"]
    for is_restarted in (False, True):
        if is_restarted:
            run.restart()
        assert [each.name for each in run.state.expected] == ["a"]
    run.take("a", Lost())
    assert run.state.phase is Phase.OPENING and run.state.dealt == ()


def test_round_with_a_deal_ends_below_the_minimum() -> None:
    """Its replicas train on already, and nobody can join them. Would catch a wait without end."""
    run = dealt()
    run.state = replace(run.state, minimum=2)
    run.take("b", Leave("signal"))
    assert exchange_again(run, "a") == Go(2, 1, dealt=DEAL)
    run.ready("a")
    run.arrive("a", steps=3)
    assert run.state.phase is Phase.GATHER and run.sent == {}


def test_deal_ends_with_its_last_replica() -> None:
    for is_restarted in (False, True):
        run = dealt()
        run.take("c", run.hello("c", 2))
        run.take("a", Lost())
        run.take("b", Lost())
        if is_restarted:
            run.restart()
        assert run.state.phase is Phase.OPENING and run.state.dealt == ()


# ---- how long the hub waits


class Clock:
    """A hub with a deal, whose replicas take steps of 20 s."""

    def __init__(self) -> None:
        self.run, self.liveness, self.now = HubDecisions("a", "b", rounds=1), Liveness(), 0.0
        self.deadlines = Deadlines(self.liveness)
        for number in range(1, 5):
            for name in "ab":
                self.liveness.progressed(name, (number, 0, 0), 20.0 * number)
        self.now, self.is_training = 80.0, True

    def wait(self, seconds: float) -> list[tuple[str, Any]]:
        """The first inputs that follow, or none."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for each in self.run.state.roster:
                self.liveness.heard(each.name, self.now)
                if self.is_training:
                    count = (int(self.now // 20.0), 0, 0)
                    self.liveness.progressed(each.name, count, self.now)
            if found := self.deadlines.tick(self.run.state, self.now):
                return found
        return []


def test_replicas_may_train_during_the_exchange() -> None:
    """Would catch: replicas with slow steps are taken out. One that does not come goes."""
    hub = Clock()
    hub.run.arrive("a", "b", steps=3)
    assert hub.wait(1000.0) == []
    hub.run.take("a", Failed(1))
    assert hub.wait(190.0) == [] and ABANDONING_SECONDS < 190.0
    hub.run.arrive("a", "b", steps=3)
    assert hub.run.state.phase is Phase.FORM
    hub.run.take("a", Formed(2))
    assert hub.wait(190.0) == [] and FORMING_SECONDS < 190.0
    assert hub.wait(20.0) == [("", EpochOverdue(2))]
    hub.run.take("b", Formed(2))
    assert hub.run.sent["b"] == [Go(2, 1, dealt=(("a", 3), ("b", 3)))]
    hub.is_training = False
    assert hub.wait(190.0) == []
    assert hub.wait(30.0) == [("", EpochOverdue(2))], "they wait for a result, and none comes"
    hub.run.take("", EpochOverdue(2))
    hub.run.arrive("a", steps=3)
    assert hub.wait(190.0) == []
    assert hub.wait(20.0)[-1] == ("b", Lost(LeaveReason.EVICTED))


def test_time_for_copies_counts_training_during_the_exchange() -> None:
    hub = Clock()
    hub.wait(1.0)
    hub.run.arrive("a", "b", steps=3)
    hub.wait(100.0)
    for name in "ab":
        hub.run.ready(name)
    hub.run.take("c", hub.run.hello("c", 2))
    hub.wait(50.0)
    hub.run.arrive("a", "b", steps=3)
    ((name, late),) = hub.wait(1000.0)
    assert name == "c" and isinstance(late, Late)
    assert COPY_ROUNDS * 150.0 <= late.seconds < COPY_ROUNDS * 150.0 + 4.0


# ---- a replica's side


def test_steps_are_reported_again() -> None:
    state = ReplicaState.fresh(HubDecisions.hello("a", 1))
    state = receive(state, FormEpoch(1, 1, ("a",), (("a",),), "a")).state
    state = report(state, GroupsFormed(1)).state
    waiting = report(state, RoundDue(("h",), 4))
    assert waiting.messages == (Arrive(0, ("h",), 4),)
    assert report(waiting.state, Connected()).messages[1:] == (Arrive(0, ("h",), 4),)
    copying = receive(waiting.state, Heal(3, "d2", ("b",))).state
    copied = report(copying, StateCopied(3, "d2", ("h",), 0))
    assert copied.messages == (Healed(3, "d2"), Arrive(3, ("h",), 0))


@pytest.mark.parametrize("steps", [-1, 1.5, "1", 2**63])
def test_steps_are_counts(steps: Any) -> None:
    with pytest.raises(MessageError):
        decode(to_json({"kind": "Arrive", "round": 1, "handles": ["h"], "steps": steps}), Arrive)


def test_runs_over_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is killed and comes back, and the hub is killed and started again."""
    monkeypatch.setattr(deadlines, "GONE_SECONDS", 0.3)
    states: dict[int, str] = {}
    said: list[str] = []

    def replica(name: str, incarnation: str = "1") -> PretendingReplica:
        return PretendingReplica(
            address, name, 2, 20, steps=ord(name), states=states, incarnation=incarnation
        ).start()

    def deals() -> list[tuple[int, dict[str, int]]]:
        found = [e.fields for e in read_journal(tmp_path) if e.event == "deal"]
        return [(has["round"], has["steps"]) for has in found]

    with running_hub(tmp_path) as (hub, address):
        hub.say = said.append
        replicas = [replica(name) for name in "ab"]
        wait_until(lambda: len(deals()) >= 3)
        replicas.pop().kill()
        wait_until(lambda: hub.state.member("b") is None)
        replicas.append(replica("b", "2"))
        count = len(deals())
        wait_until(lambda: len(deals()) >= count + 3)
    with running_hub(tmp_path, port=address.port):
        for each in replicas:
            each.join()
    assert [number for number, _ in deals()] == list(range(20)), "one in each round"
    assert {"hub: deal 1: a, b train on"} <= set(said)
    goes = [(o.round, dict(o.dealt)) for r in replicas for o in r.orders if isinstance(o, Go)]
    assert {json.dumps(each) for each in goes} <= {json.dumps(each) for each in deals()}
    last = replicas[0].orders[-1]
    assert isinstance(last, Commit) and last.round == 19
