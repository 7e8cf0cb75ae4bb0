"""The GPU check's calls of `Group` in a group of one rank (benchmarks/gpu_parts/group_calls.py).

There is no GPU here: NCCL is a fake that moves the data of one rank, gloo is real.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_parts import group_calls
from gpu_parts.group_calls import CHECKS, Uncut, call_all, groups_of
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.transport import Transport, stand_alone_group
from tests.pure.test_nccl_groups import FakeNccl, FakeWork

CPU = torch.device("cpu")
ELSEWHERE = {"make_streams"}  # a field whose default is a function


class OneRankNccl(FakeNccl):
    """A `ProcessGroupNCCL` of one rank: what it sends arrives at itself."""

    def _allgather_base(self, rows: Tensor, local: Tensor, _: Any) -> FakeWork:
        rows.copy_(local)
        self.calls.append("_allgather_base")
        return FakeWork()

    def alltoall_base(self, output: Tensor, rows: Tensor, *_: Any) -> FakeWork:
        output.copy_(rows)
        self.calls.append("alltoall_base")
        return FakeWork()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], _: Any) -> FakeWork:
        self.calls.append("allreduce_coalesced")
        return FakeWork()


class SilentNccl(OneRankNccl):
    """One whose all-to-all delivers nothing, and whose broadcast fails."""

    def alltoall_base(self, *_: Any) -> FakeWork:
        return FakeWork()

    def broadcast(self, *_: Any) -> FakeWork:
        raise RuntimeError("NCCL error: unhandled system error")


def one_rank(monkeypatch: pytest.MonkeyPatch, fake: type[FakeNccl]) -> Group:
    """A group of one rank over a fake NCCL, made the way the package makes it."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    limit = timedelta(seconds=60)
    transport = Transport("nccl", CPU, members=(0,))
    return stand_alone_group(dist.HashStore(), 0, Uncut(1), transport, limit, "one rank")


def recorded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Record the public methods of `Group` that are called from outside of it."""
    called: set[str] = set()

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        return call

    for name in public_methods():
        monkeypatch.setattr(Group, name, recording(name, getattr(Group, name)))
    return called


def public_methods() -> set[str]:
    """The public methods of `Group`, properties left out."""
    members = vars(Group).items()
    return {name for name, it in members if inspect.isfunction(it) and not name.startswith("_")}


def test_every_public_method_of_group_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when `Group` gains a method that the check on a GPU would not try."""
    methods, called = public_methods(), recorded(monkeypatch)
    assert {"start_all_to_all", "warm_up", "close"} <= methods
    for group in (one_rank(monkeypatch, OneRankNccl), *groups_of(CPU)):
        assert call_all(group).complaints == []
    assert methods - called - ELSEWHERE == set()


def test_calls_reach_nccl_although_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that passes because a group of one rank sends nothing; with the options of a
    real group, and the time-out that was changed."""
    group = one_rank(monkeypatch, OneRankNccl)
    nccl = group.process_group
    found = call_all(group)
    collectives = {"allreduce", "allreduce_coalesced", "broadcast", "_allgather_base"}
    assert collectives | {"alltoall_base", "shutdown"} <= set(map(str, nccl.calls))
    assert timedelta(seconds=120) in nccl.calls
    assert nccl.options.group_name == "one rank" and nccl.options.config.max_ctas >= 1
    assert len(found.microseconds) == len(CHECKS) - len(group_calls.ON_THE_CPU)


def test_wrong_results_and_errors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one line, and the calls after it are still tried."""
    complaints = call_all(one_rank(monkeypatch, SilentNccl)).complaints
    assert "one rank, start_all_to_all, all_to_all: a wrong result" in complaints
    assert any("broadcast: ReplicaLostError: one rank: a coll" in line for line in complaints)
    assert any("exchange of int8: a wrong result" in line for line in complaints)
    assert not any("exchange of fp32" in line for line in complaints)


def test_call_that_sends_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a shortcut for one rank that no longer compares the size with 1."""
    group = one_rank(monkeypatch, OneRankNccl)
    group.size = 1
    complaints = call_all(group).complaints
    assert "one rank, all_reduce: nothing was sent" in complaints


def test_size_of_one_rank_is_not_cut_short() -> None:
    """It counts as 1 everywhere but in a comparison with 1."""
    size = Uncut(1)
    assert size != 1 and size + 0 == 1 and list(range(size)) == [0]
    assert torch.empty((size, 2)).shape == (1, 2)
