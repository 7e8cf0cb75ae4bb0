"""Wires over real gloo groups: equal bits on all ranks, the reference's sums, exact bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_edit.comm.wire import Wire
from megatron_edit.constants import WIRE_TYPES
from tests.distributed.wire_scenarios import addend, is_excluded
from tests.harness import RankResult, run_ranks
from tests.reference.wire import AllReduce, Residuals, chunk_slices

SCENARIOS = "tests.distributed.wire_scenarios:"
SIZES = [0, 1, 7, 130, 1000, 100_003]
CODED = list(WIRE_TYPES[1:])
NUM_ROUNDS = 3
# Largest error of a sum of three addends, as a multiple of the largest value of an addend.
BOUNDS = {
    "bf16": 0.02, "int8": 0.03, "int4": 0.5, "int2": 2.0, "ternary": 2.0, "sign": 2.5, "top64": 3.0,
}  # fmt: skip
WIDTHS = {
    "fp32": 4.0, "bf16": 2.0, "int8": 260 / 256, "int4": 66 / 128, "int2": 260 / 1024,
    "ternary": 0.2 + 2 / 256, "sign": 66 / 512,
}  # fmt: skip


def expected(name: str, numel: int, size: int, residuals: Residuals | None) -> list[Any]:
    """Sums of the reference in all rounds. Mutates `residuals`."""
    return [
        AllReduce(
            [addend(numel, replica, round) for replica in range(size)],
            {replica for replica in range(size) if is_excluded(replica, round, size)},
        ).sum(name, residuals)
        for round in range(NUM_ROUNDS)
    ]


def assert_same_bits(results: list[RankResult], key: tuple[str, int]) -> list[Any]:
    """Assert that all ranks have bitwise equal sums; returns them."""
    sums = [result.value[key]["sums"] for result in results]
    for others in sums[1:]:
        assert [s.tobytes() for s in others] == [s.tobytes() for s in sums[0]], key
    return list(sums[0])


@pytest.mark.parametrize("has_residual", [True, False], ids=["feedback", "plain"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_equal_the_reference(size: int, has_residual: bool) -> None:
    """Catches: sums in order of arrival, a chunk off by one, a residual of a left-out replica."""
    args = (list(WIRE_TYPES), SIZES, NUM_ROUNDS, has_residual)
    results = run_ranks(SCENARIOS + "sum_rounds", size, args, check=True)
    for numel in SIZES:
        for name in WIRE_TYPES:
            sums = assert_same_bits(results, (name, numel))
            for result in results:
                ((sent, announced),) = result.value[name, numel]["sent"]
                assert sent == announced, (name, numel)
            if name == "fp32":
                exact = expected(name, numel, size, None) if size <= 2 else None
                assert exact is None or all(map(np.array_equal, sums, exact))
                continue
            residuals = Residuals.zeros(size, numel) if has_residual else None
            for ours, theirs in zip(sums, expected(name, numel, size, residuals), strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} {numel}")
            if residuals is not None:
                assert_residuals(results, name, numel, residuals)


def assert_residuals(
    results: list[RankResult], name: str, numel: int, residuals: Residuals
) -> None:
    """Assert each rank's residuals: of its addends, and of the sum of the chunk that it owns."""
    chunks = chunk_slices(numel, len(results), name)
    for result, sent, chunk in zip(results, residuals.sent, chunks, strict=True):
        ours_sent, ours_summed = result.value[name, numel]["residual"]
        np.testing.assert_array_equal(ours_sent, sent)
        owned = chunk.stop - chunk.start
        np.testing.assert_array_equal(ours_summed[:owned], residuals.summed[chunk])
        assert not ours_summed[owned:].any()


def test_reference_is_close_to_the_exact_sum() -> None:
    """Within the rounding of each addend, so that wire and reference do not share an error."""
    assert {"fp32", *BOUNDS} == set(WIRE_TYPES)
    for name, bound in BOUNDS.items():
        exact = sum(addend(1000, replica, 0).astype(np.float64) for replica in range(3))
        ours = expected(name, 1000, 3, None)[0]
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


@pytest.mark.parametrize("name", WIRE_TYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_many_exchanges_in_flight_at_once(name: str, size: int) -> None:
    """Catches: phases that start in different orders on different ranks (a hang, or mixed sums)."""
    for seed in range(2):
        args = (name, [5000, 1, 70_000, 300, 20_000, 64, 9000], seed)
        for result in run_ranks(
            SCENARIOS + "start_many_exchanges", size, args, timeout=60, check=True
        ):
            assert all(together == alone for together, alone in result.value)


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
