"""Single inputs of a replica's side of the protocol.

Would catch: a result that is applied although the hub has committed another one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_edit.elastic.messages import (
    Abandon,
    Commit,
    End,
    FormEpoch,
    Go,
    Hello,
    Leave,
    Ready,
    Refused,
)
from megatron_edit.elastic.replica import (
    Connected,
    Exchanged,
    GroupsFormed,
    Quit,
    ReplicaState,
    RoundDue,
    Task,
    exit_of,
    receive,
    report,
)

HELLO = Hello("a", "1", "layout", 1, 1, ("h",), True, 0)
READY = Ready(1, 0, "plan", ("d0", "d1"), 0, ())
COMMIT = Commit(1, 0, "d0-d1")


def ready() -> ReplicaState:
    """Of a replica that waits for the decision on round 0."""
    state = receive(ReplicaState.fresh(HELLO), FormEpoch(1, 1, ("a",), (("h",),), "a")).state
    state = report(state, GroupsFormed(1)).state
    state = report(state, RoundDue(("h",))).state
    state = receive(state, Go(1, 0)).state
    return report(state, Exchanged(READY)).state


def test_commit_of_the_own_result_is_applied_once() -> None:
    applied = receive(ready(), COMMIT)
    assert applied.orders == (COMMIT,)
    assert (applied.state.applied, applied.state.digest) == (1, "d0-d1")
    again = receive(applied.state, COMMIT)
    assert again.orders == () and again.state == applied.state


@pytest.mark.parametrize(
    "commit",
    [replace(COMMIT, digest="d0-d2"), replace(COMMIT, round=1), replace(COMMIT, epoch=2)],
)
def test_commit_of_another_result_is_not_applied(commit: Commit) -> None:
    outcome = receive(ready(), commit)
    (end,) = outcome.orders
    assert isinstance(end, End) and end.exit_code == 4
    assert outcome.state.task is Task.ENDED and outcome.state.applied == 0
    assert receive(outcome.state, COMMIT).orders == ()


def test_commit_after_an_abandoned_exchange_is_not_applied() -> None:
    abandoned = receive(ready(), Abandon(1)).state
    (end,) = receive(abandoned, COMMIT).orders
    assert isinstance(end, End) and end.exit_code == 4


def test_replica_that_has_ended_obeys_no_order() -> None:
    left = report(ready(), Quit("signal"))
    assert left.messages == (Leave("signal"),)
    assert receive(left.state, COMMIT).orders == ()
    assert report(left.state, Connected()).messages[-1] == Leave("signal")


def test_refusal_is_one_line_with_value_rule_and_remedy() -> None:
    refused = Refused("--edit-x 1", "must be 2", "say\n2")
    assert exit_of(refused) == (2, "--edit-x 1: must be 2; say\\n2")
    assert exit_of(End("finished", 0)) == (0, "the run has ended: finished")
