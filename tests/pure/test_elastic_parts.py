"""Parts of elastic runs without a hub: state by names, blocks, copies, and errors.

Would catch: statistics of one replica that another takes over, blocks that a lost replica has not
consumed and nobody gets, and a copy that mixes two rounds.
"""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from megatron_edit.comm.collectives import Group
from megatron_edit.config import EditConfig
from megatron_edit.elastic.messages import End, Fenced, Go, Heal, Refused
from megatron_edit.elastic.replica import Order
from megatron_edit.engine import RoundState, round_state, saved_rounds
from megatron_edit.engine.membership import Membership, Transports, _error_of, _unique_number
from megatron_edit.engine.shared_state import SharedState, writer_to
from megatron_edit.engine.sync.outer_state import OuterState, UnitState
from megatron_edit.errors import (
    DriftError,
    FencedError,
    ReplicaLostError,
    SyncProtocolError,
    UsageError,
)
from megatron_edit.method.ledger import BlockAssignment, runs_of, samples_of
from megatron_edit.saved_state import SavedRounds

ANYTHING: Any = None


def state_of(members: str, assignment: BlockAssignment | None = None) -> RoundState:
    """A state whose statistics tell the replicas apart."""
    fresh = RoundState.fresh(len(members), 2, assignment, tuple(members))
    marks = torch.arange(1.0, len(members) + 1, dtype=torch.float64)
    detectors = replace(fresh.detectors, mean=marks[:, None].expand(-1, 2).clone())
    losses = replace(fresh.loss_history, mean=marks.clone())
    steps = marks[:, None].expand(-1, 2).long()
    return replace(fresh, detectors=detectors, loss_history=losses, unit_steps=steps)


def test_statistics_follow_names() -> None:
    state = state_of("acd").for_members(tuple("bcd"))
    assert state.members == ("b", "c", "d") and state.assigned_to == ("a", "c", "d")
    assert state.detectors.mean[:, 0].tolist() == [0, 2, 3]
    assert state.loss_history.mean.tolist() == [0, 2, 3]
    assert state.unit_steps[:, 1].tolist() == [0, 2, 3]
    assert state.for_members(tuple("bcd")) is state


def test_steps_count_for_those_that_blocks_were_assigned_to() -> None:
    state = state_of("acd").for_members(tuple("bcd"))
    steps = {"b": 7, "c": 5, "d": 6}
    assert state.steps_by_assignment(steps) == [0, 5, 6]  # a is lost, b was not there


def test_lost_replicas_blocks_are_assigned_again() -> None:
    assignment = BlockAssignment(3, 100).next_round([0, 4, 4], [4, 4], has_final_round=False)
    assert assignment.num_replicas == 2 and assignment.holes == (0, 3, 6, 9)
    assert [assignment.block(0, 0), assignment.block(1, 0)] == [0, 3]
    assert assignment.num_consumed == 8


def test_counted_rounds_have_no_quotas() -> None:
    last = BlockAssignment(2, 20).next_round([8, 8], has_final_round=False)
    assert last.quotas is None and last.remaining == 4
    assert last.next_round([2, 2], has_final_round=False).is_over


def test_runs_of_blocks() -> None:
    assert runs_of([]) == () and runs_of([3, 4, 5, 9, 11, 12]) == ((3, 3), (9, 1), (11, 2))
    assignment = BlockAssignment(2, 100, 11, (5, 7, 9))
    assert assignment.consumed_in_round(0, 3) == ((5, 1), (9, 1), (12, 1))


@pytest.mark.parametrize("replicas", [1, 3])
def test_interleaved_blocks_are_those_of_megatrons_sampler(replicas: int) -> None:
    """Step s of replica r consumes block s N + r."""
    micro_batches, ranks, size = 2, 2, 3
    expected = iter(range(10_000))
    for step in range(2):
        for index in range(micro_batches):
            for replica in range(replicas):
                for rank in range(ranks):
                    found = samples_of(
                        step * replicas + replica, micro_batch=size, ranks=ranks, rank=rank,
                        micro_batches=micro_batches, index=index, interleaved=replicas,
                    )  # fmt: skip
                    assert list(found) == [next(expected) for _ in range(size)]


