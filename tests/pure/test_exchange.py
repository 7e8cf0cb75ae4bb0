"""Exchanges of all replicas over a network in memory, in any order of events.

What real gloo groups add (connections, time-outs, races) is tested in ``tests/distributed``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend, Residual
from megatron_edit.comm.wire import Exchange, Wire, start_exchange
from megatron_edit.constants import SYNC_DTYPES
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.codec import INT8, LOG8, ULOG8, Codec
from tests.harness.memory_network import CPU, Network, groups_in_order, groups_of
from tests.reference.wire import Lost, Round, cut

SIZES = [0, 1, 7, 130, 1000, 3003]
NUM_ROUNDS = 3


def addend(numel: int, replica: int, round: int) -> Any:
    """fp32 [numel], the same wherever it is drawn."""
    rng = np.random.default_rng([numel, replica, round])
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)


def finish(exchanges: list[Exchange], dice: random.Random) -> None:
    """Advance any of them, in any order, until all are over."""
    left = list(exchanges)
    for _ in range(100 * len(exchanges)):
        if not left:
            return
        place = dice.randrange(len(left))
        if left[place].advance():
            del left[place]
    raise AssertionError("the exchanges do not end")


@pytest.mark.parametrize("has_rest", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SYNC_DTYPES)
def test_sums_equal_the_reference(name: str, size: int, has_rest: bool) -> None:
    """Bit for bit, with somebody left out whose values are not finite. Catches a chunk off by one,
    a residual that is lost or is of somebody left out, and bytes that are not counted."""
    wire, dice = Wire.of(name), random.Random(size)
    has_rest = has_rest and wire.codec is not None
    for numel in SIZES:
        groups, lost = groups_of(size, Network()), Lost.nothing(size, numel) if has_rest else None
        rests = [wire.new_residual(numel, size, CPU) if has_rest else None for _ in groups]
        for round in range(NUM_ROUNDS):
            out = {round % size} if size > 1 and round > 0 else set()
            values = one_round(wire, groups, rests, numel, round, out, dice)
            addends = [addend(numel, replica, round) for replica in range(size)]
            wanted = Round(addends, out).sum(name, lost)
            for ours in values:
                np.testing.assert_array_equal(ours.numpy(), wanted, err_msg=f"{name} {numel}")
        for group in groups:
            assert group.payload_bytes == NUM_ROUNDS * wire.payload_bytes(numel, size)
        if lost is not None:
            assert_residuals(rests, name, numel, lost)


def one_round(
    wire: Wire, groups: list[Group], rests: list[Residual | None], numel: int, round: int,
    out: set[int], dice: random.Random,
) -> list[Tensor]:  # fmt: skip
    """What every replica ends with."""
    values = [torch.from_numpy(addend(numel, group.rank, round)) for group in groups]
    for replica in out:
        values[replica].fill_(torch.nan)
    exchanges = [
        wire.start(group, mine, rest, is_left_out=group.rank in out)
        for group, mine, rest in zip(groups, values, rests, strict=True)
    ]
    finish(exchanges, dice)
    return values


def assert_residuals(rests: list[Residual | None], name: str, numel: int, lost: Lost) -> None:
    """What each replica has lost of its addends, and of the chunk that it owns."""
    for rest, sent, chunk in zip(rests, lost.sent, cut(numel, len(rests), name), strict=True):
        assert rest is not None
        owned = chunk.stop - chunk.start
        np.testing.assert_array_equal(rest.sent.numpy(), sent)
        np.testing.assert_array_equal(rest.summed[:owned].numpy(), lost.summed[chunk])
        assert not rest.summed[owned:].any()


@pytest.mark.parametrize("name", SYNC_DTYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_many_in_flight(name: str, size: int) -> None:
    """Replicas advance their exchanges in orders of their own. Catches second phases that begin in
    another order on another replica."""
    wire, sizes = Wire.of(name), [500, 1, 3000, 300, 64]
    for seed in range(20):
        dice, groups = random.Random(seed), groups_of(size, Network())
        values = [[torch.from_numpy(addend(n, group.rank, 0)) for n in sizes] for group in groups]
        flying: list[Exchange] = []
        for number in range(len(sizes)):
            for group, mine in dice.sample(list(zip(groups, values, strict=True)), size):
                flying.append(wire.start(group, mine[number]))
                dice.choice(flying).advance()
        finish(flying, dice)
        for number, numel in enumerate(sizes):
            wanted = Round([addend(numel, replica, 0) for replica in range(size)]).sum(name, None)
            for mine in values:
                np.testing.assert_array_equal(mine[number].numpy(), wanted)


@pytest.mark.parametrize("name", SYNC_DTYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_several_as_one_in_order(name: str, size: int) -> None:
    """Where collectives run in order, and each replica advances its exchanges when it likes: sums
    as if each unit travelled alone. Catches phases that begin in another order on another replica,
    parts of a batch that are mixed up, and a replica that is left out of the wrong part."""
    wire, batches = Wire.of(name), [[500, 1, 0, 3000], [300, 64], [7]]
    for seed in range(10):
        dice, groups = random.Random(seed), groups_in_order(size, Network())
        values = {
            (group.rank, b, n): torch.from_numpy(addend(n, group.rank, b))
            for group in groups
            for b, batch in enumerate(batches)
            for n in batch
        }
        flying: list[Exchange] = []
        for b, batch in enumerate(batches):
            for group in dice.sample(groups, size):
                parts = [
                    Addend(values[group.rank, b, n], None, group.rank == n % size, wire.codec)
                    for n in batch
                ]
                flying.append(start_exchange(group, parts))
                dice.choice(flying).advance()
        finish(flying, dice)
        for b, batch in enumerate(batches):
            for n in batch:
                addends = [addend(n, replica, b) for replica in range(size)]
                wanted = Round(addends, {n % size}).sum(name, None)
                for rank in range(size):
                    np.testing.assert_array_equal(values[rank, b, n].numpy(), wanted)
        sent = sum(wire.payload_bytes(n, size) for batch in batches for n in batch)
        assert {group.payload_bytes for group in groups} == {sent}


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_several_forms_in_one_exchange(size: int) -> None:
    """A unit's parameters beside moments of the inner optimizer, where collectives run in order.
    Catches a sum that is decoded by the codec of another."""
    forms: dict[str, Codec | None] = {"fp32": None, "int8": INT8, "log8": LOG8, "ulog8": ULOG8}
    addends = {name: [abs(addend(300, replica, 0)) for replica in range(size)] for name in forms}
    dice, groups = random.Random(size), groups_in_order(size, Network())
    values = [
        {name: torch.from_numpy(own[group.rank].copy()) for name, own in addends.items()}
        for group in groups
    ]
    flying = [
        start_exchange(
            group,
            [Addend(own[n], None, group.rank == 1, codec) for n, codec in forms.items()],
        )
        for group, own in zip(groups, values, strict=True)
    ]
    finish(flying, dice)
    for name, every in addends.items():
        wanted = Round(every, {1}).sum(name, None)
        for own in values:
            np.testing.assert_array_equal(own[name].numpy(), wanted)


def test_a_broken_connection_is_a_lost_replica() -> None:
    """Whoever asks first. Catches a bare RuntimeError, which ends a rank with another code."""
    for name in ("fp32", "int8"):
        network = Network()
        group = groups_of(2, network)[0]
        exchange = Wire.of(name).start(group, torch.ones(300))
        assert not exchange.advance()
        network.is_broken = True
        with pytest.raises(ReplicaLostError, match="sync group: a collective failed"):
            exchange.advance()


def test_who_gives_does_not_wait_and_who_receives_does() -> None:
    """Rank 0 goes on at once, and keeps what it gave until it has reached the others."""
    first, second = groups_of(2, Network())
    given, received = torch.full((3,), 7.0), torch.zeros(3)
    first.broadcast_nowait(given)
    first.reap()
    assert len(first._unreaped) == 1
    second.broadcast_nowait(received)
    assert received.tolist() == [7.0] * 3
    first.reap()
    assert first._unreaped == [] and second._unreaped == []
