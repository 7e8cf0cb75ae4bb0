"""Launches on a device: their number for a unit that lands in the forward pass, for any number of
ranks, and of an encoded exchange, for any number of replicas; their order on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend
from megatron_edit.comm.wire import Wire, start_exchange
from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32, WIRE_TYPES
from megatron_edit.method import codec as codecs
from megatron_edit.method.codec import LOG8, ULOG8, Codec
from megatron_edit.method.norms import sum_in_rank_order
from tests.harness.memory_network import MemoryProcessGroup, Network, run_in_threads
from tests.harness.traced_streams import (
    CPU,
    TIMEOUT,
    InOrderGroup,
    Rank,
    TracedStreams,
    plan_of,
)

UNITS = {"embedding": (8, 2), "layer.1": (8,), "layer.2": (8,), "layer.3": (8,)}
EVEN, UNEVEN = 1 << 19, (1 << 19) - 1  # elements; with the latter the last chunk is short
# Of an exchange of one unit, by wire type, whose last chunk is as long as the others.
LAUNCHES = {
    "bf16": 14, "int8": 40, "int4": 54, "int2": 146, "ternary": 204, "sign": 106, "top64": 133,
    "log8": 70, "ulog8": 68,
}  # fmt: skip
ENCODED = [*(Wire.of(name).codec for name in WIRE_TYPES if name != FP32), LOG8, ULOG8]
DECISION_OPERATIONS = ("aten::_local_scalar_dense", "aten::bitwise_or")


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Notes what a rank launches.

    Args:
        lag: number of later events after which the host finds an event done.

    Attributes:
        names: kernels by the name of the operation, and "collective".
        groups: the groups of the collectives.
    """

    def __init__(self, lag: int = 0) -> None:
        super().__init__()
        self.names: list[str] = []
        self.groups: list[str] = []
        self._lag = lag
        self.streams = TracedStreams(self)
        self._is_in_collective = False

    def on_new(self, stream: int) -> None:
        """See `Listener`."""

    def on_record(self, event: int, stream: int | None) -> None:
        """See `Listener`."""

    def on_wait(self, stream: int, event: int) -> None:
        """See `Listener`."""

    def on_keep(self, tensor: torch.Tensor, stream: int) -> None:
        """See `Listener`."""

    def on_synchronize(self, event: int) -> None:
        """See `Listener`."""

    def is_done(self, event: int) -> bool:
        """See `Listener`."""
        return self.streams._num_events - event >= self._lag

    @contextmanager
    def collective(self, group: InOrderGroup, nbytes: int) -> Iterator[None]:
        """See `Listener`: its effect is no kernel."""
        self.names.append("collective")
        self.groups.append(group.name_)
        self._is_in_collective = True
        yield
        self._is_in_collective = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a kernel: all but views, allocations and profiler marks."""
        result = func(*args, **(kwargs or {}))
        is_view = all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        name = func._schema.name
        if not (is_view or self._is_in_collective or name.startswith(("aten::empty", "profiler"))):
            self.names.append(name)
        return result


def launches(num_ranks: int) -> int:
    """Count kernels and collectives from the landing of one unit to the landing of the next.

    Operations on the decision of the round, which is in host memory, are not counted.
    """
    with torch.no_grad(), Launches() as recorder:
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=1, prefetch_units=1)
        rank = Rank.build(
            recorder.streams, config, plan_of(UNITS), is_overlapped=True, ranks=num_ranks
        )
        engine = rank.engine
        try:
            engine.start()
            engine.before_step()
            engine.after_step()
            engine.land_up_to(2)
            recorder.names.clear()
            engine.land_up_to(3)
        finally:
            engine.close()
    return sum(name not in DECISION_OPERATIONS for name in recorder.names)


def test_launches_do_not_grow_with_ranks() -> None:
    """Would catch shards that are gathered, copied and added one by one, and any additional launch
    per unit."""
    counts = {num_ranks: launches(num_ranks) for num_ranks in (2, 8, 64)}
    assert counts == {2: 29, 8: 29, 64: 29}


def exchange_launches(codec: Codec, numel: int, size: int, *, rank: int, has_rest: bool) -> int:
    """Count kernels and collectives from the beginning of an exchange to the decoded sum."""
    with torch.no_grad(), Launches() as recorder:
        streams = recorder.streams
        group = Group(
            InOrderGroup(streams, "sync", rank, size), rank, size, CPU, TIMEOUT, "sync",
            make_streams=lambda device: streams,
        )  # fmt: skip
        rest = Wire(codec.name, codec).new_residual(numel, size, CPU) if has_rest else None
        addend = Addend(torch.ones(numel), rest, False, codec)
        recorder.names.clear()
        start_exchange(group, [addend]).wait()
    return len(recorder.names)


@pytest.mark.parametrize("codec", ENCODED, ids=lambda codec: codec.name)
def test_launches_of_an_encoded_exchange_do_not_grow_with_replicas(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch rows of an exchange that are encoded, decoded or added one by one, by the first
    and the last rank, whose chunk may be short.

    A slab holds all values, as on a GPU those of units of up to 2^24 elements (with top64, which
    decodes all addends, 2^24 / N)."""
    monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", 64 * EVEN)
    for has_rest in [False, True] if codec.has_residual else [False]:
        for numel in (EVEN, UNEVEN):
            found = {
                size: [
                    exchange_launches(codec, numel, size, rank=rank, has_rest=has_rest)
                    for rank in (0, size - 1)
                ]
                for size in (4, 16, 64)
            }
            print(codec.name, "residual" if has_rest else "plain", numel, found)
            assert found[4] == found[16] == found[64]
            if numel == EVEN and has_rest == codec.has_residual:
                assert found[4][0] == LAUNCHES[codec.name]


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (64,), (1000,), (3, 5), (64, 129), (4, 0)])
def test_sums_are_taken_in_rank_order(shape: tuple[int, ...]) -> None:
    """Bit for bit equal to adding one rank after another, for any number of ranks."""
    rows = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    assert torch.equal(sum_in_rank_order(rows), total)
    assert sum_in_rank_order(rows).shape == rows.shape[1:]


