"""Wires over real gloo groups: equal bits on all ranks, the reference's sums, exact bytes."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.transport import Transport, stand_alone_group
from megatron_edit.comm.wire import Exchange, Wire
from megatron_edit.constants import WIRE_TYPES
from megatron_edit.errors import ReplicaLostError
from tests.harness import run_ranks
from tests.reference.wire import AllReduce

SCENARIOS = "tests.distributed.test_wire:"
SIZES = [0, 1, 7, 130, 1000, 100_003]
# Largest error of a sum of three addends, as a multiple of the largest value of an addend.
BOUNDS = {
    "bf16": 0.02, "int8": 0.03, "int4": 0.5, "int2": 2.0, "ternary": 2.0, "sign": 2.5, "top64": 3.0,
}  # fmt: skip
WIDTHS = {
    "fp32": 4.0, "bf16": 2.0, "int8": 260 / 256, "int4": 66 / 128, "int2": 260 / 1024,
    "ternary": 0.2 + 2 / 256, "sign": 66 / 512,
}  # fmt: skip


def expected(name: str, numel: int, size: int, round: int = 0) -> Any:
    """The reference's sum in a round."""
    return AllReduce([addend(numel, replica, round) for replica in range(size)]).sum(name, None)


def test_reference_is_close_to_the_exact_sum() -> None:
    """Within the rounding of each addend, so that wire and reference do not share an error."""
    assert {"fp32", *BOUNDS} == set(WIRE_TYPES)
    for name, bound in BOUNDS.items():
        exact = sum(addend(1000, replica, 0).astype(np.float64) for replica in range(3))
        ours = expected(name, 1000, 3)
        largest = max(np.abs(addend(1000, replica, 0)).max() for replica in range(3))
        assert np.abs(ours - exact).max() < bound * largest


@pytest.mark.parametrize("size", [2, 3])
def test_fp32_sums_do_not_depend_on_buckets(size: int) -> None:
    """At N = 2 any buckets give the bits of plain all-reduces. Beyond, the order of addends depends
    on the buckets: sums are equal up to rounding, and bitwise equal on all ranks."""
    args = (SIZES, [1_000_000, 4096, 333])
    results = run_ranks(SCENARIOS + "sum_fp32_in_buckets", size, args, check=True)
    largest = np.concatenate(
        [np.sum([np.abs(addend(n, replica, 0)) for replica in range(size)], axis=0) for n in SIZES]
    )
    for result in results:
        assert result.value == results[0].value
        for wired, plain in result.value:
            assert size > 2 or wired == plain
            ours, theirs = (np.frombuffer(bits, np.float32) for bits in (wired, plain))
            assert (np.abs(ours - theirs) <= 2.0**-22 * largest).all()


@pytest.mark.parametrize("size", [2, 3])
def test_many_exchanges_in_flight_at_once(size: int) -> None:
    """Encoded sums are the reference's. Catches: phases that start in different orders
    on different ranks (a hang, or mixed sums), a chunk off by one."""
    sizes = [5000, 1, 70_000, 300, 20_000, 64, 9000]
    for result in run_ranks(SCENARIOS + "start_exchanges_of_all_types", size, (sizes,), check=True):
        assert {name for name, _ in result.value} == set(WIRE_TYPES)
        for (name, seed), pairs in result.value.items():
            assert all(together == alone for together, alone in pairs), (name, seed)
            for n, (_, alone) in enumerate(pairs if name != "fp32" else []):
                found = np.frombuffer(alone, np.float32)
                np.testing.assert_array_equal(found, expected(name, sizes[n], size, n))


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("fp32", "silent"),
        ("fp32", "dead, advancing"),
        ("int8", "silent"),
        ("int8", "silent between"),
        ("int8", "dead"),
        ("int8", "dead, advancing"),
        ("int8", "dead between"),
        ("top64", "silent"),
        ("top64", "dead, advancing"),
    ],
)
def test_lost_peer_raises_within_the_timeout(name: str, when: str) -> None:
    """Catches: a hang, the default time-out of the group, a bare RuntimeError."""
    results = run_ranks(SCENARIOS + "lose_rank_1", 2, (name, when), timeout=60)
    assert results[0].returncode == 0, results[0].stderr
    assert results[0].value is not None, "the exchange succeeded without the peer"
    message, seconds = results[0].value
    assert "sync group: a collective failed" in message
    assert seconds < 2.0 + 1.5  # the time-out of one collective, and slack for a busy machine


