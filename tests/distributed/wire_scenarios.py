"""What the ranks of the tests of wires do. Each function runs in every rank."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from functools import cached_property
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
    """A group of all ranks, for exchanges in two phases."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0
    )
    return stand_alone_group(
        store, rank, size, Transport("gloo", CPU), timedelta(seconds=60), "sync group",
        num_phases=2,
    )  # fmt: skip


def addend(numel: int, replica: int, round: int) -> Any:
    """fp32 [numel], the same wherever it is drawn."""
    rng = np.random.default_rng([numel, replica, round])
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)


def is_left_out(replica: int, round: int, size: int) -> bool:
    """Somebody is left out in every round but the first, and nobody always."""
    return size > 1 and round > 0 and round % size == replica


def mine(numel: int, round: int, group: Group) -> Tensor:
    """This rank's addend."""
    return torch.from_numpy(addend(numel, group.rank, round))


def sum_rounds(names: list[str], sizes: list[int], num_rounds: int, has_rest: bool) -> Record:
    """Sums of every wire and size; in the rounds a replica is left out it holds NaN.

    Returns:
        By (name, size): the sums of all rounds, the residuals at the end, and the bytes that one
        exchange has sent with those that were expected.
    """
    group = join()
    records: dict[Any, Any] = {}
    for name in names:
        wire = Wire.of(name)
        for numel in sizes:
            rest = None
            if has_rest and wire.codec is not None:
                rest = wire.new_residual(numel, group.size, CPU)
            sums, sent = [], set()
            for round in range(num_rounds):
                values, out = mine(numel, round, group), is_left_out(group.rank, round, group.size)
                if out:
                    values.fill_(torch.nan)
                before = group.payload_bytes
                wire.start(group, values, rest, is_left_out=out).wait()
                sent.add((group.payload_bytes - before, wire.payload_bytes(numel, group.size)))
                sums.append(values.numpy())
            records[name, numel] = {
                "sums": sums,
                "sent": sent,
                "rest": None if rest is None else (rest.sent.numpy(), rest.summed.numpy()),
            }
    return records


def fp32_in_pieces(sizes: list[int], buckets: list[int]) -> list[tuple[bytes, bytes]]:
    """Plain all-reduces of each tensor, and fp32 wires over all of them in buckets."""
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


def many_in_flight(name: str, sizes: list[int], seed: int) -> list[tuple[bytes, bytes]]:
    """Exchanges in flight at once, each rank with a rhythm and an order of its own.

    Returns:
        The sum of each, and the sum of the same addends one exchange at a time.
    """
    group, wire = join(), Wire.of(name)
    dice = random.Random(seed * 100 + group.rank)
    flying: list[tuple[Exchange, Tensor]] = []

    def fidget() -> None:
        for _ in range(dice.randrange(4)):
            if flying:
                dice.choice(flying)[0].advance()
            time.sleep(dice.choice([0.0, 0.0, 0.003]))

    for round, numel in enumerate(sizes):
        values = mine(numel, round, group)
        flying.append((wire.start(group, values), values))
        fidget()
        if round % 2:  # other collectives of the same group, in the order of the program
            assert group.all_gather(torch.tensor([group.rank])).numel() == group.size
        fidget()
    order = list(range(len(flying)))
    dice.shuffle(order)
    for place in order:
        exchange = flying[place][0]
        if dice.random() < 0.5:
            while not exchange.advance():
                assert not group.backlog or exchange.is_completed in (True, False)
        exchange.wait()
        assert exchange.is_completed and exchange.advance()
    assert not group.backlog
    pairs = []
    for round, (_, values) in enumerate(flying):
        alone = mine(sizes[round], round, group)
        wire.start(group, alone).wait()
        pairs.append((values.numpy().tobytes(), alone.numpy().tobytes()))
    return pairs


def lose_rank_1(name: str, when: str) -> tuple[str, float] | None:
    """Rank 1 falls silent or dies, before the exchange or between its phases.

    Returns:
        What the others were told, and after how many seconds.
    """
    group, wire = join(), Wire.of(name)
    group.timeout = timedelta(seconds=2)
    values = torch.ones(5000)
    wire.start(group, values.clone()).wait()
    if group.rank == 1:
        if when.endswith("between"):
            wire.start(group, values)
            time.sleep(0.5)  # phase (a) goes through, (b) never begins here
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


class _InOrder(Group):
    """A group that queues everything in order on one connection, as NCCL does."""

    @cached_property
    def runs_in_order(self) -> bool:
        return True


def phases_in_order(name: str, sizes: list[int]) -> list[tuple[bytes, bytes]]:
    """Exchanges on a group on which phases run in order, and on one on which they do not; on the
    former each is waited for only when the next has begun."""
    group, wire = join(), Wire.of(name)
    ordered = _InOrder(
        group.process_group, group.rank, group.size, CPU, group.timeout, "ordered group"
    )
    flying, values = [], []
    for numel in sizes:
        one, other = mine(numel, 0, group), mine(numel, 0, group)
        flying.append(wire.start(ordered, one))
        assert len(ordered.backlog) <= 1  # that of the exchange before has begun
        wire.start(group, other).wait()
        values.append((one, other))
    for exchange in flying:
        exchange.wait()
    assert not ordered.backlog
    pairs = [(one.numpy().tobytes(), other.numpy().tobytes()) for one, other in values]
    assert ordered.payload_bytes == group.payload_bytes
    return pairs


class _Noting:
    """A transport that notes how many rows come from, and go to, each rank."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[list[int], list[int]]] = []

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: Any
    ) -> Any:
        self.calls.append((received, sent))
        return self._inner.alltoall_base(output, rows, received, sent, options)


def ways_taken() -> tuple[int, list[Record]]:
    """This rank, and by phase the calls on each way in one exchange."""
    group = join()
    group.phases = tuple(Duplex(_Noting(ways.up), _Noting(ways.down)) for ways in group.phases)
    Wire.of("int8").start(group, torch.ones(1000)).wait()
    return group.rank, [{"up": ways.up.calls, "down": ways.down.calls} for ways in group.phases]


def no_phases() -> str:
    """An exchange in two phases on a group that was made without."""
    group = join()
    group.phases = ()
    try:
        Wire.of("int8").start(group, torch.ones(3))
    except AssertionError as error:
        return str(error)
    return ""
