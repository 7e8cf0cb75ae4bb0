"""Schedules, digests, control records, unit plans, the patcher, and the data-parallel view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.control import ControlRecord, check_same_meeting, record_bytes
from megatron_edit.comm.wire import Wire, sent_bytes
from megatron_edit.engine.sync import reports as reports_module
from megatron_edit.engine.sync.reports import Footprint, SyncReports
from megatron_edit.engine.units import ParamShard, forward_order, plan_units
from megatron_edit.errors import HostVersionError, SyncProtocolError
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.method.codec import Codec
from megatron_edit.method.digest import as_hex, combine, combine_columns, tensor_digest
from megatron_edit.method.moments import NO_MOMENTS
from megatron_edit.method.schedule import LONGEST, QuadraticSchedule, RoundStart, StepSchedule
from tests.harness.engine_settings import settings_of


@given(st.integers(0, 20), st.integers(1, 9))
def test_switch_and_syncs_come_at_the_scheduled_steps(warmup: int, interval: int) -> None:
    """H1, H2, H15: warm-up is W steps, the switch comes once, the first sync at W + tau."""
    schedule = StepSchedule(warmup, interval, 1)
    assert [s for s in range(60) if schedule.is_switch(s)] == [warmup]
    syncs = [s for s in range(1, 60) if schedule.fragments_after(s, 0, 0)]
    assert syncs == list(range(warmup + interval, 60, interval))
    assert [s for s in range(1, 60) if schedule.is_warmup(s)] == list(range(1, warmup + 1))


@given(st.integers(0, 20), st.integers(1, 40), st.data())
def test_every_fragment_syncs_once_per_interval(
    warmup: int, interval: int, data: st.DataObject
) -> None:
    """Staggered: fragment f after W + floor(f tau / F), never two at a step, none in warm-up."""
    fragments = data.draw(st.integers(1, interval))
    schedule = StepSchedule(warmup, interval, fragments)
    seen: dict[int, list[int]] = {fragment: [] for fragment in range(fragments)}
    for step in range(1, warmup + 4 * interval + 1):
        due = schedule.fragments_after(step, 0, 0)
        assert len(due) <= 1
        for fragment in due:
            seen[fragment].append(step - warmup)
    for fragment, steps in seen.items():
        first = fragment * interval // fragments
        assert steps[:1] == [first or interval]
        assert all(b - a == interval for a, b in pairwise(steps)) and len(steps) >= 3


def test_qsr_rounds_grow_as_the_learning_rate_falls() -> None:
    """QSR: max(tau, (a / lr)^2); at lr 0 the round lasts to the end, and nothing overflows."""
    schedule = QuadraticSchedule(4, 10, 1, growth=0.02)
    assert [schedule.round_length(RoundStart(4, lr)) for lr in (1e-2, 4e-3, 1e-3)] == [10, 25, 400]
    assert {schedule.round_length(RoundStart(4, lr)) for lr in (0.0, 1e-300)} == {LONGEST}
    assert schedule.fragments_after(39, 14, 25) == [0]
    assert not schedule.fragments_after(38, 14, 25) and not schedule.fragments_after(4, 0, 4)


@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 31))
def test_digest_changes_with_any_single_bit(size: int, where: int, bit: int) -> None:
    """Catches a digest that skips elements or only sums values."""
    values = torch.arange(size, dtype=torch.float32) / 7
    changed = values.clone()
    bits = changed.view(torch.int32)
    bits[where % size] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert tensor_digest([values]) != tensor_digest([changed])


def test_digest_depends_on_order_and_not_on_tensor_split() -> None:
    """Equal bits in equal order give one digest, however they are split into tensors."""
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    assert tensor_digest([values]) == tensor_digest([values[:7], values[7:]])
    assert tensor_digest([values]) != tensor_digest([values.flip(0)])
    assert combine([1, 2]) != combine([2, 1])
    assert len(as_hex(-1)) == 16
    assert tensor_digest([torch.zeros(3)]) != tensor_digest([torch.tensor([0.0, -0.0, 0.0])])


def test_payload_of_many_ranks_counts_each_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches seconds of Python on every rank of a replica with thousands of them at each sync."""
    calls: list[int] = []
    numels = torch.tensor([[1000 + (rank % 3 == 0), 7] for rank in range(4096)])
    wire = Wire.of("int8")
    expected = sum(wire.payload_bytes(numel, 4) for numel in numels.flatten().tolist())

    def noting(codec: Codec | None, numel: int, size: int, of: Sequence[int]) -> int:
        calls.append(numel)
        return sent_bytes(codec, numel, size, of)

    monkeypatch.setattr(reports_module, "sent_bytes", noting)
    anything: Any = SimpleNamespace
    reports = SyncReports(
        anything(sync=anything(size=4, places=None)), anything(), wire, Footprint(numels, 100, 0)
    )
    plan = anything(
        selection=anything(indices=[0, 1]), moments=NO_MOMENTS,
        decision=anything(rollback=torch.tensor([False, False])),
    )  # fmt: skip
    assert reports.wire_bytes(plan) == 300 + expected
    assert len(calls) == 3


