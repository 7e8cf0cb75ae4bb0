"""Single decisions of the hub that the model's runs are too short for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from megatron_edit.elastic.hub_state import (
    RELAPSE_ROUNDS,
    Disconnected,
    EpochOverdue,
    Late,
    LeaveReason,
    Lost,
    OpeningOverdue,
    Phase,
    Standing,
    Stop,
    replay,
)
from megatron_edit.elastic.machine import (
    FENCED_BECAUSE,
    MAX_ATTEMPTS,
    MAX_RETRIES,
)
from megatron_edit.elastic.messages import (
    Abandon,
    End,
    Failed,
    Fenced,
    Formed,
    FormEpoch,
    Go,
    Heal,
    Healed,
    Leave,
    Ready,
    Refused,
    Welcome,
)
from megatron_edit.elastic.refusals import ENDED_RUN_OF_OTHERS
from tests.harness.hub import HubDecisions


def test_arrival_of_a_joiner_survives_an_abandoned_exchange() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    run.join("c", 2)
    run.arrive("c")
    run.take("a", Failed(1))
    assert run.sent == {"a": [Abandon(1)], "b": [Abandon(1)]}
    run.arrive("a", "b")
    assert all(isinstance(run.sent[name][0], FormEpoch) for name in "abc")


def test_plan_of_a_round_does_not_change_by_a_stop() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    assert run.sent["a"] == [Go(1, 1, is_last=False)]
    run.take("b", Disconnected())
    run.take("", Stop())
    back = run.hello("b", 2, is_fresh=False, applied=1, digest="d0", epoch=1)
    run.take("b", back)
    assert run.sent["b"][-1] == Go(1, 1, is_last=False)


def test_failure_that_a_restarted_hub_hears_of_is_answered() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.state = replace(run.state, phase=Phase.GATHER, is_epoch_used_up=True)
    run.take("a", Failed(1))
    assert run.sent == {"a": [Abandon(1)]}
    first = HubDecisions("a", "b")
    first.restart()
    for name in "ab":
        first.take(name, first.hello(name, 2, is_fresh=False, epoch=1))
    first.take("b", Failed(1))
    assert first.sent == {"b": [Abandon(1)]}


def test_new_incarnation_is_not_fenced_for_the_old_one() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.take("b", Disconnected())
    run.take("b", run.hello("b", 2, "2"))
    assert [type(message) for message in run.sent["b"]] == [Welcome, Heal]
    assert run.records == ["leave", "join"]
    first = HubDecisions("a", "b")
    first.take("b", Disconnected())
    first.take("b", first.hello("b", 2, "2"))
    assert first.records == ["leave", "join"]
    assert first.sent == {"b": [Welcome(1, 0, is_joiner=True)]}, "there is no state to copy yet"


def test_joiner_outside_of_the_epoch_is_not_told_to_form_it() -> None:
    run = HubDecisions("a", "b", rounds=1)
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
    run = HubDecisions("a", "b", rounds=1)
    run.take("c", run.hello("c", 2, "2"))
    run.arrive("a", "b")
    assert run.sent == {} and run.state.phase is Phase.GATHER
    run.take("c", Late())
    assert run.sent["a"] == [Go(1, 1, is_last=False)]


def test_late_joiner_is_waited_for_again() -> None:
    """In the next round; after the second time in every other one, and so on. Would catch: a
    replica whose copy takes longer than a round never takes part."""
    run = HubDecisions("a", rounds=1)
    run.take("c", run.hello("c", 1, "2"))
    waited = []
    while run.state.round < 20:
        run.arrive("a")
        if run.state.phase is Phase.GATHER:
            waited.append(run.state.round)
            run.take("c", Late())
        assert run.state.phase is Phase.EXCHANGE
        run.ready("a")
        assert run.sent["c"] == [Heal(run.state.round, run.state.digest, ("a",))]
    assert waited == [1, 2, 4, 8, 16]
    run.take("c", Healed(20, run.state.digest))
    run.arrive("a", "c")
    assert run.state.phase is Phase.FORM and run.state.members == ("a", "c")


def test_donors_that_reconnect_are_named_to_those_who_copy() -> None:
    run = HubDecisions("a", rounds=1)
    run.take("a", Disconnected())
    run.take("c", run.hello("c", 1, "2"))
    assert [type(message) for message in run.sent["c"]] == [Welcome]
    run.take("a", run.hello("a", 1, is_fresh=False, applied=1, digest="d0", epoch=1))
    assert run.sent["c"] == [Heal(1, "d0", ("a",))]


def test_late_replica_learns_how_the_run_has_ended() -> None:
    run = disagreed()
    (end,) = run.sent["a"]
    assert isinstance(end, End) and end.exit_code == 3
    run.take("b", run.hello("b", 2, is_fresh=False, applied=1, digest="d0", epoch=1))
    assert run.sent["b"] == [end]


def test_replica_that_waits_for_others_is_fenced_when_it_is_lost() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a")
    run.take("a", Lost(LeaveReason.EVICTED))
    assert run.sent["a"] == [Fenced(FENCED_BECAUSE[LeaveReason.EVICTED])]


def test_leader_is_the_member_that_joined_first() -> None:
    run = HubDecisions("b", "a", rounds=1)
    assert run.state.leader == "b"
    run.take("b", Lost())
    run.arrive("a")
    assert run.sent["a"] == [FormEpoch(1, 2, ("a",), (("a",),), leader="a")]
    run.take("a", Formed(2))
    run.ready("a")
    run.join("b", 2)
    run.arrive("a", "b")
    assert run.sent["b"] == [FormEpoch(1, 3, ("a", "b"), (("a",), ("b",)), leader="a")]


def test_only_the_leader_may_change_checkpoints() -> None:
    """Would catch: a leader that was taken out, and publishes a save when it goes on."""
    run = HubDecisions("a", "b", rounds=1)
    assert run.state.standing("a", "1") is Standing.LEADER
    assert run.state.standing("b", "1") is Standing.MEMBER
    assert run.state.standing("a", "2") is run.state.standing("c", "1") is Standing.NONE
    run.take("a", Lost(LeaveReason.EVICTED))
    for _ in range(2):
        assert run.state.standing("a", "1") is Standing.NONE
        assert run.state.standing("b", "1") is Standing.LEADER
        run.restart()
    run.take("b", run.hello("b", 2, is_fresh=False, applied=1, digest="d0", epoch=1))
    run.take("a", run.hello("a", 2, "2"))
    assert run.state.standing("a", "2") is Standing.MEMBER
    assert run.state.standing("a", "1") is Standing.NONE
    run.take("b", Lost())
    assert run.state.standing("b", "1") is Standing.NONE


def disagreed() -> HubDecisions:
    """A run of two that has ended, as their results differ."""
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    run.ready("a", digest="x")
    run.ready("b", digest="y")
    return run


def test_leader_may_save_after_the_end_of_the_run() -> None:
    run = disagreed()
    assert run.records == ["end"] and run.state.standing("a", "1") is Standing.LEADER


def test_stop_is_not_forgotten_by_a_restarted_hub() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.take("", Stop())
    assert run.records == ["stop"]
    run.take("", Stop())
    assert run.records == []
    run.restart()
    assert run.state.is_stopping
    for name in "ab":
        run.take(name, run.hello(name, 2, is_fresh=False, applied=1, digest="d0", epoch=1))
    run.arrive("a", "b")
    run.take("a", Formed(2))
    run.take("b", Formed(2))
    assert run.sent["a"] == [Go(2, 1, is_last=True)]


def test_signal_ends_one_replica() -> None:
    """Also before the first commit."""
    for rounds in (0, 1):
        run = HubDecisions("a", "b", rounds=rounds)
        run.take("b", Leave("signal"))
        assert run.records == ["leave"] and run.sent == {}
        assert run.state.standing("a", "1") is Standing.LEADER
        commit(run)
        assert run.state.round == rounds + 1 and run.state.members == ("a",)
    other = HubDecisions("a", "b", rounds=1)
    other.take("b", Leave("something else"))
    assert other.journal[-1].fields["reason"] == LeaveReason.LOST


def fail(run: HubDecisions, *reports: tuple[str, tuple[str, ...]]) -> None:
    """An exchange begins, and these replicas report that it has failed, with whom."""
    run.arrive(*run.state.members)
    if run.state.phase is Phase.FORM:
        for name in run.state.members:
            run.take(name, Formed(run.state.epoch))
    assert run.state.phase is Phase.EXCHANGE
    for name, lost in reports:
        run.take(name, Failed(run.state.epoch, lost))


def test_exchange_that_fails_without_names_costs_who_reports_most() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    for name in "aab":
        assert set(run.state.members) == {"a", "b", "c"}
        fail(run, (name, ()), ("c", ()))
    assert run.journal[-1].fields == {"name": "a", "reason": "evicted"}
    assert [member.name for member in run.state.roster] == ["b", "c"]


def test_newest_of_several_goes() -> None:
    run = HubDecisions("c", "b", "a", rounds=1)
    for name in "abc":
        fail(run, (name, ()))
    assert [member.name for member in run.state.roster] == ["b", "c"]
    named = HubDecisions("c", "b", "a", rounds=1)
    for _ in range(MAX_RETRIES + 1):
        fail(named, ("a", ("b", "a", "gone")), ("c", ("b",)))
    assert [member.name for member in named.state.roster] == ["a", "c"]


def test_failures_come_to_an_end() -> None:
    """Also where no replica says anything, and the last one goes."""
    run = HubDecisions("a", "b", rounds=1)
    for _ in range(2 * (MAX_RETRIES + 1)):
        fail(run)
        run.take("", EpochOverdue(run.state.epoch))
    assert run.state.phase is Phase.OPENING and run.state.roster == ()


def test_results_that_differ_again_and_again_end_the_run() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    for number in range(100):
        fail(run)
        for name in "abc":
            digest = "x" if name == "ab"[number % 2] else "y"
            run.take(name, Ready(run.state.epoch, 1, "plan", (digest,), 0, ()))
        if run.state.phase is Phase.ENDED:
            break
    assert run.state.end == ("the replicas' results differ in unit number 0", 3)


CORRUPT = "the average is not that of the replicas' updates in unit layer.1"


def again(run: HubDecisions, *names: str) -> None:
    """The members arrive after an abandoned exchange, and form the groups of the next epoch."""
    run.arrive(*names)
    for name in names:
        run.take(name, Formed(run.state.epoch))


def test_round_with_a_corrupt_average_is_exchanged_again() -> None:
    """Nobody is to blame, and all hear why; one member that has found it suffices."""
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    run.ready("a")
    run.ready("b", corrupt=("layer.1",))
    assert run.sent == {name: [Abandon(1, CORRUPT)] for name in "ab"} and run.records == []
    again(run, "a", "b")
    run.ready("a")
    run.ready("b")
    assert run.state.round == 2 and run.state.disagreements == 0


def test_averages_that_are_corrupt_again_and_again_end_the_run() -> None:
    run = HubDecisions("a", rounds=1)
    run.arrive("a")
    for _ in range(MAX_ATTEMPTS - 1):
        run.ready("a", corrupt=("layer.1",))
        assert run.state.phase is Phase.GATHER
        again(run, "a")
    run.ready("a", corrupt=("layer.1",))
    assert run.state.end == (CORRUPT, 3)


def test_only_who_differs_twice_in_a_row_goes() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    run.arrive("a", "b", "c")
    for attempt in ("differs", "corrupt", "differs", "differs"):
        for name in "abc":
            is_off = name == "b" and attempt == "differs"
            run.ready(
                name, digest="x" if is_off else "", corrupt=["layer.1"][: attempt == "corrupt"]
            )
        if run.state.member("b") is not None:
            again(run, "a", "b", "c")
    reason = "the replicas' results differ in unit layer.1"
    alone = "its results differ from the others' in unit layer.1"
    assert run.sent["b"] == [Abandon(4, reason), End(alone, 3)]
    assert run.journal[-1].fields == {"name": "b", "reason": "drifted", "units": ["layer.1"]}


def come_back(run: HubDecisions, name: str, nominal: int) -> list[Any]:
    """A replica that was taken out is started again; what it is told."""
    run.take(name, run.hello(name, nominal, f"start {run.state.joins}"))
    return run.sent[name]


def take_out(run: HubDecisions, name: str) -> None:
    run.take(name, Lost(LeaveReason.EVICTED))
    run.take(name, Disconnected())


def rejoin(run: HubDecisions, name: str) -> None:
    run.take(name, Healed(run.state.round, run.state.digest))
    run.arrive(name)


def commit(run: HubDecisions) -> None:
    """All that the hub waits for exchange the next round."""
    names = [each.name for each in run.state.expected]
    run.arrive(*names)
    if run.state.phase is Phase.FORM:
        for name in names:
            run.take(name, Formed(run.state.epoch))
    for name in names:
        run.ready(name)


def test_who_is_taken_out_repeatedly_waits_longer_each_time() -> None:
    """Also where the hub is started again; and the others do not wait for it."""
    run = HubDecisions("a", "b", "c", rounds=1)
    for wait in (0, 1, 2, 4):
        take_out(run, "c")
        told: list[Any] = come_back(run, "c", 3)
        assert isinstance(told[0], Welcome) and len(told) == (2 if wait == 0 else 1)
        said = run.journal[-1].fields.get("admitted_from")
        assert said == (run.state.round + wait if wait else None)
        assert told[0].admitted_from == (said or 0)
        for number in range(wait):
            assert run.state.copying == ()
            commit(run)
            is_admitted = any(isinstance(order, Heal) for order in run.sent.get("c", []))
            assert is_admitted == (number == wait - 1)
        rejoin(run, "c")
        commit(run)
        assert run.state.members == ("a", "b", "c")
    take_out(run, "c")
    come_back(run, "c", 3)
    before = run.state.admitted_from("c")
    assert run.state.member("c") is not None
    run.restart()
    assert run.state.member("c") is not None
    assert run.state.admitted_from("c") == before == run.state.round + 8


def test_who_was_taken_out_long_ago_does_not_wait() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    for _ in range(2):
        take_out(run, "c")
        assert isinstance(come_back(run, "c", 3)[-1], Heal)
        rejoin(run, "c")
        for _ in range(RELAPSE_ROUNDS):
            commit(run)


def test_lost_replica_does_not_wait() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    for _ in range(3):
        run.take("c", Lost())
        assert isinstance(come_back(run, "c", 3)[-1], Heal)
        rejoin(run, "c")
        commit(run)


@pytest.mark.parametrize("how", ["lost", "replaced", "last but one"])
def test_who_is_needed_does_not_wait(how: str) -> None:
    """Would catch: a run below its minimum that waits for a commit that needs the waiting one; a
    state that is lost with its only holder, while another one waits."""
    minimum = 1 if how == "last but one" else 2
    run = HubDecisions("a", "b", "c", rounds=1)
    run.state = replace(run.state, minimum=minimum)
    for _ in range(2):
        take_out(run, "c")
        run.take(
            "c", structs.replace(run.hello("c", 3, f"start {run.state.joins}"), minimum=minimum)
        )
        if run.state.removals[0].count < 2:
            rejoin(run, "c")
            commit(run)
    assert len(run.sent["c"]) == 1, "it waits"
    if how == "replaced":
        run.take("b", Disconnected())
        run.take("b", structs.replace(run.hello("b", 3, "new"), minimum=2))
    else:
        run.take("b", Lost())
    assert isinstance(run.sent["c"][-1], Heal)
    if how == "replaced":
        return
    assert [member.name for member in run.state.copying] == ["c"]


def test_joiner_that_is_lost_again_and_again_is_counted() -> None:
    """Also by a hub that is started again, until the replica has taken part. Would catch one that
    fails in its copy at each start, of which nobody is warned."""

    def counts(run: HubDecisions) -> list[int]:
        return [e.fields.get("failed_joins", 0) for e in run.journal if e.event == "leave"]

    run = HubDecisions("a", "b", rounds=2)
    for incarnation in "1234":
        run.take("c", run.hello("c", 2, incarnation))
        run.take("c", Disconnected())
        run.restart()
        for name in "ab":
            digest = run.state.digest
            run.take(name, run.hello(name, 2, is_fresh=False, applied=2, digest=digest))
    assert counts(run) == [1, 2, 3, 4] and run.state.failed_joins == (("c", 4),)
    run.join("c", 2)
    run.take("c", Lost())
    run.take("c", run.hello("c", 2, "5"))
    run.take("c", Leave("signal"))
    assert counts(run)[4:] == [0, 0] and not run.state.failed_joins
    run.take("c", run.hello("c", 2, "6"))
    run.take("c", Lost())
    assert counts(run)[-1] == 1


def test_joiner_that_all_others_leave_is_not_forgotten() -> None:
    """It holds the state, and goes on alone. Would catch: a hub that is started again knows of no
    replica, and the run cannot go on."""
    run = HubDecisions("a", rounds=1)
    run.join("b", 1)
    assert run.records == ["copied"]
    run.take("a", Lost())
    for is_restarted in (False, True):
        if is_restarted:
            run.restart()
        assert [each.name for each in run.state.expected] == ["b"]
        assert run.state.phase is Phase.GATHER
    run.take("b", run.hello("b", 1, "2", is_fresh=False, applied=1, digest="d0"))
    run.arrive("b")
    assert run.records == ["epoch"] and run.state.members == ("b",)


def test_who_does_not_form_the_groups_goes() -> None:
    run = HubDecisions("a", "b", "c", rounds=1)
    fail(run, ("a", ()))
    run.arrive("a", "b", "c")
    assert run.state.phase is Phase.FORM
    run.take("", EpochOverdue(1))
    assert run.state.phase is Phase.FORM, "of an earlier epoch"
    run.take("a", Formed(2))
    run.take("", EpochOverdue(2))
    # Of two that cannot reach each other only one.
    assert run.sent["c"] == [Fenced(FENCED_BECAUSE[LeaveReason.EVICTED])]
    assert run.sent["a"] == run.sent["b"] == [Abandon(2)]
    first = HubDecisions()
    for name in "ab":
        first.take(name, first.hello(name, 2))
    first.take("a", Formed(1))
    first.take("", EpochOverdue(1))
    assert first.records == ["leave", "leave"] and first.state.phase is Phase.OPENING
    assert isinstance(first.sent["a"][-1], Fenced), "it can form no other groups: all start again"


def test_exchange_with_results_is_not_abandoned_by_the_clock() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    run.ready("a")
    run.take("", EpochOverdue(1))
    assert run.state.phase is Phase.EXCHANGE and run.sent == {}


def test_run_begins_early_where_some_do_not_come() -> None:
    run = HubDecisions()
    run.take("a", run.hello("a", 3))
    run.take("b", run.hello("b", 3))
    run.restart()
    run.take("", OpeningOverdue())
    assert run.records == [], "nothing begins before they are back"
    run.take("a", run.hello("a", 3))
    run.take("b", run.hello("b", 3))
    run.take("", OpeningOverdue())
    assert run.records == ["epoch"]
    run.take("c", run.hello("c", 3))
    assert run.state.members == ("a", "b")


@pytest.mark.parametrize(
    "given", [Lost(), Lost(LeaveReason.EVICTED), Leave("signal"), Disconnected()]
)
@pytest.mark.parametrize("when", ["trains", "arrived", "forms", "exchanges", "ready"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_loss_before_the_first_commit_costs_one_replica(
    given: Any, when: str, is_restarted: bool
) -> None:
    """The others exchange the round without it; it joins after their commit."""
    run = HubDecisions("a", "b", "c")
    run.state = replace(run.state, minimum=3)  # for which nobody can come before the commit
    points = ("trains", "arrived", "forms", "exchanges", "ready")
    if points.index(when) > 0:
        run.arrive("c")
    if points.index(when) > 1:
        run.arrive("a", "b")
    if when == "forms":
        run.take("a", Failed(1))
        run.arrive("a", "b", "c")
        assert run.state.phase is Phase.FORM
    if when == "ready":
        run.ready("c")
    run.take("c", given)
    if isinstance(given, Disconnected):
        run.take("c", Lost())
    if is_restarted:
        run.state = replay(run.journal, 3)
        for name in "ab":
            again = run.hello(name, 3, is_fresh=False, epoch=run.state.epoch)
            run.take(name, structs.replace(again, minimum=3))
    run.take("c", structs.replace(run.hello("c", 3, "2"), minimum=3))
    assert run.sent["c"] == [Welcome(run.state.term, 0, is_joiner=True)]
    commit(run)
    assert run.journal[-1].fields["members"] == ["a", "b"] and run.state.round == 1
    assert run.sent["c"] == [Heal(1, "d0", ("a", "b"))]


def test_failed_start_of_all_starts_the_run_again() -> None:
    """One is lost while they compare their parameters: this fails on the others, which end. A
    replica that waits for the first commit is not the only one of a run."""
    run = HubDecisions("a", "b", "c")
    run.take("c", Lost())
    run.take("c", run.hello("c", 3, "2"))
    for name in "ab":
        run.take(name, Disconnected())
        run.take(name, Lost())
    assert run.records == ["leave", "leave"] and isinstance(run.sent["c"][0], Fenced)
    for is_restarted in (False, True):
        if is_restarted:
            run.restart()
        assert run.state.phase is Phase.OPENING and run.state.roster == ()
    for name in "abc":
        run.take(name, run.hello(name, 3, "3"))
    assert run.state.members == ("a", "b", "c") and not run.state.num_void
    for name in "abc":
        run.take(name, Formed(run.state.epoch))
    commit(run)
    assert run.state.round == 1


def test_start_of_one_goes_on_where_the_others_fail() -> None:
    """Its comparison was complete before one was lost."""
    run = HubDecisions("a", "b", "c")
    run.take("c", Lost())
    run.arrive("a")
    assert run.state.phase is Phase.GATHER
    run.take("b", Disconnected())
    run.take("b", Lost())
    assert run.sent["a"] == [FormEpoch(1, 2, ("a",), (("a",),), leader="a")]


def test_joiner_of_the_first_round_copies_after_its_commit() -> None:
    run = HubDecisions()
    run.take("a", run.hello("a", 2))
    run.take("", OpeningOverdue())
    run.take("b", run.hello("b", 2))
    assert run.sent["b"] == [Welcome(1, 0, is_joiner=True)]
    run.take("a", Formed(1))
    run.arrive("a")
    run.ready("a")
    assert run.sent["b"] == [Heal(1, "d0", ("a",))]


def test_training_starts_again_from_committed_states_only() -> None:
    run = HubDecisions("a", rounds=2)
    run.take("a", Lost())
    assert run.state.phase is Phase.OPENING
    run.take("a", run.hello("a", 1, "2", applied=1, digest="other"))
    (refused,) = run.sent["a"]
    assert isinstance(refused, Refused) and "no commit" in refused.rule
    run.take("a", run.hello("a", 1, "2", applied=1, digest="d0"))
    assert run.records == ["open", "join", "epoch"] and run.state.lineage == 1
    # The second commit is void now, and a checkpoint of it is still of this run.
    run.take("a", Lost())
    if run.state.phase is not Phase.OPENING:
        run.take("a", Formed(run.state.epoch))
    assert run.state.is_known(2, "d1") and run.state.is_known(0, "")
    assert not run.state.is_known(1, "d1") and not run.state.is_known(0, "d0")
    run.restart()
    assert run.state.is_known(2, "d1") and not run.state.is_known(1, "d1")


def test_training_is_over_when_its_leader_has_saved() -> None:
    """The others end while it saves. Catches the end of a run whose last save has failed."""
    for is_restarted in (False, True):
        lost = HubDecisions("a", "b", rounds=2)
        lost.take("b", Leave("finished"))
        if is_restarted:
            lost.restart()
        lost.take("a", Lost())
        assert lost.records == ["leave"] and lost.state.phase is Phase.OPENING
        lost.take("a", lost.hello("a", 2, "2", applied=1, digest="d0"))
        lost.take("", OpeningOverdue())
        assert lost.state.members == ("a",) and lost.state.num_void == 1
    # Nor does another one finish for the announced leader.
    lost = HubDecisions("a", "b", rounds=2)
    lost.take("a", Lost())
    lost.take("b", Leave("finished"))
    assert lost.state.phase is Phase.OPENING
    saved = HubDecisions("a", "b", rounds=2)
    saved.take("a", Leave("finished"))
    saved.take("b", Lost())
    assert saved.records == ["leave", "end"] and saved.state.end == ("finished", 0)
    saved.journal.pop()  # a hub that is killed between the two lines has ended when started again
    saved.restart()
    assert (saved.state.phase, saved.state.end) == (Phase.ENDED, ("finished", 0))


def test_newest_checkpoint_counts_where_all_are_lost() -> None:
    """Replicas with an older one, or none, copy its state, whoever comes first."""
    for names in ("ab", "ba"):
        run = HubDecisions("a", "b", rounds=2)
        run.take("a", Lost())
        run.take("b", Lost())
        states: dict[str, dict[str, Any]] = {"a": {}, "b": {"applied": 1, "digest": "d0"}}
        for name in names:
            run.take(name, run.hello(name, 2, "2", **states[name]))
        assert run.sent["b" if names == "ab" else "a"][0] == Welcome(1, 1, names == "ba")
        assert run.state.phase is Phase.FORM and run.state.members == ("b",)
        for is_restarted in (False, True):
            if is_restarted:
                run.restart()
            holders = [each.name for each in run.state.expected]
            assert holders == ["b"] and (run.state.round, run.state.num_void) == (1, 1)


def test_joiners_start_again_where_the_checkpoint_is_lost() -> None:
    run = HubDecisions("a", "b", "c", rounds=2)
    for name in "abc":
        run.take(name, Lost())
    run.take("b", run.hello("b", 3, "2", applied=1, digest="d0"))
    run.take("a", run.hello("a", 3, "2"))
    run.take("b", Lost())
    assert isinstance(run.sent["a"][-1], Fenced) and run.state.roster == ()
    run.restart()
    assert run.state.roster == () and run.state.phase is Phase.OPENING


def test_no_commit_is_void_before_all_replicas_are_there() -> None:
    """Without a checkpoint; those that hold one may come later."""
    run = HubDecisions("a", "b", rounds=2)
    run.take("a", Lost())
    run.take("b", Lost())
    run.take("a", run.hello("a", 2, "2"))
    run.take("", OpeningOverdue())
    assert run.state.phase is Phase.OPENING
    run.take("b", run.hello("b", 2, "2"))
    assert run.state.members == ("a", "b") and (run.state.round, run.state.num_void) == (0, 2)
    # Until the first commit those that are there later may not begin alone either.
    for name in "ab":
        run.take(name, Formed(run.state.epoch))
    for name in "ab":
        run.take(name, Lost())
    for is_restarted in (False, True):
        if is_restarted:
            run.restart()
        assert run.state.phase is Phase.OPENING and run.state.needs_all
    run.take("a", run.hello("a", 2, "3", applied=2, digest="d1"))
    assert (run.state.round, run.state.num_void) == (2, 0)


def test_replica_without_a_checkpoint_needs_no_others_where_one_has_it() -> None:
    """Alone it would wait for all; now it copies the state."""
    run = HubDecisions("a", "b", "c", rounds=2)
    for name in "abc":
        run.take(name, Lost())
    run.take("a", run.hello("a", 3, "2"))
    assert run.state.needs_all
    run.take("b", run.hello("b", 3, "2", applied=2, digest="d1"))
    run.take("", OpeningOverdue())
    assert run.state.phase is Phase.FORM and run.state.members == ("b",)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_replica_that_comes_after_the_last_commit_waits_for_the_end(is_stopped: bool) -> None:
    """It neither copies nor syncs by itself."""
    run = HubDecisions("a", "b", rounds=1)
    if is_stopped:
        run.take("", Stop())
    run.take("c", run.hello("c", 2))
    run.take("c", Late())
    run.arrive("a", "b")
    for name in "ab":
        run.take(name, Ready(1, 1, "plan", ("d1",), 8, (), is_over=not is_stopped))
    assert "c" not in run.sent
    for is_restarted in (False, True):
        if is_restarted:
            run.restart()
            for name in "abc":
                back: dict[str, Any] = {"applied": 2, "digest": "d1", "is_fresh": False, "epoch": 1}
                more: dict[str, Any] = {} if name == "c" else back
                run.take(name, run.hello(name, 2, **more))
        assert run.state.is_over and not any(isinstance(m, Heal) for m in run.sent.get("c", ()))
    run.take("b", Leave("finished"))
    run.take("a", Leave("finished"))
    assert run.sent["c"] == [End("finished", 0)]


@pytest.mark.parametrize("is_first", [False, True])
def test_loss_while_a_run_begins_lets_all_start_once_more(is_first: bool) -> None:
    """The run does not end, whether there is a checkpoint or not."""
    for given in (Lost(), Leave("signal"), Failed(1 if is_first else 2)):
        run = HubDecisions() if is_first else HubDecisions("a", "b", rounds=2)
        for name in "ab":
            run.take(name, Lost())
        begin: dict[str, Any] = {} if is_first else {"applied": 1, "digest": "d0"}
        for name in "ab":
            run.take(name, run.hello(name, 2, "2", **begin))
        assert run.records[-1] == "epoch"
        run.take("a", given)
        assert run.state.phase is Phase.OPENING and run.state.roster == ()
        assert isinstance(run.sent["b"][-1], Fenced)
        run.restart()
        assert run.state.phase is Phase.OPENING and run.state.roster == ()


def test_checkpoint_is_checked_also_where_the_last_holder_is_replaced() -> None:
    run = HubDecisions("a", rounds=2)
    run.take("a", Disconnected())
    run.take("a", run.hello("a", 1, "2", applied=1, digest="other"))
    (refused,) = run.sent["a"]
    assert isinstance(refused, Refused) and "no commit" in refused.rule


def test_replica_with_a_newer_known_state_copies_the_current_one() -> None:
    run = HubDecisions("a", "b", rounds=2)
    for name in "ab":
        run.take(name, Lost())
    run.take("a", run.hello("a", 2, "2", applied=1, digest="d0"))
    run.take("", OpeningOverdue())
    run.take("a", Formed(run.state.epoch))
    run.take("b", run.hello("b", 2, "2", applied=2, digest="d1"))
    assert run.sent["b"][0] == Welcome(1, 1, is_joiner=True)
    run.take("c", run.hello("c", 2, "2", applied=2, digest="foreign"))
    assert isinstance(run.sent["c"][0], Refused)


def test_journal_of_another_run_that_has_ended_is_refused() -> None:
    run = HubDecisions("a", "b", rounds=1)
    for name in "ab":
        run.take(name, Leave("finished"))
    run.take("a", run.hello("a", 2, "2"))
    assert run.sent["a"] == [End("finished", 0)]
    run.take("a", structs.replace(run.hello("a", 2, "2"), layout="other"))
    assert run.sent["a"] == [ENDED_RUN_OF_OTHERS]


def test_new_journal_accepts_any_checkpoint() -> None:
    run = HubDecisions()
    run.take("a", run.hello("a", 1, applied=80, digest="d79"))
    assert run.records == ["open", "join", "epoch"] and run.state.round == 80
    run.take("a", Formed(1))
    run.take("a", Lost())
    assert run.state.phase is Phase.OPENING
    assert run.state.is_known(80, "d79") and not run.state.is_known(90, "d89")


def test_end_of_the_journal_names_the_holes() -> None:
    run = HubDecisions("a", "b", rounds=1)
    run.arrive("a", "b")
    for name in "ab":
        run.take(name, Ready(1, 1, "plan", ("d1",), 8, (), is_over=True, holes=((3, 2), (9, 1))))
    run.restart()
    for name in "ab":
        run.take(name, run.hello(name, 2, is_fresh=False, applied=2, digest="d1", epoch=1))
        run.take(name, Leave("finished"))
    end = run.journal[-1]
    assert (end.event, end.fields["holes"]) == ("end", [[3, 2], [9, 1]])


def test_nothing_is_decided_after_the_end() -> None:
    run = disagreed()
    assert run.records == ["end"]
    for given in (Lost(), Leave("signal"), Stop(), EpochOverdue(1), Disconnected()):
        run.take("a", given)
        assert run.records == [] and run.sent == {}
    assert [each.is_connected for each in run.state.roster] == [False, True]