LATE = {"sync_interval": 4, "delay_steps": 3}


def launched_groups(settings: dict[str, Any], lag: int, control: Group) -> list[str]:
    """Train for two rounds of one rank of a replica; the groups of its collectives, in order."""
    config = EditConfig(**{"num_replicas": 2, "warmup_steps": 0, "sync_dtype": "int8", **settings})
    with torch.no_grad(), Launches(lag) as recorder:
        rank = Rank.build(
            recorder.streams, config, plan_of(UNITS), is_overlapped=True, control=control
        )
        try:
            rank.engine.start()
            for _ in range(10):
                for place in range(len(UNITS)):
                    rank.engine.land_up_to(place + 1)
                    rank.host.gather(place)
                rank.engine.before_step()
                rank.host.has_deferred_gather = True
                rank.engine.after_step()
            rank.engine.finish()
        finally:
            rank.engine.close()
    groups: list[str] = recorder.groups
    return groups


@pytest.mark.parametrize(
    "settings",
    [
        LATE,
        {**LATE, "average_moments": "both"},
        {"sync_interval": 2},
        {"sync_interval": 4, "fragments": 2, "delay_steps": 1},
    ],
    ids=["delayed", "moments", "overlap", "fragments"],
)
def test_ranks_that_poll_at_different_times_launch_in_the_same_order(
    settings: dict[str, Any],
) -> None:
    """Catches a second phase that each rank launches when it finds the first one done: before
    another collective on one rank and after it on another one, which is a deadlock where a device
    runs one collective after another. (One rank of the replica alone has another order.)"""
    network = Network(patience=60)

    def of_rank(number: int) -> list[str]:
        transport = MemoryProcessGroup(network, "control", number, 2)
        control = Group(transport, number, 2, CPU, TIMEOUT, "control")
        return launched_groups(settings, 40 * number, control)

    first, second = run_in_threads([partial(of_rank, number) for number in range(2)])
    assert first == second and first.count("sync") >= 2 * len(UNITS)