@pytest.mark.parametrize("size", [2, 3])
def test_each_direction_uses_its_own_connections(size: int) -> None:
    """Catches: two ranks that send to each other one after the other, over one connection."""
    for result in run_ranks(SCENARIOS + "record_directions", size, check=True):
        rank, phases = result.value
        lower, higher = ([int(i < rank) for i in range(size)], [int(i > rank) for i in range(size)])
        assert phases == [{"up": [(lower, higher)], "down": [(higher, lower)]}] * 2


def test_group_without_phases_refuses_encoded_exchange() -> None:
    """Catches: different phases of two ranks that are matched on one connection."""
    for result in run_ranks(SCENARIOS + "start_without_phases", 2, check=True):
        assert "not made for exchanges in phases" in result.value


def test_payload_bytes_of_each_wire() -> None:
    """A rank sends 2 (N - 1) / N of the encoded size, up to the padding of chunks."""
    numel = 8_000_000
    for size in (1, 2, 3, 8):
        share = 2 * (size - 1) / size * numel
        encoded = 116 / 4096 * numel  # goes to all others
        assert Wire.of("top64").payload_bytes(numel, size) == pytest.approx(
            (size - 1) * encoded, rel=0.005
        )
        for name, width in WIDTHS.items():
            assert Wire.of(name).payload_bytes(numel, size) == pytest.approx(
                share * width, rel=0.005
            )
    for name in WIRE_TYPES:  # small tensors cost at most fp32 and a scale per chunk
        assert Wire.of(name).payload_bytes(3, 2) <= Wire.of("fp32").payload_bytes(3, 2) + 8


def test_unknown_wire_name_is_refused() -> None:
    """The error lists the known names."""
    with pytest.raises(
        ValueError, match="wire 'int3': must be one of fp32, bf16, int8, int4, int2"
    ):
        Wire.of("int3")
    assert [Wire.of(name).has_residual for name in WIRE_TYPES] == [False, False, *6 * [True]]
    assert [Wire.of(name).num_phases for name in WIRE_TYPES] == [0, *6 * [2], 1]
    residual = Wire.of("int8").new_residual(1000, 3, torch.device("cpu"))
    assert (residual.sent.numel(), residual.summed.numel()) == (1000, 512)
    residual = Wire.of("top64").new_residual(1000, 3, torch.device("cpu"))
    assert (residual.sent.numel(), residual.summed.numel()) == (1000, 0)
    assert Wire.of("fp32").owner_numel(1000, 3) == 0


# ---- Functions of the wire tests. Each runs on every rank


CPU = torch.device("cpu")
Record = dict[str, Any]


def join() -> Group:
    """Create a group of all ranks for exchanges in two phases."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0
    )
    return stand_alone_group(
        store, rank, size, Transport("gloo", CPU), timedelta(seconds=60), "sync group",
        num_phases=2,
    )  # fmt: skip


def addend(numel: int, replica: int, round: int) -> Any:
    """The addend of a replica in a round: fp32 [numel], the same on all ranks."""
    rng = np.random.default_rng([numel, replica, round])
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)


def mine(numel: int, round: int, group: Group) -> Tensor:
    """This rank's addend."""
    return torch.from_numpy(addend(numel, group.rank, round))


def sum_fp32_in_buckets(sizes: list[int], buckets: list[int]) -> list[tuple[bytes, bytes]]:
    """Compare plain all-reduces of each tensor with fp32 wires over all tensors in buckets."""
    group, wire = join(), Wire.of("fp32")
    tensors = [mine(numel, 0, group) for numel in sizes]
    flat = torch.cat(tensors)
    for tensor in tensors:
        group.all_reduce(tensor)
    expected = torch.cat(tensors)
    pairs = []
    for bucket in buckets:
        work = flat.clone()
        exchanges = [wire.start(group, part) for part in work.split(bucket)]
        for exchange in exchanges:
            while not exchange.advance():
                time.sleep(0.001)
        pairs.append((work.numpy().tobytes(), expected.numpy().tobytes()))
    return pairs


