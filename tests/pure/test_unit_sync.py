"""The sync of one unit on one rank: its effect on anchor, momentum and parameters.

Other ranks of the stage, and ranks with copies, are stand-ins that answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.comm.wire import Wire
from megatron_edit.engine import TIED_EMBEDDING, ParamShard, UnitPlan, UnitShard, plan_units
from megatron_edit.engine.plan import Decision, SyncRules
from megatron_edit.engine.rounds.meeting import average_shared_values
from megatron_edit.engine.sync.averages import agree_on_average
from megatron_edit.engine.sync.checks import differing_units, restore_other_units
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.unit_sync import UnitSync
from megatron_edit.method.detector import Verdict
from megatron_edit.method.landing import DIRECT_COPY, LandingRule
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.method.outer import Nesterov
from tests.harness.memory_network import CPU, Network, two_phase_groups

anything: Any = SimpleNamespace
RULE = Nesterov(lr=0.5, momentum=0.8)
DELAYED = replace(DIRECT_COPY, delay=2)


def plan_of(unit: str = "layer.1", tie: str | None = None) -> UnitPlan:
    """A unit of two parameters, all zeros, the second of which may be a tied copy."""
    params = [
        ParamShard("a", unit, torch.zeros(2), True, None, target=torch.zeros(2)),
        ParamShard("b", unit, torch.zeros(1), tie is None, tie),
    ]
    return plan_units(params, [unit], [unit])


def outer_of(plan: UnitPlan, *, offload: bool = False) -> OuterState:
    """The outer state of one replica, with the current parameters as anchor."""
    outer = OuterState.allocate(plan, CPU, offload=offload, num_replicas=1, max_staged=2)
    return outer.at_parameters(plan)


def groups_with(
    gather: Callable[[Tensor], Tensor] = lambda mine: mine.unsqueeze(0), **ties: Any
) -> Any:
    """Groups of one replica whose other ranks answer `gather`."""
    others = anything(all_gather=gather)
    return anything(sync=two_phase_groups(1, Network())[0], stage=others, replica=others, ties=ties)


def decision_of(
    *, weight: float = 1.0, anomalous: bool = False, rollback: bool = False
) -> Decision:
    """A decision about one replica and one unit."""
    verdict = Verdict(torch.tensor([[anomalous]]), torch.zeros(1, 1))
    norms = torch.ones(1, 1, dtype=torch.float64)
    loss = LossVerdict.without_check(torch.full((1,), torch.nan))
    return Decision(norms, verdict, torch.tensor([[weight]]), torch.tensor([rollback]), loss)


def begin(
    plan: UnitPlan, outer: OuterState, groups: Any, decision: Decision, landing: LandingRule
) -> UnitSync:
    """Start the exchange of a unit whose parameters have moved by -1 since the anchor."""
    (shard,) = plan.shards
    shard.scatter(torch.full((3,), -1.0))
    sync: Any = anything(decision=decision, rules=anything(landing=landing))
    unit = UnitSync.prepare(shard, outer.units[shard.name], None, groups, sync)
    unit.advance(groups, Wire.of("fp32"))
    return unit


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_preview_is_the_digest_after_the_step(offload: bool, is_rolled_back: bool) -> None:
    """Computing it changes nothing. Catches a digest of the state before the step."""
    plan, groups, rules = plan_of(), groups_with(), SyncRules(RULE, 1.0, DIRECT_COPY)
    outer = outer_of(plan, offload=offload)
    state, before = outer.units["layer.1"], float(outer.digests(plan.shards)[0])
    decision = decision_of(anomalous=is_rolled_back, rollback=is_rolled_back)
    unit = begin(plan, outer, groups, decision, DIRECT_COPY)
    scratch = [torch.full((5,), 9.0) for _ in range(3)]
    digest = int(unit.preview(groups, rules, scratch))
    assert state.anchor.tolist() == state.momentum.tolist() == [0.0] * 3
    assert float(outer.digests(plan.shards)[0]) == before
    unit.step(groups, rules)
    assert int(outer.digests(plan.shards)[0]) == digest
    assert (digest == int(before)) is is_rolled_back


def test_averages_of_copies_are_taken_from_the_first_rank() -> None:
    """Copies on other tensor-parallel ranks or stages; they count once in the norm."""
    first = anything(size=2, broadcast_nowait=lambda copies: copies.fill_(7.0))
    other = anything(size=2, broadcast_nowait=lambda copies: copies.fill_(9.0))
    plan, groups = plan_of(tie="tied-tp"), groups_with(**{"tied-tp": first, "other": other})
    outer = outer_of(plan)
    unit = begin(plan, outer, groups, decision_of(), DIRECT_COPY)
    result = unit.step(groups, SyncRules(RULE, None, DIRECT_COPY))
    assert outer.units["layer.1"].momentum.tolist() == pytest.approx([1.0, 1.0, 7.0])
    assert float(result.norm) == pytest.approx(2.0**0.5)


@pytest.mark.parametrize(
    ("unit_name", "tie"), [("layer.1", "tied-tp"), ("embedding", TIED_EMBEDDING)]
)
def test_moments_of_copies_are_taken_from_the_first_rank(unit_name: str, tie: str) -> None:
    """Each rank encodes a copy in another block. They are sent in the message of the average."""
    messages: list[Tensor] = []

    def first_rank(message: Tensor) -> None:
        copies = message[:3] if tie == TIED_EMBEDDING else message.view(torch.int32)
        copies.copy_(torch.tensor([7.0, 8.0, 9.0]).view(torch.int32))
        messages.append(message)

    plan = plan_of(unit_name, tie=tie)
    groups = groups_with(**{tie: anything(size=2, broadcast_nowait=first_rank)})
    average, first, second = (torch.ones(3) for _ in range(3))
    agree_on_average(plan.shards[0], average, (first, second), groups)
    found = [each.tolist() for each in (average, first, second)]
    assert found == [[1.0, 1.0, 7.0], [1.0, 1.0, 8.0], [1.0, 1.0, 9.0]] and len(messages) == 1


def test_norm_of_tied_embedding_is_sent_to_the_last_stage() -> None:
    """Catches stages that clip the tied embedding by different factors, so that copies drift."""
    sent = torch.tensor([2.0**-60 + 25.0 / 3.0], dtype=torch.float64)  # all its bits matter

    def first_stage(message: Tensor) -> None:
        message[-2:] = sent.view(torch.int32)
        messages.append(message)

    ties = {TIED_EMBEDDING: anything(size=2, broadcast_nowait=first_stage)}
    for unit_name, square in (("embedding", sent.item()), ("final", 3.0)):
        messages: list[Tensor] = []
        plan, groups = plan_of(unit_name), groups_with(**ties)
        unit = begin(plan, outer_of(plan), groups, decision_of(), DIRECT_COPY)
        result = unit.step(groups, SyncRules(RULE, None, DIRECT_COPY))
        assert float(result.norm) == pytest.approx(square**0.5, rel=1e-15)
        assert len(messages) == (unit_name == "embedding")


def test_tied_embedding_and_its_norm_are_one_message() -> None:
    """Bit for bit, NaN included. Catches two messages in a row, and copies that keep the rounding
    of their own rank."""
    copied, squares = torch.tensor([torch.nan, 7.0]), torch.tensor([9.0], dtype=torch.float64)
    messages: list[Tensor] = []

    def first_stage(message: Tensor) -> None:
        message.copy_(torch.cat([copied.view(torch.int32)[-1:], squares.view(torch.int32)]))
        messages.append(message)

    ties = {TIED_EMBEDDING: anything(size=2, broadcast_nowait=first_stage)}
    plan, groups = plan_of("embedding", tie=TIED_EMBEDDING), groups_with(**ties)
    outer = outer_of(plan)
    unit = begin(plan, outer, groups, decision_of(), DIRECT_COPY)
    result = unit.step(groups, SyncRules(RULE, None, DIRECT_COPY))
    assert outer.units["embedding"].momentum.tolist() == pytest.approx([1.0, 1.0, 7.0])
    assert float(result.norm) == 3.0 and len(messages) == 1


def test_publish_writes_landed_values_to_the_model() -> None:
    """Catches a forward pass with parameters of before the sync."""
    (shard,) = plan_of().shards
    shard.scatter(torch.tensor([1.0, 2.0, 3.0]))
    assert shard.params[0].target is not None and shard.params[0].target.tolist() == [0.0, 0.0]
    shard.publish()
    assert shard.params[0].target.tolist() == [1.0, 2.0]


def test_other_nonfinite_units_are_restored_to_their_anchor() -> None:
    """Their progress counts from the anchor; units that land or are finite are not changed."""
    names = ["embedding", "layer.1", "layer.2", "final"]
    values = [float("nan"), float("inf"), 5.0, float("nan")]
    params = [
        ParamShard(name, name, torch.tensor([value]), True, None)
        for name, value in zip(names, values, strict=True)
    ]
    plan = plan_units(params, names, names)
    outer = outer_of(plan)
    for number, unit in enumerate(outer.units.values()):
        unit.anchor.fill_(float(number))
    zeroed: list[str] = []

    def zero(shard: UnitShard) -> int:
        zeroed.append(shard.name)
        return 0

    host = anything(plan=plan, zero_nonfinite_moments=zero)
    snapshots = {"layer.1": torch.zeros(1), "layer.2": torch.zeros(1)}
    reporter = anything(on_local_message=lambda text: None)
    restore_other_units(host, groups_with(), outer, ["final"], snapshots, reporter)
    assert [param.read().item() for param in params[:3]] == [0.0, 1.0, 5.0]
    assert params[3].read().isnan() and zeroed == ["embedding", "layer.1"]
    assert [snapshots[name].item() for name in ("layer.1", "layer.2")] == [1.0, 0.0]


@pytest.mark.parametrize("where", [None, 1, 2])
def test_drift_of_one_replica_of_three_is_found(where: int | None) -> None:
    """Its unit is named. Catches a check that requires all replicas to differ."""

    def meet(mine: Tensor) -> Tensor:
        table = mine.repeat(3, 1)
        if where is not None:
            table[where, 1] ^= 1
        return table

    plan = plan_units([], ["embedding", "layer.1"], [])
    groups = groups_with()
    groups.meeting = anything(all_gather=meet)
    digests = {0: torch.tensor(5), 1: torch.tensor(-7)}
    names, _ = differing_units(plan, groups, digests)
    assert names == ([] if where is None else ["layer.1"])


def test_shared_buffers_are_averaged_over_accepted_replicas() -> None:
    """Replicas accepted in the buffer's unit count, or all where none is; finite values only."""
    buffers = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    host = anything(shared_buffers=lambda: list(zip((3, 5, 7), buffers, strict=True)))
    rows = [[1.0, 2.0, 10.0, 9.0], [3.0, 4.0, 20.0, 9.0], [50.0, 60.0, float("nan"), 9.0]]
    accepted = torch.tensor([[True, False], [True, False], [False, False]])
    average_shared_values(host, rows, accepted, [3, 5])
    assert [buffer.tolist() for buffer in buffers] == [[2.0, 3.0], [15.0], [0.0]]
