"""Every strategy with every encoded wire dtype, against the oracle, which does not encode."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_edit.comm.wire import Wire
from megatron_edit.constants import SYNC_DTYPES
from tests.distributed.strategy_runs import Frame, Settings, run_both
from tests.distributed.test_rounds import SIZES, make_moves
from tests.distributed.test_strategies import replay
from tests.distributed.toy import shard_slices
from tests.harness import RankResult, run_ranks

STRATEGIES: dict[str, Settings] = {
    "local-sgd": {},
    "post-local-sgd": {},
    "slowmo": {},
    "diloco": {},
    "co2": {},
    "streaming-diloco": {"fragments": 2, "delay_steps": 1},
    "edit": {},
    "edit-late": {"strategy": "edit", "fragments": 2, "delay_steps": 2, "mix": 0.5},
}
# Allowed error of a parameter after three rounds, in which replicas move by up to about 1: the
# error of a code is at most 2^-9, 1/254 and 1/14 of the largest value of its block,
# and with few levels less than that value.
SLACK = {"bf16": 0.01, "int8": 0.02, "int4": 0.3, "int2": 1.0, "ternary": 1.0, "sign": 1.5}


def wires(*core: str) -> list[object]:
    """All encoded wire dtypes as parameters; those that are not named run in the full tier."""
    return [
        pytest.param(wire, marks=() if wire in core else pytest.mark.full)
        for wire in SYNC_DTYPES[1:]
    ]


def largest_error(results: list[RankResult], frames: list[Frame], ranks: int) -> float:
    """The largest error of the final parameters against the oracle."""
    return max(
        float(np.abs(r.value[-1]["theta"][n] - full[r.value[-1]["slices"][n]]).max(initial=0.0))
        for r in results
        for n, full in frames[-1].theta[r.rank // ranks].items()
    )


# In the core tier each strategy with int8, and each type with the strategy of all settings.
@pytest.mark.parametrize(
    ("name", "wire"),
    [
        pytest.param(
            name, wire, marks=() if wire == "int8" or name == "edit-late" else pytest.mark.full
        )
        for name in STRATEGIES
        for wire in SYNC_DTYPES[1:]
    ],
)
def test_encoded_wire_is_close_to_the_oracle(name: str, wire: str) -> None:
    """Digests are compared at every sync. Catches: a dtype that is not used, errors that add up
    over the rounds, replicas that decode differently, reported bytes that were not sent."""
    config: Settings = {
        "strategy": name, "sync_interval": 4, **STRATEGIES[name], "sync_dtype": wire,
    }  # fmt: skip
    world = (3, 1) if wire == "int8" else (2, 2)
    start, moves = make_moves(14, world[0], seed=len(name))
    results, simulation, frames = run_both(config, world, moves, start, [0.5] * 14, SLACK[wire])
    assert largest_error(results, frames, world[1]) > 1e-4  # the exchanges were encoded
    assert len(simulation.records) >= 3 * len(SIZES)
    assert_bytes(results, wire, world, is_late="delay_steps" in config or name == "co2")


@pytest.mark.parametrize("wire", wires("int8", "ternary"))
def test_aedit_is_close_to_the_oracle(wire: str) -> None:
    """Like the others, with replicas that make different numbers of steps."""
    config: Settings = {
        "strategy": "a-edit", "warmup_steps": 0, "sync_seconds": 6.0, "min_round_steps": 1,
        "num_replicas": 2, "sync_dtype": wire,
    }  # fmt: skip
    start, rows = make_moves(60, 2, seed=6)
    moves = [list(column) for column in zip(*rows, strict=True)]
    args = (config, SIZES, start, moves, (1.0, 3.0), 60)
    results = run_ranks("tests.distributed.strategy_runs:run_timed", 2, args, check=True)
    syncs = results[0].value[1]
    assert len(syncs) >= 3 and any(len(set(counts)) > 1 for _, counts in syncs)
    _, simulation = replay({}, moves, start, syncs)
    first, second = (result.value[0][-1] for result in results)
    for name in SIZES:
        np.testing.assert_array_equal(first["theta"][name], second["theta"][name])
        np.testing.assert_allclose(first["theta"][name], simulation.anchor[name], atol=SLACK[wire])
    assert any((first["theta"][n] != simulation.anchor[n].astype(np.float32)).any() for n in SIZES)


def test_sparse_loco_reports_the_bytes_that_it_sends() -> None:
    """Each of two ranks of three replicas sends its encoded shards to two others."""
    start, moves = make_moves(14, 3, seed=5)
    config: Settings = {"strategy": "sparse-loco", "sync_interval": 4}
    results, _, _ = run_both(config, (3, 2), moves, start, [0.5] * 14)
    assert_bytes(results, "top64", (3, 2), is_late=False)


def assert_bytes(
    results: list[RankResult], wire: str, world: tuple[int, int], *, is_late: bool
) -> None:
    """Assert that reported bytes are the payload of all units and the control records, and that the
    ranks of a replica sent these bytes and the digests. (A delayed sync is reported and counted
    after different steps: only the former is checked.)"""
    replicas, ranks = world
    numels = [
        piece.stop - piece.start for size in SIZES.values() for piece in shard_slices(size, ranks)
    ]
    payload = sum(Wire.of(wire).payload_bytes(numel, replicas) for numel in numels)
    assert payload < 0.75 * sum(Wire.of("fp32").payload_bytes(n, replicas) for n in numels)
    reported = results[0].value[-1]["reported"]
    control = reported[-1][0] - payload  # of the last sync, which is of all units
    assert 0 < control < 200 * (replicas - 1) * ranks
    if is_late:
        return
    first = next(i for i, state in enumerate(results[0].value) if state["reported"])
    mine = [result.value for result in results[:ranks]]  # the ranks of replica 0
    sent = sum(state[-1]["sent"] - state[first]["sent"] for state in mine)
    counted = sum(num_bytes for num_bytes, _ in reported[1:])
    digests = 8 * (replicas - 1) * ranks * sum(units for _, units in reported[1:])
    assert sent == counted + digests
