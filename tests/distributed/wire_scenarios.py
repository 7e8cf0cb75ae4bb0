"""Functions of the wire tests. Each runs on every rank."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.transport import Transport, stand_alone_group
from megatron_edit.comm.wire import Exchange, Wire
from megatron_edit.errors import ReplicaLostError

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


def is_excluded(replica: int, round: int, size: int) -> bool:
    """Whether a replica is left out: one in every round after the first, in alternation."""
    return size > 1 and round > 0 and round % size == replica


def mine(numel: int, round: int, group: Group) -> Tensor:
    """This rank's addend."""
    return torch.from_numpy(addend(numel, group.rank, round))


def sum_rounds(names: list[str], sizes: list[int], num_rounds: int, has_residual: bool) -> Record:
    """Sum with every wire and size; a replica that is left out of a round has NaN in it.

    Returns:
        By (name, size): the sums of all rounds, the final residuals, and pairs of the sent and the
        expected bytes of an exchange.
    """
    group = join()
    records: dict[Any, Any] = {}
    for name in names:
        wire = Wire.of(name)
        for numel in sizes:
            residual = None
            if has_residual and wire.codec is not None:
                residual = wire.new_residual(numel, group.size, CPU)
            sums, sent = [], set()
            for round in range(num_rounds):
                values, out = mine(numel, round, group), is_excluded(group.rank, round, group.size)
                if out:
                    values.fill_(torch.nan)
                before = group.payload_bytes
                wire.start(group, values, residual, is_excluded=out).wait()
                sent.add((group.payload_bytes - before, wire.payload_bytes(numel, group.size)))
                sums.append(values.numpy())
            records[name, numel] = {
                "sums": sums,
                "sent": sent,
                "residual": None
                if residual is None
                else (residual.sent.numpy(), residual.summed.numpy()),
            }
    return records


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


def start_many_exchanges(name: str, sizes: list[int], seed: int) -> list[tuple[bytes, bytes]]:
    """Start many exchanges and advance them at random, in a different order on each rank.

    Returns:
        The sum of each exchange, and the same sum made one exchange at a time.
    """
    group, wire = join(), Wire.of(name)
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
