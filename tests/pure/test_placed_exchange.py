"""Encoded sums of replicas at several places: summed there first, and sent between places once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend, Chunks, Residual
from megatron_edit.comm.placement import places_of
from megatron_edit.comm.wire import (
    Exchange,
    Wire,
    placed_bytes,
    progress_exchanges,
    start_exchange,
)
from megatron_edit.method.codec import INT8, LOG8, Codec
from megatron_edit.tools.plan.exchanges import cut_bytes
from tests.harness.memory_network import (
    Network,
    advance_in_random_order,
    placed_groups,
    run_in_threads,
)

PLACES = {
    "2 + 2": (0, 0, 1, 1),
    "alternating": (0, 1, 0, 1),
    "3 + 2": (0, 1, 0, 1, 0),
    "1 + 3": (0, 1, 1, 1),
    "2 + 1 + 2": (2, 0, 1, 2, 0),
}
SIZES = [1, 7, 255, 1030, 5000]
NUM_ROUNDS = 3
INT8_WIRE = Wire.of("int8")


def addend(numel: int, replica: int, count: int) -> Tensor:
    """Reproducible values, fp32."""
    generator = torch.Generator().manual_seed(1000 * count + 10 * replica + numel)
    return torch.randn(numel, generator=generator) * 3.0**replica


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


def finish(exchanges: list[Exchange], groups: Sequence[Group], order: random.Random) -> None:
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
    for numel in SIZES:
        groups = placed_groups(of, Network(patience=20), in_order=in_order)
        rests: list[Residual | None] = [
            wire.new_residual(numel, len(of), torch.device("cpu")) if wire.has_residual else None
            for _ in of
        ]
        reference = Reference(of, numel, wire.codec, has_rest=wire.has_residual)
        for count in range(NUM_ROUNDS):
            out = count % len(of) if count else None
            addends = [addend(numel, r, count) for r in range(len(of))]
            expected = reference.sum([a * (r != out) for r, a in enumerate(addends)])
            if out is not None:
                addends[out].fill_(torch.nan)
            begun = [
                wire.start(group, values, rest, is_excluded=group.rank == out)
                for group, values, rest in zip(groups, addends, rests, strict=True)
            ]
            finish(begun, groups, random.Random(count))
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
            [[addend(400, r, 10 * n + c) for c in range(2)] for n in range(3)]
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
        finish(begun, groups, order)
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
    finish(begun, groups, random.Random(1))
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
