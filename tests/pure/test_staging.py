"""Gloo for tensors of a device, with streams whose copies complete when a test says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm import transport
from megatron_edit.comm.collectives import Group, Work
from megatron_edit.comm.staging import StagedProcessGroup
from megatron_edit.comm.streams import NoStreams
from megatron_edit.comm.transport import RankDevice, Transport, choose_backend, stand_alone_group
from megatron_edit.errors import ReplicaLostError, UsageError
from tests.harness.memory_network import CPU, MemoryProcessGroup, Network


@dataclass
class SlowStreams(NoStreams):
    """Streams of a device whose work is pending until a test sets `is_free`.

    Attributes:
        log: the calls made.
        is_free: whether all events have completed.
    """

    log: list[str] = field(default_factory=list)
    is_free: bool = False
    _current: str = "compute"
    _count: int = 0

    def current(self) -> str:
        return self._current

    def new(self) -> str:
        return "side"

    def use_device_in_thread(self) -> None:
        pass

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record(self, stream: str) -> str:
        self._count += 1
        return f"{stream} {self._count}"

    def wait(self, stream: str, event: str) -> None:
        self.log.append(f"{stream} waits for {event.split()[0]}")

    def keep(self, tensor: Tensor, stream: str) -> None:
        self.log.append(f"kept for {stream}")

    def synchronize(self, event: str) -> None:
        self.log.append("host waits")
        self.is_free = True

    def is_done(self, event: str) -> bool:
        return self.is_free


def staged(network: Network, rank: int, streams: SlowStreams) -> Group:
    """The staged gloo group of one of two ranks."""
    transport = StagedProcessGroup(
        MemoryProcessGroup(network, "whole", rank, 2), streams, pin=False
    )
    return Group(transport, rank, 2, CPU, timedelta(seconds=1), "sync group")


def pair() -> tuple[Network, list[SlowStreams], list[Group]]:
    """A network of two ranks, with their streams and staged groups."""
    network, streams = Network(), [SlowStreams(), SlowStreams()]
    return network, streams, [staged(network, rank, streams[rank]) for rank in range(2)]


def test_staged_collective_starts_after_the_copy_to_the_host() -> None:
    """The host does not wait for the copy. Catches a send of memory that is not written yet."""
    network, streams, groups = pair()
    values = [torch.full((3,), 1.0 + rank) for rank in range(2)]
    works = [group.start_all_reduce(value) for group, value in zip(groups, values, strict=True)]
    assert not any(work.advance() for work in works) and not network.messages
    for each in streams:
        each.is_free = True
    assert not works[0].advance()  # it is sent now; the other rank has not polled yet
    assert works[1].advance() and works[0].advance()
    assert [value.tolist() for value in values] == [[3.0] * 3] * 2
    assert not any("host waits" in each.log for each in streams)


def test_staged_collectives_start_in_program_order() -> None:
    """Whichever is polled first. Catches ranks that start collectives in different orders."""
    network, streams, groups = pair()
    first = [group.start_all_reduce(torch.ones(1)) for group in groups]
    second = [group.start_all_reduce(torch.full((1,), 5.0)) for group in groups]
    for each in streams:
        each.is_free = True
    second[0].advance()
    assert float(network.messages["whole", "sum", 1, 0]) == 1.0
    assert float(network.messages["whole", "sum", 2, 0]) == 5.0
    for work in (second[1], first[1], first[0], second[0]):
        assert work.advance()


def test_wait_includes_the_copies_of_a_staged_collective() -> None:
    """Catches a wait for a collective that has not been started."""
    network, streams, groups = pair()
    values = [torch.full((1,), 1.0 + rank) for rank in range(2)]
    early = [group.start_broadcast(value) for group, value in zip(groups, values, strict=True)]
    works = [group.start_all_reduce(value) for group, value in zip(groups, values, strict=True)]
    streams[1].is_free = True
    works[1].advance()
    works[0].wait()
    assert streams[0].log.count("host waits") >= 1 and float(values[0]) == 3.0
    assert all(work.advance() for work in early)
    network.is_broken = True
    lost = groups[0].start_all_reduce(torch.ones(1))
    with pytest.raises(ReplicaLostError, match="connection reset"):
        lost.wait()


def test_broadcast_nowait_is_sent_without_further_polls() -> None:
    """Catches ranks of a replica that wait for a message which is still on its device."""
    network, streams, groups = pair()
    groups[0].broadcast_nowait(torch.full((1,), 7.0))
    received = torch.zeros(1)
    streams[1].is_free = True
    groups[1].start_broadcast(received).wait()
    assert float(received) == 7.0 and network.messages


def test_both_directions_of_a_phase_start_together() -> None:
    """Each direction is a group of its own. Catches one that waits for the other to complete."""
    network, streams = Network(), SlowStreams()
    directions = [staged(network, 0, streams), staged(network, 0, streams)]
    directions[1].process_group._gloo.channel = "other"
    works = [group.start_all_reduce(torch.ones(1)).works[0] for group in directions]
    streams.is_free = True
    assert not Work("both", tuple(works)).is_completed
    assert {key[0] for key in network.messages} == {"whole", "other"}


def test_staged_all_gather_returns_all_rows() -> None:
    """Catches a row that stays on the host."""
    _, streams, groups = pair()
    for each in streams:
        each.is_free = True
    started: list[Any] = []
    for group, value in zip(groups, (1.0, 2.0), strict=True):
        parts = [torch.zeros(2), torch.zeros(2)]
        work = group.process_group.allgather([parts], [torch.full((2,), value)], None)
        started.append((work, parts))
    for work, parts in started:
        work.wait()
        assert [part.tolist() for part in parts] == [[1.0] * 2, [2.0] * 2]


# ---- choice of the backend


def rank_devices(
    *gpus: tuple[str, ...], has_nccl: bool = True, may_share: bool = False
) -> list[list[RankDevice]]:
    """Devices of the ranks of each replica, all on one machine, by the GPUs of their ranks."""
    return [[RankDevice("a", gpu, has_nccl, may_share) for gpu in replica] for replica in gpus]


@pytest.mark.parametrize(
    ("wanted", "places", "chosen"),
    [
        ("auto", rank_devices(("0",), ("1",)), "nccl"),
        ("nccl", rank_devices(("0", "1"), ("2", "3")), "nccl"),
        ("gloo", rank_devices(("0",), ("1",)), "gloo"),
        ("auto", rank_devices(("0",), ("0",)), "gloo"),
        ("auto", rank_devices(("",), ("",)), "gloo"),
        ("auto", rank_devices(("0",), ("1",), has_nccl=False), "gloo"),
        ("auto", [[RankDevice("a", "0", True)], [RankDevice("b", "0", True)]], "nccl"),
        ("nccl", rank_devices(("0", "0"), ("0", "0"), may_share=True), "nccl"),
        ("auto", [[RankDevice("a", "0", True)], [RankDevice("a", "0", True, True)]], "gloo"),
    ],
)
def test_auto_backend_is_nccl_where_possible(
    wanted: str, places: list[list[RankDevice]], chosen: str
) -> None:
    """GPUs are compared by machine. Catches two ranks on one GPU, which NCCL refuses unless told
    otherwise on all ranks (NCCL_MULTI_RANK_GPU_ENABLE)."""
    assert choose_backend(wanted, places) == chosen


@pytest.mark.parametrize(
    ("places", "rule"),
    [
        (rank_devices(("0",), ("",)), "needs CUDA, and rank 0 of replica 1 trains on the CPU"),
        (
            rank_devices(("0", "1"), ("2", "1")),
            "rank 1 of replica 0 and rank 1 of replica 1 share one",
        ),
        (
            rank_devices(("0",), has_nccl=False),
            "torch of rank 0 of replica 0 was built without NCCL",
        ),
    ],
)
def test_impossible_nccl_backend_is_refused(places: list[list[RankDevice]], rule: str) -> None:
    """The error is one line with value, rule and remedy."""
    with pytest.raises(UsageError, match=rule) as caught:
        choose_backend("nccl", places)
    assert str(caught.value).startswith("--edit-sync-backend nccl: ")
    assert str(caught.value).endswith("or use auto or gloo")


@pytest.mark.parametrize(("device", "is_staged"), [("cuda", True), ("cpu", False)])
def test_gloo_group_is_staged_on_gpus(
    device: str, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo has no coalesced gather of GPU tensors, and blocks the device. Catches a group that
    passes GPU tensors to it."""
    gloo = SimpleNamespace(name=lambda: "gloo")
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *args: gloo)
    monkeypatch.setattr(transport, "_gloo_options", lambda *args, **kwargs: None)
    with_streams = partial(Group, make_streams=lambda device: SlowStreams())
    monkeypatch.setattr(transport, "Group", with_streams)
    where = Transport("gloo", torch.device(device))
    group = stand_alone_group(dist.HashStore(), 0, 2, where, timedelta(seconds=1), "sync group")
    assert isinstance(group.process_group, StagedProcessGroup) == is_staged
    if is_staged:
        assert group.process_group._pin
