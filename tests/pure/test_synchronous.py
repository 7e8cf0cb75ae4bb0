"""Synchronous parts of a run: the equal start and the warm-up. Each replica is a thread."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.wire import Wire
from megatron_edit.engine import ParamShard, plan_units
from megatron_edit.engine.rounds.synchronous import (
    GradientAverager,
    average_linear_buffers,
    broadcast_first_replica,
    broadcast_if_different,
    sum_counts,
)
from megatron_edit.errors import DriftError
from tests.harness.memory_network import Network, run_in_threads, two_phase_groups

anything: Any = SimpleNamespace


def replicas(count: int, **ties: Any) -> list[Any]:
    """Groups of `count` replicas of one rank each, whose collectives wait for each other."""
    sync, meeting = (two_phase_groups(count, Network(patience=20.0)) for _ in range(2))
    alone = two_phase_groups(1, Network())[0]
    return [
        anything(sync=one, meeting=two, replica=alone, stage=alone, ties=ties)
        for one, two in zip(sync, meeting, strict=True)
    ]


@pytest.mark.parametrize("tokens", [None, (1.0, 3.0)])
def test_warm_up_gradients_are_averaged(tokens: tuple[float, float] | None) -> None:
    """They are averaged over replicas, or over tokens. Catches sums, means that are divided twice,
    and a replica with few tokens that is weighted like one with many."""
    shards = [[torch.tensor([1.0, 2.0]), torch.tensor([4.0])],
              [torch.tensor([3.0, 6.0]), torch.tensor([0.0])]]  # fmt: skip
    given = [None if tokens is None else torch.tensor(number) for number in tokens or (0, 0)]

    def average(replica: int) -> None:
        host = anything(gradient_shards=lambda: shards[replica], linear_buffers=lambda: ())
        GradientAverager(Wire.of("fp32"), host, groups[replica]).average(given[replica])

    groups = replicas(2)
    run_in_threads([lambda r=r: average(r) for r in range(2)])  # type: ignore[misc]
    wanted = [[2.0, 4.0], [2.0]] if tokens is None else [[2.5, 5.0], [1.0]]
    assert [[shard.tolist() for shard in mine] for mine in shards] == [wanted] * 2


@pytest.mark.parametrize(
    ("dtype", "count", "is_tied"),
    [("fp32", 3, True), ("fp32", 2, False), ("bf16", 2, True), ("int8", 2, True)],
)
def test_tied_gradients_are_broadcast_where_they_may_differ(
    dtype: str, count: int, is_tied: bool
) -> None:
    """A sum of three may round differently by position, and an encoded sum by its neighbours:
    copies take that of the first rank."""
    tie = anything(broadcast=lambda tensor: tensor.fill_(7.0))
    groups, copies = replicas(count, tied=tie), [torch.ones(3) for _ in range(count)]
    asked: list[bool] = []

    def tied(replica: int, is_encoded: bool) -> list[tuple[str, torch.Tensor]]:
        asked.append(is_encoded)
        halves = copies[replica].split([1, 2])
        return [("tied", halves[0]), ("not here", torch.ones(1)), ("tied", halves[1])]

    def average(replica: int) -> None:
        host = anything(
            gradient_shards=lambda: [copies[replica]], linear_buffers=lambda: (),
            tied_gradients=lambda *, is_encoded: tied(replica, is_encoded),
            loss_scale=lambda: None,
        )  # fmt: skip
        GradientAverager(Wire.of(dtype), host, groups[replica]).average(None)

    run_in_threads([lambda r=r: average(r) for r in range(count)])  # type: ignore[misc]
    assert [copy.tolist() for copy in copies] == [[7.0 if is_tied else 1.0] * 3] * count
    assert asked == [dtype != "fp32"] * count * is_tied


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def test_counts_are_summed_and_linear_buffers_averaged() -> None:
    """Catches counts that become fractions, integer counts that cannot be divided or lose bits, as
    newer versions of Megatron may have, and a sum in place of a mean."""
    groups = replicas(2)
    counts, linear = ([torch.tensor([2.0, 4.0 + r]) for r in range(2)] for _ in range(2))
    integers = [[torch.tensor([100 + r], dtype=dtype) for dtype in INTEGERS] for r in range(2)]
    many = [torch.tensor([(1 << 29) + r], dtype=torch.int32) for r in range(2)]

    def exchange(replica: int) -> None:
        host = anything(
            shared_counts=lambda: [counts[replica], *integers[replica], many[replica]],
            linear_buffers=lambda: [linear[replica]],
        )
        sum_counts(host, groups[replica])
        average_linear_buffers(host, groups[replica])

    run_in_threads([lambda r=r: exchange(r) for r in range(2)])  # type: ignore[misc]
    assert [count.tolist() for count in counts] == [[4.0, 9.0]] * 2
    assert [[count.item() for count in each] for each in integers] == [[201] * len(INTEGERS)] * 2
    assert [count.item() for count in many] == [(1 << 30) + 1] * 2
    assert [value.tolist() for value in linear] == [[2.0, 4.5]] * 2


def host_of(values: list[float], gathered: list[int]) -> Any:
    """The host of a model of one unit and a buffer that belongs to no optimizer."""
    main = torch.tensor(values)
    target, buffer = torch.zeros_like(main), torch.tensor(values[:1])
    plan = plan_units([ParamShard("a", "a", main, True, None, target=target)], ["a"], ["a"])
    return anything(
        plan=plan, replicated_tensors=lambda: [buffer], buffer=buffer, main=main, target=target,
        gather_parameters=lambda: gathered.append(1),
    )  # fmt: skip


def test_all_start_from_replica_0() -> None:
    """Main and model parameters, and other tensors."""
    gathered: list[int] = []
    hosts = [host_of([float(r), 2.0 * r], gathered) for r in range(3)]
    groups = replicas(3)
    run_in_threads([lambda r=r: broadcast_first_replica(hosts[r], groups[r]) for r in range(3)])  # type: ignore[misc]
    assert len(gathered) == 3
    for host in hosts:
        assert host.main.tolist() == host.target.tolist() == [0.0, 0.0]
        assert host.buffer.item() == 0.0


def end_warm_up(hosts: list[Any], steps: int, update_error: float = 0.0) -> list[str]:
    """Call `broadcast_if_different` on all replicas; returns the messages."""
    groups, messages = replicas(len(hosts)), list[str]()
    reporter = anything(on_message=lambda text: messages.append(text))
    for host in hosts:
        host.update_error = update_error
    run_in_threads(
        [
            lambda r=r: broadcast_if_different(hosts[r], groups[r], reporter, steps)  # type: ignore[misc]
            for r in range(len(hosts))
        ]
    )
    return messages


@pytest.mark.parametrize("last", [2.0, 2.0 + 2.0**-22])
def test_rounding_differences_are_removed_after_warm_up(last: float) -> None:
    """Differences are removed and logged; equal replicas are not changed."""
    gathered: list[int] = []
    hosts = [host_of([1.0, value], gathered) for value in (2.0, 2.0, last)]
    messages = end_warm_up(hosts, 1)
    assert [host.main.tolist() for host in hosts] == [[1.0, 2.0]] * 3
    assert len(messages) == len(gathered) == (3 if last > 2.0 else 0)
    assert all("rounded differently" in text and "2.384e-07" in text for text in messages)


@pytest.mark.parametrize(
    ("values", "steps", "error", "found"),
    [
        ((2.0, 2.0 + 2.0**-21), 1, 0.0, "4.8e-07, and rounding explains at most 2.4e-07"),
        ((2.0, 2.0 + 2.0**-21), 2, 0.0, None),
        ((0.0, 1e-9), 1, 1e-9, None),  # an update rounds, too
        ((0.0, 2e-9), 1, 1e-9, "2.0e-09, and rounding explains at most 1.0e-09"),
        ((2.0, math.nan), 9, 0.0, "inf"),
        ((math.inf, math.inf), 1, 0.0, None),
    ],
)
def test_larger_differences_after_warm_up_are_drift(
    values: tuple[float, float], steps: int, error: float, found: str | None
) -> None:
    """Would catch a warm-up that did not average, and whose end repairs that in silence."""
    hosts = [host_of([1.0, value], []) for value in (values[0], *values)]
    if found is None:
        end_warm_up(hosts, steps, error)
        return
    with pytest.raises(DriftError, match=f"in unit a by {found}"):
        end_warm_up(hosts, steps, error)
    assert [host.main[1].item() for host in hosts[:2]] == [values[0]] * 2
