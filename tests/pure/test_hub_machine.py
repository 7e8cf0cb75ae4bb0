"""Single decisions of the hub that the model's runs are too short for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_edit.elastic.hub_state import HubState, LeaveReason, Phase
from megatron_edit.elastic.machine import Disconnected, Late, Lost, Record, Send, Stop, step
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Commit,
    End,
    Failed,
    Fenced,
    Formed,
    FormEpoch,
    Go,
    Heal,
    Healed,
    Hello,
    Ready,
    Welcome,
)


class Run:
    """A hub that takes inputs, and what it has sent since the last one."""

    def __init__(self, *names: str, rounds: int = 0) -> None:
        self.state, self.sent, self.records = HubState(), dict[str, list[Any]](), list[str]()
        for name in names:
            self.take(name, self.hello(name, len(names)))
        for name in names:
            self.take(name, Formed(1))
        for _ in range(rounds):
            self.exchange(*names)

    @staticmethod
    def hello(name: str, nominal: int, incarnation: str = "1", **more: Any) -> Hello:
        given = {"is_fresh": True, "applied": 0} | more
        return Hello(name, incarnation, "layout", nominal, 1, (name,), **given)

    def take(self, name: str, given: Any) -> None:
        self.state, outputs = step(self.state, name, given)
        self.sent, self.records = {}, []
        for output in outputs:
            if isinstance(output, Send):
                self.sent.setdefault(output.name, []).append(output.message)
            elif isinstance(output, Record):
                self.records.append(output.event)

    def arrive(self, *names: str) -> None:
        for name in names:
            self.take(name, Arrive(self.state.round, (name,)))

    def ready(self, name: str) -> None:
        state = self.state
        self.take(name, Ready(state.epoch, state.round, "plan", (f"d{state.round}",), 0, ()))

    def exchange(self, *names: str) -> None:
        self.arrive(*names)
        for name in names:
            self.ready(name)
        assert all(self.sent[name] == [Commit(self.state.round - 1)] for name in names)

    def join(self, name: str, nominal: int) -> None:
        """A replica joins, and holds the state."""
        self.take(name, self.hello(name, nominal, "2"))
        assert isinstance(self.sent[name][-1], Heal)
        self.take(name, Healed(self.state.round, self.state.digest))


def test_arrival_of_a_joiner_survives_an_abandoned_exchange() -> None:
    run = Run("a", "b", rounds=1)
    run.arrive("a", "b")
    run.join("c", 2)
    run.arrive("c")
    run.take("a", Failed(1))
    assert run.sent == {"a": [Abandon(1)], "b": [Abandon(1)]}
    run.arrive("a", "b")
    assert all(isinstance(run.sent[name][0], FormEpoch) for name in "abc")


def test_plan_of_a_round_does_not_change_by_a_stop() -> None:
    run = Run("a", "b", rounds=1)
    run.arrive("a", "b")
    assert run.sent["a"] == [Go(1, 1, is_last=False)]
    run.take("b", Disconnected())
    run.take("", Stop())
    back = run.hello("b", 2, is_fresh=False, applied=1, digest="d0", epoch=1)
    run.take("b", back)
    assert run.sent["b"][-1] == Go(1, 1, is_last=False)


def test_failure_that_a_restarted_hub_hears_of_is_answered() -> None:
    run = Run("a", "b", rounds=1)
    run.state = replace(run.state, phase=Phase.GATHER, is_epoch_used_up=True)
    run.take("a", Failed(1))
    assert run.sent == {"a": [Abandon(1)]}
    warmup = Run("a", "b")
    warmup.take("b", Failed(1))
    assert warmup.sent["a"] == [End("the replicas cannot reach each other", 4)]


def test_new_incarnation_is_not_fenced_for_the_old_one() -> None:
    run = Run("a", "b", rounds=1)
    run.take("b", Disconnected())
    run.take("b", run.hello("b", 2, "2"))
    assert [type(message) for message in run.sent["b"]] == [Welcome, Heal]
    assert run.records == ["leave", "join"]
    warmup = Run("a", "b")
    warmup.take("b", Disconnected())
    warmup.take("b", warmup.hello("b", 2, "2"))
    assert warmup.records == ["end"] and isinstance(warmup.sent["b"][-1], End)


def test_joiner_outside_of_the_epoch_is_not_told_to_form_it() -> None:
    run = Run("a", "b", rounds=1)
    run.take("b", Lost())
    run.arrive("a")
    assert run.state.phase is Phase.FORM and run.state.members == ("a",)
    run.join("c", 2)
    back = run.hello("c", 2, "2", is_fresh=False, applied=1, digest="d0")
    run.take("c", Disconnected())
    assert run.state.member("c") is None or not run.state.member("c").is_formed  # type: ignore[union-attr]
    if run.state.member("c") is not None:
        run.take("c", back)
        assert [type(message) for message in run.sent["c"]] == [Welcome]


def test_late_joiner_is_not_waited_for() -> None:
    run = Run("a", "b", rounds=1)
    run.take("c", run.hello("c", 2, "2"))
    run.arrive("a", "b")
    assert run.sent == {} and run.state.phase is Phase.GATHER
    run.take("c", Late())
    assert run.sent["a"] == [Go(1, 1, is_last=False)]


def test_donors_that_reconnect_are_named_to_those_who_copy() -> None:
    run = Run("a", rounds=1)
    run.take("a", Disconnected())
    run.take("c", run.hello("c", 1, "2"))
    assert [type(message) for message in run.sent["c"]] == [Welcome]
    run.take("a", run.hello("a", 1, is_fresh=False, applied=1, digest="d0", epoch=1))
    assert run.sent["c"] == [Heal(1, "d0", ("a",))]


def test_late_replica_learns_how_the_run_has_ended() -> None:
    run = Run("a", "b")
    run.take("b", Lost(LeaveReason.LOST))
    reason = "b was lost before the first commit"
    assert run.sent["a"] == [End(reason, 4)]
    run.take("b", run.hello("b", 2, is_fresh=False, applied=0, epoch=1))
    assert run.sent["b"] == [End(reason, 4)]


def test_replica_that_waits_for_others_is_fenced_when_it_is_lost() -> None:
    run = Run("a", "b", rounds=1)
    run.arrive("a")
    run.take("a", Lost(LeaveReason.EVICTED))
    assert run.sent["a"] == [Fenced("the hub has taken it for evicted")]