def test_digests_of_columns_equal_those_of_lists() -> None:
    """Catches an overflow or a signed shift in the combination of digests of many ranks."""
    mask, mix = (1 << 64) - 1, 0x9E3779B97F4A7C15
    rows = torch.randint(-(2**63), 2**63 - 1, (50, 3), generator=torch.Generator().manual_seed(3))

    def expected(values: list[int]) -> int:
        total = 0
        for value in values:
            total = (total * mix + value + 1) & mask
            total ^= total >> 29
        return total - (1 << 64) * (total >> 63)

    assert combine_columns(rows) == [expected(column) for column in rows.t().tolist()]
    assert combine([]) == 0 and combine([-5]) == expected([-5])


def test_control_record_round_trip() -> None:
    """Integers and losses are unpacked exactly, NaN included."""
    losses, norms, buffers = (1.5, float("nan")), (0.25, float("inf")), (0.1,)
    record = ControlRecord(3, 2**40, 128, 10**12, 7, losses, norms, buffers)
    again = ControlRecord.unpack(record.pack(5), 5, 2)
    assert record.pack(5).nbytes == record_bytes(5, 2, 1)
    late = replace(record, inner_lr=1e-3, next_lr=0.1, digests=[2.0**52 - 1, 0.0])
    again_late = ControlRecord.unpack(late.pack(5), 5, 2, has_digests=True)
    assert late.pack(5).nbytes == record_bytes(5, 2, 1, has_digests=True)
    assert (again_late.inner_lr, again_late.next_lr) == (1e-3, 0.1)
    assert again_late.digests == late.digests and again_late.buffers == [0.1]
    expected = replace(
        record, losses=list(losses), norms=list(norms), buffers=list(buffers), digests=[],
        measured=[],
    )  # fmt: skip
    assert str(again) == str(expected)
    chosen = replace(record, digests=[2.0, 3.0], measured=[0.5, 0.1, -1.0])
    again_chosen = ControlRecord.unpack(chosen.pack(5), 5, 2, has_digests=True, num_measured=3)
    assert again_chosen.measured == chosen.measured and again_chosen.buffers == [0.1]
    assert again_chosen.digests == chosen.digests
    with pytest.raises(SyncProtocolError, match="different"):
        check_same_meeting([record, ControlRecord(4, 2**40, 128, 0, 0, (), ())], same_step=False)
    other_step = ControlRecord(3, 2**40 + 1, 129, 0, 0, (), ())
    check_same_meeting([record, other_step], same_step=False)
    with pytest.raises(SyncProtocolError, match="different"):
        check_same_meeting([record, other_step], same_step=True)