def test_checkpoint_has_the_nominal_replicas() -> None:
    assignment = BlockAssignment(3, 20, 10, (), (4, 3, 3))
    fewer = state_of("acd", assignment).with_nominal_members(2)
    assert fewer.members == fewer.assigned_to == ("a", "c")
    assert fewer.assignment == BlockAssignment(2, 20, 10)
    more = state_of("acd", assignment).with_nominal_members(4)
    assert more.members[:3] == ("a", "c", "d") and len(more.detectors.mean) == 4
    assert state_of("acd", assignment).with_nominal_members(3).assignment == assignment


def test_round_state_is_saved_and_copied_exactly() -> None:
    """Bit for bit. Would catch: float32, and counts converted to a float."""
    state = state_of("ab", BlockAssignment(2, 20, 10, (3,), (6, 5)))
    counts = state.detectors.updates + 2**53 + 1
    odd = replace(state.detectors, variance=state.detectors.mean / 3, updates=counts)
    state = replace(state, detectors=odd, count=7, first_loss=0.1).for_members(tuple("bc"))
    sent = msgspec.json.encode(saved_rounds(state))
    again = round_state(msgspec.json.decode(sent, type=SavedRounds), 2)
    for tables in ("detectors", "loss_history"):
        for name, table in vars(getattr(state, tables)).items():
            copied = getattr(getattr(again, tables), name)
            assert copied.dtype == table.dtype and torch.equal(copied, table), name
    assert torch.equal(again.unit_steps, state.unit_steps)
    assert again.unit_steps.dtype == torch.int64
    found = (again.count, again.members, again.assignment, again.first_loss)
    assert found == (7, ("b", "c"), state.assignment, 0.1)


def test_saved_state_of_rounds_has_all_fields() -> None:
    """But those that belong to a replica, or to the moment of the save, or that follow from the
    order of samples."""
    names = {field.name for field in fields(RoundState)}
    names -= {"length", "resumes_at_meeting", "assigned_to", "first_block"}
    other = {"count": "round", "assignment": "ledger"}
    assert {other.get(name, name) for name in names} == {*SavedRounds.__struct_fields__}


@pytest.mark.parametrize("mean", [[[1.0], [1.0, 2.0]], [["x", "x"]] * 2, [[None, 1.0]] * 2, None,
                                  [[1.0, 1.0]]])  # fmt: skip
def test_damaged_tables_are_refused(mean: Any) -> None:
    """Tables that are ragged, not numeric, missing, or of another number of replicas."""
    saved = saved_rounds(state_of("ab"))
    detectors = {k: v for k, v in ({**saved.detectors, "mean": mean}).items() if v}
    with pytest.raises((TypeError, ValueError, msgspec.ValidationError)):
        round_state(structs.replace(saved, detectors=detectors), 2)


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_detectors_of_another_number_of_replicas(num: int) -> None:
    """Remaining replicas keep their statistics, new ones start; the saved state is unchanged."""
    state = state_of("abc").detectors
    other = state.for_replicas(num)
    for name, table in vars(state).items():
        rows = getattr(other, name).tolist()
        assert rows == [*table.tolist()[:num], *[[0, 0]] * (num - 3)]
    other.mean.fill_(9.0)
    assert state.mean[:, 0].tolist() == [1, 2, 3]


def outer_of(value: float) -> OuterState:
    return OuterState({"u": UnitState(torch.full((3,), value), torch.full((3,), -value))})


def published(shared: SharedState, count: int, value: float, **moments: int) -> None:
    state = replace(state_of("a", BlockAssignment(1, 9)), count=count)
    shared.publish(state, "d", outer_of(value), {"start": 0}, moments)


def test_copies_hold_one_round() -> None:
    shared = SharedState()
    assert shared.header() is None and shared.read(0, "anchor u", 0, 4) is None
    published(shared, 1, 2.0)
    header = shared.header()
    assert header is not None and dict(header.sizes) == {"anchor u": 12, "momentum u": 12}
    target = torch.zeros(3)
    for start in (0, 8):
        part = shared.read(1, "anchor u", start, 8)
        assert part is not None
        writer_to({"anchor u": target})("anchor u", start, part)
    assert target.tolist() == [2.0, 2.0, 2.0]
    published(shared, 2, 3.0)
    assert shared.read(1, "anchor u", 0, 4) is None
    shared.withdraw()
    assert shared.read(2, "anchor u", 0, 4) is None


