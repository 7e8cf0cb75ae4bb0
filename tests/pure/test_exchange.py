"""Exchanges of all replicas over an in-memory network, with events in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend, Chunks, Residual
from megatron_edit.comm.control import DelayedFlags, Flag
from megatron_edit.comm.placement import places_of
from megatron_edit.comm.wire import (
    Exchange,
    Wire,
    placed_bytes,
    progress_exchanges,
    start_exchange,
)
from megatron_edit.constants import WIRE_TYPES
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.codec import INT8, LOG8, ULOG8, Codec
from megatron_edit.method.sparse_codec import TOP64
from megatron_edit.tools.plan.costs import cut_bytes
from tests.harness.memory_network import (
    CPU,
    Network,
    advance_in_random_order,
    in_order_groups,
    placed_groups,
    run_in_threads,
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


# ---- Encoded sums of replicas at several places: summed there first, and sent between places once


PLACES = {
    "2 + 2": (0, 0, 1, 1),
    "alternating": (0, 1, 0, 1),
    "3 + 2": (0, 1, 0, 1, 0),
    "1 + 3": (0, 1, 1, 1),
    "2 + 1 + 2": (2, 0, 1, 2, 0),
}
INT8_WIRE = Wire.of("int8")


class Reference:
    """The sum chunk by chunk, as one process computes it, with residuals of places and chunks."""

    def __init__(self, of: Sequence[int], numel: int, codec: Codec, *, has_rest: bool) -> None:
        self.of, self.codec = of, codec
        self.chunks = Chunks.split(numel, len(of), codec)
        self.sent = {place: torch.zeros(numel) for place in of} if has_rest else None
        self.summed = torch.zeros(numel) if has_rest else None

    def sum(self, addends: Sequence[Tensor]) -> Tensor:
        """Sum these addends of all replicas."""
        totals = {place: torch.zeros_like(addends[0]) for place in self.of}
        for place, values in zip(self.of, addends, strict=True):
            totals[place] += values
        result = torch.empty_like(addends[0])
        members = {p: [r for r, each in enumerate(self.of) if each == p] for p in totals}
        for chunk in range(len(self.of)):
            where = self.chunks.of(chunk)
            if where.start == where.stop:
                continue
            by_agent = {ranks[chunk % len(ranks)]: p for p, ranks in members.items()}
            total = torch.zeros(where.stop - where.start)
            for agent in sorted(by_agent):
                place = by_agent[agent]
                total += self._coded(
                    totals[place][where], None if self.sent is None else self.sent[place][where]
                )
            result[where] = self._coded(total, None if self.summed is None else self.summed[where])
        return result

    def _coded(self, values: Tensor, rest: Tensor | None) -> Tensor:
        decoded = torch.empty_like(values)
        self.codec.decode(self.codec.encode(values.clone(), residual=rest), decoded)
        return decoded


def finish_at_places(
    exchanges: list[Exchange], groups: Sequence[Group], order: random.Random
) -> None:
    """Advance all in random order; collectives that run in order begin at a fixed place."""
    if groups[0].runs_in_order:
        run_in_threads([partial(progress_exchanges, group) for group in groups])
    advance_in_random_order(exchanges, order)


@pytest.mark.parametrize("in_order", [False, True], ids=["gloo", "nccl"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", ["bf16", "int8", "int2"])
def test_sums_of_places_equal_the_reference(name: str, places: str, in_order: bool) -> None:
    """Bit for bit on all replicas, with error feedback over several rounds, and a replica that is
    left out. Catches a chunk that goes to a wrong agent, an agent that uses the residual of another
    one, and shares of a place that are put together in a wrong order."""
    of, wire = PLACES[places], Wire.of(name)
    assert wire.codec is not None
    for numel in (1, 7, 255, 1030, 5000):
        groups = placed_groups(of, Network(patience=20), in_order=in_order)
        rests: list[Residual | None] = [
            wire.new_residual(numel, len(of), torch.device("cpu")) if wire.has_residual else None
            for _ in of
        ]
        reference = Reference(of, numel, wire.codec, has_rest=wire.has_residual)
        for count in range(NUM_ROUNDS):
            out = count % len(of) if count else None
            addends = [torch.from_numpy(addend(numel, r, count)) for r in range(len(of))]
            expected = reference.sum([a * (r != out) for r, a in enumerate(addends)])
            if out is not None:
                addends[out].fill_(torch.nan)
            begun = [
                wire.start(group, values, rest, is_excluded=group.rank == out)
                for group, values, rest in zip(groups, addends, rests, strict=True)
            ]
            finish_at_places(begun, groups, random.Random(count))
            for values in addends:
                assert torch.equal(values, expected), (numel, count)
        for group in groups:
            assert group.places is not None
            parts = (group, group.places.up, group.places.down)
            each = placed_bytes(wire.codec, numel, of, group.rank)
            assert sum(part.payload_bytes for part in parts) == NUM_ROUNDS * each


@pytest.mark.parametrize("in_order", [False, True], ids=["gloo", "nccl"])
def test_exchanges_of_places_in_flight_advance_in_any_order(in_order: bool) -> None:
    """Several at a time, of several sums each. Catches steps that begin in other orders on other
    replicas, so that messages are mixed up."""
    of, codecs = PLACES["3 + 2"], (INT8, LOG8)
    for seed in range(10):
        order = random.Random(seed)
        groups = placed_groups(of, Network(patience=20), in_order=in_order)
        values = [
            [[torch.from_numpy(addend(400, r, 10 * n + c)) for c in range(2)] for n in range(3)]
            for r in range(len(of))
        ]
        expected = [
            [
                Reference(of, 400, codec, has_rest=False).sum([each[n][c] for each in values])
                for c, codec in enumerate(codecs)
            ]
            for n in range(3)
        ]
        begun: list[Exchange] = []
        for n in range(3):
            if in_order:  # before another exchange begins, all steps of the one before do
                run_in_threads([partial(progress_exchanges, group) for group in groups])
            for group in order.sample(groups, len(of)):
                mine = zip(values[group.rank][n], codecs, strict=True)
                parts = [Addend(each, None, False, codec) for each, codec in mine]
                begun.append(start_exchange(group, parts))
                order.choice(begun).advance()
        finish_at_places(begun, groups, order)
        for found in values:
            for n in range(3):
                for c in range(2):
                    assert torch.equal(found[n][c], expected[n][c])


@pytest.mark.parametrize(
    ("hosts", "sites", "places"),
    [
        ("a a b b", "", (0, 0, 1, 1)),
        ("a,b c b,d e", "", (0, 1, 0, 2)),
        ("a,b c,d b,c e", "", (0, 0, 0, 1)),
        ("a b c d", "", ()),
        ("a a a a", "", ()),
        ("a a b b", "x y x y", (0, 1, 0, 1)),
        ("a b c d", "x x x x", ()),
        ("a a b b", "x y z w", ()),
    ],
)
def test_places_are_sites_or_common_hosts(hosts: str, sites: str, places: tuple[int, ...]) -> None:
    """None where all are at one place, or each is alone."""
    counts = [dict.fromkeys(names.split(","), 1) for names in hosts.split()]
    assert places_of(counts, sites.split()) == places


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", ["int8", "int2", "top64"])
def test_planned_bytes_over_the_cut_are_those_sent(name: str, places: str) -> None:
    """Counted by the messages of all replicas. Catches a plan that counts what a card sends: over
    the link between two sites of n replicas a flat exchange sends n times as much."""
    of, wire, network, numel = PLACES[places], Wire.of(name), Network(), 4096
    groups = placed_groups(of, network)
    begun = [wire.start(group, torch.ones(numel)) for group in groups]
    finish_at_places(begun, groups, random.Random(1))
    crossed: Counter[int] = Counter()
    for key, message in network.messages.items():
        if len(key) == 4 and key[0].startswith(("up ", "down ")) and "place" not in key[0]:
            crossed[of[key[2]]] += message.nbytes * (of[key[2]] != of[key[3]])
    assert max(crossed.values()) == cut_bytes(wire, numel, of)


def test_bytes_over_the_cut_do_not_grow_with_the_replicas_of_a_site() -> None:
    """Half a byte a parameter in each phase for int8, and each way. fp32 has a ring."""
    for near in (1, 2, 8, 64):
        of = [0] * near + [1] * near
        numel = 1 << 20
        assert cut_bytes(INT8_WIRE, numel, of) == pytest.approx(numel, rel=0.02)
        assert cut_bytes(Wire.of("fp32"), numel, of) == pytest.approx(
            4 * numel * (2 - 1 / near), rel=0.01
        )


# ---- `DelayedFlags`: all ranks of a replica read the flags of rank 0 one step later


def test_ranks_read_flags_of_rank_0_one_step_later() -> None:
    """Catches a rank that uses its own flags, a flag that is never cleared, and a blocking `post`.

    All ranks run in one thread here, so a `post` that waits for other ranks would deadlock.
    """
    ranks = [DelayedFlags(group) for group in two_phase_groups(3, Network())]
    assert all(flags.read() is Flag.NONE for flags in ranks)
    seen = [Flag.MEET, Flag.NONE, Flag.STOP | Flag.MEET, Flag.NONE]
    for now in seen:
        for rank, flags in enumerate(ranks):
            flags.post(now if rank == 0 else Flag.STOP)
        assert [flags.read() for flags in ranks] == [now] * 3
        assert [flags.read() for flags in ranks] == [now] * 3  # reading is repeatable
