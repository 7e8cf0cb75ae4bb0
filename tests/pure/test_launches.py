"""Number of launches for a unit that lands in the forward pass, for any number of ranks; and of an
encoded exchange, for any number of replicas."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Addend
from megatron_edit.comm.wire import Wire, start_exchange
from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32, WIRE_TYPES
from megatron_edit.method import codec as codecs
from megatron_edit.method.codec import LOG8, ULOG8, Codec
from megatron_edit.method.norms import sum_in_rank_order
from tests.harness.hardware_queues import Recorder
from tests.harness.traced_streams import CPU, TIMEOUT, InOrderGroup, Rank, plan_of

UNITS = {"embedding": (8, 2), "layer.1": (8,), "layer.2": (8,), "layer.3": (8,)}
EVEN, UNEVEN = 1 << 19, (1 << 19) - 1  # elements; with the latter the last chunk is short
# Of an exchange of one unit, by wire type, whose last chunk is as long as the others.
LAUNCHES = {
    "bf16": 15, "int8": 41, "int4": 55, "int2": 147, "ternary": 205, "sign": 107, "top64": 133,
    "log8": 65, "ulog8": 63,
}  # fmt: skip
ENCODED = [*(Wire.of(name).codec for name in WIRE_TYPES if name != FP32), LOG8, ULOG8]
DECISION_OPERATIONS = ("aten::_local_scalar_dense", "aten::bitwise_or")


def launches(num_ranks: int) -> int:
    """Count kernels and collectives from the landing of one unit to the landing of the next.

    Operations on the decision of the round, which is in host memory, are not counted.
    """
    with torch.no_grad(), Recorder(lambda name, nbytes: 0.0, 1.0) as recorder:
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
            recorder.commands.clear()
            engine.land_up_to(3)
        finally:
            engine.close()
    return sum(
        command.kind in ("kernel", "collective") and command.operation not in DECISION_OPERATIONS
        for command in recorder.commands
    )


def test_launches_do_not_grow_with_ranks() -> None:
    """Would catch shards that are gathered, copied and added one by one, and any additional launch
    per unit."""
    counts = {num_ranks: launches(num_ranks) for num_ranks in (2, 8, 64)}
    assert counts == {2: 29, 8: 29, 64: 29}


def exchange_launches(codec: Codec, numel: int, size: int, *, rank: int, has_rest: bool) -> int:
    """Count kernels and collectives from the beginning of an exchange to the decoded sum."""
    with torch.no_grad(), Recorder(lambda name, nbytes: 0.0, 1.0) as recorder:
        streams = recorder.streams
        group = Group(
            InOrderGroup(streams, "sync", rank, size), rank, size, CPU, TIMEOUT, "sync",
            make_streams=lambda device: streams,
        )  # fmt: skip
        rest = Wire(codec.name, codec).new_residual(numel, size, CPU) if has_rest else None
        addend = Addend(torch.ones(numel), rest, False, codec)
        recorder.commands.clear()
        start_exchange(group, [addend]).wait()
    return sum(command.kind in ("kernel", "collective") for command in recorder.commands)


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