def test_moments_are_copied_when_they_are_there() -> None:
    """A copy waits for the end of a step; moments of an earlier round are never served."""
    shared = SharedState()
    published(shared, 1, 2.0, moments=4)
    assert not shared.wants_moments
    shared.header()
    assert shared.wants_moments
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(shared.read(1, "moments", 0, 4)))
    thread.start()
    shared.add_moments({"moments": torch.ones(1)})
    thread.join(10)
    assert found == [torch.ones(1).numpy().tobytes()] and not shared.wants_moments
    published(shared, 2, 3.0, moments=4)
    shared.header()
    thread = threading.Thread(target=lambda: found.append(shared.read(2, "moments", 0, 4)))
    thread.start()
    shared.withdraw()
    thread.join(10)
    assert found[1:] == [None]


@pytest.mark.parametrize(
    ("order", "kind", "code"),
    [
        (Refused("a", "b", "c"), UsageError, 2),
        (Fenced("silent"), FencedError, 5),
        (End("differ", 3), DriftError, 3),
        (End("no hub", 4), ReplicaLostError, 4),
        (Go(1, 1), SyncProtocolError, 1),
    ],
)
def test_orders_end_a_replica_with_their_exit_code(order: Any, kind: type, code: int) -> None:
    error = _error_of(order)
    assert type(error) is kind and getattr(error, "exit_code", None) == code


def test_finished_run_ends_with_exit_code_0() -> None:
    assert isinstance(_error_of(End("finished", 0)), SystemExit)


def test_numbers_of_groups_are_unique() -> None:
    order: Any = type("Order", (), {})()
    seen = set()
    for order.term in (1, 2):
        for order.epoch in (1, 2):
            seen |= {_unique_number(order, rank) for rank in range(3)}
    assert len(seen) == 12 and max(seen) < 2**60


def test_replica_leaves_once() -> None:
    calls: list[str] = []

    class Listener:
        def report(self, what: Any) -> None:
            calls.append(what.reason)

        def close(self, timeout: float) -> None:
            calls.append("closed")

    transports = Transports(ANYTHING, ANYTHING, ANYTHING, 0)
    agent: Any = Listener()
    membership = Membership("a", agent, ANYTHING, transports, "")
    membership.on_leave = lambda: calls.append("saved")
    membership.leave("signal")
    membership.leave("finished")
    assert calls == ["saved", "signal", "closed"]


def test_replica_that_waits_to_join_says_so_once() -> None:
    class Waiting:
        """Three answers without an order; from the second on the hub's word is there."""

        admitted_from, num_asked = 0, 0

        def next_order(self, timeout: float) -> Order | None:
            self.num_asked += 1
            self.admitted_from = 7 if self.num_asked > 1 else 0
            return Heal(7, "digest", ()) if self.num_asked > 3 else None

    agent: Any = Waiting()
    control = Group(None, 0, 1, torch.device("cpu"), timedelta(seconds=1), "control", is_own=True)
    membership = Membership("a", agent, control, Transports(ANYTHING, ANYTHING, ANYTHING, 0), "")
    said: list[str] = []
    membership.on_message = said.append
    assert membership.join()
    assert said == ["was taken out repeatedly, and waits for round 7 before it joins"]


ELASTIC: dict[str, Any] = {
    "use_edit": True, "hub": "h:1", "replica_name": "a", "nominal_replicas": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hub": "h"}, "HOST:PORT"),
        ({"replica_name": None}, "--edit-replica-name"),
        ({"nominal_replicas": None}, "--edit-nominal-replicas"),
        ({"replica_name": "a b"}, "letters"),
        ({"num_replicas": 2}, "one launch per replica"),
        ({"rendezvous": "h:2", "replica_id": 0, "num_replicas": 2}, "--edit-num-replicas"),
        ({"min_replicas": 3}, "at most"),
        ({"strategy": "co2"}, "not elastic yet"),
        ({"sync_mode": "overlap"}, "not elastic yet"),
        ({"sync_backend": "nccl"}, "not elastic yet"),
        ({"hub": None}, "has no effect without --edit-hub"),
    ],
)
def test_settings_that_are_not_elastic_are_refused(flags: dict[str, Any], words: str) -> None:
    EditConfig(**ELASTIC)
    with pytest.raises(UsageError, match=words):
        EditConfig(**ELASTIC | flags)
