"""Exchanges of all replicas over an in-memory network, with events in any order.

What real gloo groups add (connections, time-outs, races) is tested in ``tests/distributed``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend, Residual
from megatron_edit.comm.wire import Exchange, Wire, progress_exchanges, start_exchange
from megatron_edit.constants import WIRE_TYPES
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.codec import INT8, LOG8, ULOG8, Codec
from megatron_edit.method.sparse_codec import TOP64
from tests.harness.memory_network import (
    CPU,
    Network,
    advance_in_random_order,
    in_order_groups,
    two_phase_groups,
)
from tests.reference.wire import AllReduce, Residuals, chunk_slices

SIZES = [0, 1, 7, 130, 1000, 3003]
NUM_ROUNDS = 3


def addend(numel: int, replica: int, round: int) -> Any:
    """Return reproducible random values, fp32 [numel]."""
    rng = np.random.default_rng([numel, replica, round])
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)


def finish(exchanges: list[Exchange], order: random.Random, in_order: Sequence[Group] = ()) -> None:
    """Advance the exchanges in random order until all are over. Groups whose collectives run in
    order begin their second phases at a fixed place, and not by being advanced."""
    for group in order.sample(in_order, len(in_order)):
        progress_exchanges(group)
        order.choice(exchanges).advance()
    advance_in_random_order(exchanges, order)


@pytest.mark.parametrize("has_rest", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", WIRE_TYPES)
def test_sums_equal_the_reference(name: str, size: int, has_rest: bool) -> None:
    """Bit for bit, with a left-out replica whose values are non-finite.

    Catches a chunk off by one, a residual that is dropped or taken from a left-out replica, and
    bytes that are not counted.
    """
    wire, order = Wire.of(name), random.Random(size)
    has_rest = has_rest and wire.codec is not None
    for numel in SIZES if size < 9 else SIZES[-1:]:  # of which some ranks have empty chunks
        groups, residuals = (
            two_phase_groups(size, Network()),
            Residuals.zeros(size, numel) if has_rest else None,
        )
        rests = [wire.new_residual(numel, size, CPU) if has_rest else None for _ in groups]
        for round in range(NUM_ROUNDS):
            out = {round % size} if size > 1 and round > 0 else set()
            values = one_round(wire, groups, rests, numel, round, out, order)
            addends = [addend(numel, replica, round) for replica in range(size)]
            expected = AllReduce(addends, out).sum(name, residuals)
            for ours in values:
                np.testing.assert_array_equal(ours.numpy(), expected, err_msg=f"{name} {numel}")
        for group in groups:
            assert group.payload_bytes == NUM_ROUNDS * wire.payload_bytes(numel, size)
        if residuals is not None:
            assert_residuals(rests, name, numel, residuals)


def one_round(
    wire: Wire, groups: list[Group], rests: list[Residual | None], numel: int, round: int,
    out: set[int], order: random.Random,
) -> list[Tensor]:  # fmt: skip
    """Run one round and return the sum on every replica."""
    values = [torch.from_numpy(addend(numel, group.rank, round)) for group in groups]
    for replica in out:
        values[replica].fill_(torch.nan)
    exchanges = [
        wire.start(group, mine, rest, is_excluded=group.rank in out)
        for group, mine, rest in zip(groups, values, rests, strict=True)
    ]
    finish(exchanges, order)
    return values


def assert_residuals(
    rests: list[Residual | None], name: str, numel: int, residuals: Residuals
) -> None:
    """Assert the residuals of each replica: of its addends, and of the chunk that it owns."""
    for rest, sent, chunk in zip(
        rests, residuals.sent, chunk_slices(numel, len(rests), name), strict=True
    ):
        assert rest is not None
        owned = chunk.stop - chunk.start
        np.testing.assert_array_equal(rest.sent.numpy(), sent)
        np.testing.assert_array_equal(rest.summed[:owned].numpy(), residuals.summed[chunk])
        assert not rest.summed[owned:].any()


@pytest.mark.parametrize("name", WIRE_TYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_in_flight_advance_in_any_order(name: str, size: int) -> None:
    """Each replica advances its exchanges in a different order. Catches second phases that start
    in different orders on different replicas."""
    wire, sizes = Wire.of(name), [500, 1, 3000, 300, 64]
    for seed in range(20):
        order, groups = random.Random(seed), two_phase_groups(size, Network())
        values = [[torch.from_numpy(addend(n, group.rank, 0)) for n in sizes] for group in groups]
        in_flight: list[Exchange] = []
        for number in range(len(sizes)):
            for group, mine in order.sample(list(zip(groups, values, strict=True)), size):
                in_flight.append(wire.start(group, mine[number]))
                order.choice(in_flight).advance()
        finish(in_flight, order)
        for number, numel in enumerate(sizes):
            expected = AllReduce([addend(numel, replica, 0) for replica in range(size)]).sum(
                name, None
            )
            for mine in values:
                np.testing.assert_array_equal(mine[number].numpy(), expected)


@pytest.mark.parametrize("name", WIRE_TYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_batched_exchange_equals_separate_exchanges(name: str, size: int) -> None:
    """Collectives run in order, and each replica advances its exchanges at any time.

    Catches phases that start in different orders on different replicas, addends of a batch that are
    swapped, and a replica that is left out of the wrong addend.
    """
    wire, batches = Wire.of(name), [[500, 1, 0, 3000], [300, 64], [7]]
    for seed in range(10):
        order, groups = random.Random(seed), in_order_groups(size, Network())
        values = {
            (group.rank, b, n): torch.from_numpy(addend(n, group.rank, b))
            for group in groups
            for b, batch in enumerate(batches)
            for n in batch
        }
        in_flight: list[Exchange] = []
        for b, batch in enumerate(batches):
            for group in order.sample(groups, size):
                parts = [
                    Addend(values[group.rank, b, n], None, group.rank == n % size, wire.codec)
                    for n in batch
                ]
                in_flight.append(start_exchange(group, parts))
                order.choice(in_flight).advance()
        finish(in_flight, order, groups)
        for b, batch in enumerate(batches):
            for n in batch:
                addends = [addend(n, replica, b) for replica in range(size)]
                expected = AllReduce(addends, {n % size}).sum(name, None)
                for rank in range(size):
                    np.testing.assert_array_equal(values[rank, b, n].numpy(), expected)
        sent = sum(wire.payload_bytes(n, size) for batch in batches for n in batch)
        assert {group.payload_bytes for group in groups} == {sent}


def test_advancing_begins_no_second_phase_where_collectives_run_in_order() -> None:
    """Catches a collective whose place among those of the training framework depends on when a rank
    polls: two ranks that launch them in different orders may wait for each other."""
    groups = in_order_groups(2, Network())
    exchanges = [Wire.of("int8").start(group, torch.ones(300)) for group in groups]
    launched = [group.num_started for group in groups]
    assert not any(exchange.advance() for exchange in exchanges * 3)
    assert [group.num_started for group in groups] == launched
    finish(exchanges, random.Random(1), groups)


@pytest.mark.parametrize("name", WIRE_TYPES)
def test_an_exchange_whose_collective_is_just_done_has_work_on_the_wire(name: str) -> None:
    """The last message arrives after `advance` and before `on_wire` is read. Catches a progress
    thread that has nothing to wait for then, so that the exchange stands still until the main
    thread needs its sum."""
    one, other = two_phase_groups(2, Network())
    wire = Wire.of(name)
    mine = [wire.start(one, torch.ones(300)) for _ in range(2)]
    assert not any(exchange.advance() for exchange in mine)
    theirs = [wire.start(other, torch.ones(300)) for _ in range(2)]
    assert all(exchange.on_wire is not None for exchange in mine)
    finish([*mine, *theirs], random.Random(1))
    assert all(exchange.on_wire is None for exchange in mine)


@pytest.mark.parametrize("size", [2, 3])
def test_one_exchange_carries_several_codecs(size: int) -> None:
    """Parameters of a unit together with moments of the inner optimizer, on in-order collectives.

    Catches a sum that is decoded with the wrong codec.
    """
    forms: dict[str, Codec | None] = {
        "fp32": None, "int8": INT8, "log8": LOG8, "ulog8": ULOG8, "top64": TOP64,
    }  # fmt: skip
    addends = {name: [abs(addend(300, replica, 0)) for replica in range(size)] for name in forms}
    order, groups = random.Random(size), in_order_groups(size, Network())
    values = [
        {name: torch.from_numpy(own[group.rank].copy()) for name, own in addends.items()}
        for group in groups
    ]
    in_flight = [
        start_exchange(
            group,
            [Addend(own[n], None, group.rank == 1, codec) for n, codec in forms.items()],
        )
        for group, own in zip(groups, values, strict=True)
    ]
    finish(in_flight, order, groups)
    for name, every in addends.items():
        expected = AllReduce(every, {1}).sum(name, None)
        for own in values:
            np.testing.assert_array_equal(own[name].numpy(), expected)


def test_failed_collective_raises_replica_lost_error() -> None:
    """Catches a bare RuntimeError, with which a rank exits with the wrong code."""
    for name in ("fp32", "int8", "top64"):
        network = Network()
        group = two_phase_groups(2, network)[0]
        exchange = Wire.of(name).start(group, torch.ones(300))
        assert not exchange.advance()
        network.is_broken = True
        with pytest.raises(ReplicaLostError, match="sync group: a collective failed"):
            exchange.advance()


def test_broadcast_nowait_blocks_only_receivers() -> None:
    """Rank 0 continues at once, and keeps the tensor until the other ranks have received it."""
    first, second = two_phase_groups(2, Network())
    sent, received = torch.full((3,), 7.0), torch.zeros(3)
    first.broadcast_nowait(sent)
    first.reap()
    assert len(first._unreaped) == 1
    second.broadcast_nowait(received)
    assert received.tolist() == [7.0] * 3
    first.reap()
    assert first._unreaped == [] and second._unreaped == []