def start_exchanges_of_all_types(sizes: list[int]) -> dict[Any, list[tuple[bytes, bytes]]]:
    """Call `start_many_exchanges` for all wire types and two seeds, by both."""
    group = join()
    return {
        (name, seed): start_many_exchanges(group, name, sizes, seed)
        for name in WIRE_TYPES
        for seed in range(2)
    }


def start_many_exchanges(
    group: Group, name: str, sizes: list[int], seed: int
) -> list[tuple[bytes, bytes]]:
    """Start many exchanges and advance them at random, in a different order on each rank.

    Returns:
        The sum of each exchange, and the same sum made one exchange at a time.
    """
    wire = Wire.of(name)
    dice = random.Random(seed * 100 + group.rank)
    in_flight: list[tuple[Exchange, Tensor]] = []

    def advance_some() -> None:
        for _ in range(dice.randrange(4)):
            if in_flight:
                dice.choice(in_flight)[0].advance()
            time.sleep(dice.choice([0.0, 0.0, 0.003]))

    for round, numel in enumerate(sizes):
        values = mine(numel, round, group)
        in_flight.append((wire.start(group, values), values))
        advance_some()
        if round % 2:  # other collectives of the same group, in the order of the program
            assert group.all_gather(torch.tensor([group.rank])).numel() == group.size
        advance_some()
    order = list(range(len(in_flight)))
    dice.shuffle(order)
    for place in order:
        exchange = in_flight[place][0]
        if dice.random() < 0.5:
            while not exchange.advance():
                assert not group.backlog or exchange.is_completed in (True, False)
        exchange.wait()
        assert exchange.is_completed and exchange.advance()
    assert not group.backlog
    pairs = []
    for round, (_, values) in enumerate(in_flight):
        alone = mine(sizes[round], round, group)
        wire.start(group, alone).wait()
        pairs.append((values.numpy().tobytes(), alone.numpy().tobytes()))
    return pairs


def lose_rank_1(name: str, when: str) -> tuple[str, float] | None:
    """Let rank 1 hang or exit, before the exchange or between its phases.

    Returns:
        The error message of the other ranks, and the seconds until it.
    """
    group, wire = join(), Wire.of(name)
    group.timeout = timedelta(seconds=2)
    values = torch.ones(5000)
    wire.start(group, values.clone()).wait()
    if group.rank == 1:
        if when.endswith("between"):
            wire.start(group, values)
            time.sleep(0.5)  # phase (a) completes, (b) never starts on this rank
        if when.startswith("silent"):
            time.sleep(4.0)
        os._exit(0)
    exchange = wire.start(group, values)
    began = time.monotonic()
    try:
        while when == "dead, advancing" and not exchange.advance():
            time.sleep(0.01)
        exchange.wait()
    except ReplicaLostError as error:
        return str(error), time.monotonic() - began
    return None


class _RecordingTransport:
    """A transport that records how many rows come from, and go to, each rank."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[list[int], list[int]]] = []

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: Any
    ) -> Any:
        self.calls.append((received, sent))
        return self._inner.alltoall_base(output, rows, received, sent, options)


def record_directions() -> tuple[int, list[Record]]:
    """Return this rank, and the calls of one exchange by phase and direction."""
    group = join()
    group.phases = tuple(
        Duplex(_RecordingTransport(ways.up), _RecordingTransport(ways.down))
        for ways in group.phases
    )
    Wire.of("int8").start(group, torch.ones(1000)).wait()
    return group.rank, [{"up": ways.up.calls, "down": ways.down.calls} for ways in group.phases]


def start_without_phases() -> str:
    """Start an exchange in two phases on a group without phases; returns the error."""
    group = join()
    group.phases = ()
    try:
        Wire.of("int8").start(group, torch.ones(3))
    except AssertionError as error:
        return str(error)
    return ""