def test_unit_plan_orders_units_and_keeps_empty_shards() -> None:
    """Units are sorted by layer number, not as text; empty shards of a stage stay in the plan."""
    names = sorted(
        ["layer.10", "final", "layer.2", "embedding", "mtp.0", "layer.1"], key=forward_order
    )
    assert names == ["embedding", "layer.1", "layer.2", "layer.10", "final", "mtp.0"]
    fragments = [
        ParamShard(f"p{i}", unit, torch.zeros(size), True, None)
        for i, (unit, size) in enumerate([("layer.2", 3), ("final", 1), ("layer.2", 5)])
    ]
    plan = plan_units(fragments, names, ["layer.2", "final", "layer.1"])
    assert [(s.name, s.index, s.numel) for s in plan.shards] == [
        ("layer.1", 1, 0), ("layer.2", 2, 8), ("final", 4, 1)
    ]  # fmt: skip
    assert plan.largest_numel == 8 and plan.numel == 9
    with pytest.raises(SyncProtocolError):
        plan_units([ParamShard("x", "mtp.0", torch.zeros(1), True, None)], names, ["final"])


def test_norm_leaves_out_uncounted_copies() -> None:
    """Parameters replicated by TP and tied copies count once per replica."""
    fragments = [
        ParamShard("a", "final", torch.tensor([3.0]), True, None),
        ParamShard("b", "final", torch.tensor([100.0]), False, "tied-tp"),
    ]
    shard = plan_units(fragments, ["final"], ["final"]).shards[0]
    assert shard.squared_norm(shard.gather(torch.empty(2))).item() == 9.0


def test_all_reduce_payload_of_a_ring() -> None:
    """Each rank sends 2 (N - 1) / N of the tensor."""
    assert [all_reduce_payload(100, n) for n in (1, 2, 4)] == [0, 100, 150]


class _Host:
    def method(self) -> str:
        """Return a constant; a method to wrap."""
        return "original"


def test_patcher_undo_restores_originals() -> None:
    """Replaced, wrapped and added attributes are restored in reverse order."""
    instance, module = _Host(), SimpleNamespace(value=1)
    patcher = Patcher("host 1.0")

    def wrapped(inner: Callable[[], str]) -> Callable[[], str]:
        return lambda: inner() + " wrapped"

    patcher.replace(module, "value", 2)
    patcher.replace(module, "value", 3)
    patcher.wrap(instance, "method", wrapped)
    patcher.add(module, "extra", 4)
    assert instance.method() == "original wrapped" and module.value == 3 and module.extra == 4
    patcher.undo()
    patcher.undo()
    assert vars(module) == {"value": 1} and vars(instance) == {}
    assert instance.method() == "original"


def test_patcher_refuses_missing_symbol() -> None:
    """A host version without the symbol is an error, not a silent no-op."""
    patcher = Patcher("megatron-core 9.9")
    attempt: Callable[[], None]
    for attempt in (
        lambda: patcher.replace(_Host, "gone", None),
        lambda: patcher.wrap(_Host, "gone", lambda inner: inner),
    ):
        with pytest.raises(HostVersionError, match=r"megatron-core 9\.9.*_Host\.gone is missing"):
            attempt()


def test_data_parallel_view_spans_all_replicas() -> None:
    """Ranks are r * D + rank of N * D; groups are those of the replica."""
    from megatron_edit.comm.placement import Placement
    from megatron_edit.host.data import DataParallelView

    mpu: Any = SimpleNamespace(
        get_data_parallel_rank=lambda **kw: 1,
        get_data_parallel_world_size=lambda **kw: 2 if not kw else 4,
        get_data_parallel_group=lambda: "the replica's",
    )
    middle: Any = DataParallelView(mpu, Placement(3, 1, 4, 0, True))
    assert middle.get_data_parallel_rank() == 3
    view: Any = DataParallelView(mpu, Placement(3, 2, 4, 0, True))
    assert view.get_data_parallel_rank() == 5 and view.get_data_parallel_world_size() == 6
    assert view.get_data_parallel_world_size(with_context_parallel=True) == 12
    assert view.get_data_parallel_group() == "the replica's"


@pytest.mark.parametrize("fragments", [1, 2, 4, 5])
def test_every_fragment_is_checked_for_drift(fragments: int) -> None:
    """Round r syncs fragment (r - 1) mod F. Would catch: fragments that are never checked."""
    settings = settings_of(digest_interval=10, sync_interval=8, fragments=fragments)
    seen = [n for n in range(1, 20 * fragments + 1) if settings.checks_drift_after(n)]
    assert len(seen) == 2 * fragments
    assert {(number - 1) % fragments for number in seen[:fragments]} == set(range(fragments))
