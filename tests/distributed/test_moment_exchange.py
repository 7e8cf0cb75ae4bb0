"""Moments in the exchange of a unit over real process groups, bitwise equal to NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from tests.distributed.test_rounds import SIZES, Moves, make_moves
from tests.distributed.toy import build_engine, shard_slices, with_outer
from tests.harness import RankResult, run_ranks
from tests.reference.wire import AllReduce

SCENARIO = "tests.distributed.test_moment_exchange:run_moments"
KINDS = {FIRST_MOMENT: "log8", SECOND_MOMENT: "ulog8"}
BOTH = {"average_moments": "both", "no_anomaly": True}


def make_moments(num_steps: int, num_replicas: int, seed: int) -> list[list[dict[str, Any]]]:
    """Increments of each step: first moments of both signs, second moments of many magnitudes."""
    rng = np.random.default_rng(seed)

    def draw(size: int, kind: str) -> Any:
        values = rng.standard_normal(size) * 10.0 ** rng.uniform(-4, 0, size)
        return (values if kind == FIRST_MOMENT else values**2).astype(np.float32)

    return [
        [
            {kind: {name: draw(size, kind) for name, size in SIZES.items()} for kind in KINDS}
            for _ in range(num_replicas)
        ]
        for _ in range(num_steps)
    ]


def run(
    settings: dict[str, Any], world: tuple[int, int], start: Any, moves: Moves, moments: Any
) -> list[RankResult]:
    """Run the scenario on world[0] replicas of world[1] ranks."""
    all_settings = {"num_replicas": world[0], **settings}
    return run_ranks(
        SCENARIO, world[0] * world[1], (all_settings, SIZES, start, moves, moments), check=True
    )


def mean(values: list[Any], accepted: list[bool], ranks: int, kind: str) -> Any:
    """The mean of a moment of a unit; each rank's slice is encoded and exchanged separately."""
    share, out = np.float32(1.0 / sum(accepted)), np.zeros_like(values[0])
    left_out = {replica for replica, is_in in enumerate(accepted) if not is_in}
    for where in shard_slices(len(out), ranks):
        addends = [value[where] * share for value in values]
        if len(addends[0]):
            out[where] = AllReduce(addends, left_out).sum(KINDS[kind], None)
    return out


def assert_moments(
    results: list[RankResult],
    step: int,
    expected: list[dict[str, dict[str, Any]]],
    ranks: int,
) -> None:
    """Assert that each rank has its slice of `expected[replica]` after `step`, from 0."""
    for result in results:
        state = result.value[step]
        for kind in KINDS:
            for name, full in expected[result.rank // ranks][kind].items():
                np.testing.assert_array_equal(state[kind][name], full[state["slices"][name]])


def expected_moments(
    moments: Any, syncs: dict[int, list[bool]], num_replicas: int, ranks: int, delay: int = 0
) -> list[list[dict[str, dict[str, Any]]]]:
    """Moments of all replicas after each step.

    Args:
        moments: increments of each step.
        syncs: the accepted replicas, by step from 1.
        num_replicas: N.
        ranks: of a replica.
        delay: steps between a sample of the moments and the landing of its mean.
    """
    now = [
        {kind: {name: np.zeros(size, np.float32) for name, size in SIZES.items()} for kind in KINDS}
        for _ in range(num_replicas)
    ]
    landing: dict[int, Any] = {}
    frames = []
    for step, row in enumerate(moments, start=1):
        now = [
            {kind: {n: one[kind][n] + more[kind][n] for n in SIZES} for kind in KINDS}
            for one, more in zip(now, row, strict=True)
        ]
        if step in landing:
            now = [landing.pop(step)] * num_replicas
        if step in syncs:
            landing[step + delay] = {
                kind: {
                    n: mean([one[kind][n] for one in now], syncs[step], ranks, kind) for n in SIZES
                }
                for kind in KINDS
            }
        if step in landing:
            now = [landing.pop(step)] * num_replicas
        frames.append(now)
    return frames


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("world", [(2, 1), (3, 2)])
def test_exchanged_moments_equal_the_reference(world: tuple[int, int], wire: str) -> None:
    """Bitwise, for each dtype of the parameters, at every second sync; reported bytes equal those
    sent. Catches weights of the parameters in averages of moments, and K off by one."""
    replicas, ranks = world
    start, moves = make_moves(6, replicas, seed=3)
    moments = make_moments(6, replicas, seed=4)
    settings = {**BOTH, "average_moments_every": 2, "sync_interval": 1, "sync_dtype": wire}
    results = run(settings, world, start, moves, moments)
    all_accepted = [True] * replicas
    frames = expected_moments(moments, {step: all_accepted for step in (2, 4, 6)}, replicas, ranks)
    for step, expected in enumerate(frames):
        assert_moments(results, step, expected, ranks)
    mine = [result.value for result in results[:ranks]]
    reported = mine[0][-1]["reported"]
    assert reported[1] > reported[0] == reported[2]
    digests = 8 * (replicas - 1) * ranks * len(SIZES)
    sent = sum(state[-1]["sent"] - state[0]["sent"] for state in mine)
    assert sent == sum(reported[1:]) + digests * len(reported[1:])


def test_parameters_do_not_depend_on_exchanged_moments() -> None:
    """Both are in one exchange. Catches swapped sums, and sums rounded by the codec of moments."""
    start, moves = make_moves(4, 2, seed=5)
    moments = make_moments(4, 2, seed=6)
    with_them = run({**BOTH, "sync_interval": 1}, (2, 2), start, moves, moments)
    without = run({"no_anomaly": True, "sync_interval": 1}, (2, 2), start, moves, moments)
    for one, other in zip(with_them, without, strict=True):
        for name in SIZES:
            np.testing.assert_array_equal(
                one.value[-1]["theta"][name], other.value[-1]["theta"][name]
            )
        assert one.value[-1]["is_local"] == [True]


def test_rejected_replica_takes_moments_of_the_others() -> None:
    """A replica with non-finite values takes the mean of the others. Where all replicas are
    rejected for a unit, each keeps its own moments."""
    start, moves = make_moves(3, 3, seed=7)
    moments = make_moments(3, 3, seed=8)
    for name in SIZES:
        moves[1][2][name][:] = np.nan
        moments[1][2][FIRST_MOMENT][name][:] = np.inf
    for replica in range(3):
        moves[2][replica]["layer.1"][0] = np.nan
    results = run({**BOTH, "sync_interval": 1}, (3, 1), start, moves, moments)
    syncs = {1: [True] * 3, 2: [True, True, False], 3: [True] * 3}
    with np.errstate(invalid="ignore"):
        frames = expected_moments(moments, syncs, 3, 1)
    for kind in KINDS:
        before = [one[kind]["layer.1"] for one in frames[1]]
        for replica in range(3):
            own = before[replica] + moments[2][replica][kind]["layer.1"]
            frames[2][replica] = {
                **frames[2][replica],
                kind: {**frames[2][replica][kind], "layer.1": own},
            }
    for step, expected in enumerate(frames):
        assert_moments(results, step, expected, 1)


def test_delayed_moments_replace_later_ones() -> None:
    """The mean is of the moments at the start of the sync, and lands with it."""
    start, moves = make_moves(8, 2, seed=9)
    moments = make_moments(8, 2, seed=10)
    settings = {**BOTH, "sync_interval": 4, "delay_steps": 2}
    results = run(settings, (2, 2), start, moves, moments)
    frames = expected_moments(moments, {4: [True, True]}, 2, 2, delay=2)
    for step, expected in enumerate(frames[:-1]):  # the last sync lands at once
        assert_moments(results, step, expected, 2)


def test_one_replica_keeps_its_own_moments() -> None:
    """With N = 1 they are not even rounded by the codec."""
    start, moves = make_moves(2, 1, seed=11)
    moments = make_moments(2, 1, seed=12)
    results = run({**BOTH, "sync_interval": 1}, (1, 1), start, moves, moments)
    for step, expected in enumerate(expected_moments(moments, {}, 1, 1)):
        assert_moments(results, step, expected, 1)


# ---- Functions that the ranks of the moment tests run: a toy host with moments, step by step


Values = dict[str, Any]  # by unit


def run_moments(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: Values,
    moves: list[list[Values]],
    moments: list[list[dict[str, Values]]],
) -> list[dict[str, Any]]:
    """Move by `moves[step][replica]` and add `moments[step][replica]` to the moments; then sync.

    Returns:
        One record per step: this rank's slices of moments and parameters after it, by unit, the
        bytes sent and reported, and the calls of `set_local_training`.
    """
    config = EditConfig(use_edit=True, digest_interval=1, warmup_steps=0, **with_outer(settings))
    engine, host, reporter = build_engine(config, sizes, start)
    engine.start()
    replica, records = engine.groups.sync.rank, []
    host.moments = {kind: {n: values * 0 for n, values in host.full.items()} for kind in KINDS}
    for step, (move, change) in enumerate(zip(moves, moments, strict=True), start=1):
        host.is_last = step == len(moves)
        engine.before_step()
        host.move(move[replica])
        kept = dict(host.moments)
        for kind in KINDS:
            host.set_moments(kind, change[replica][kind])
            for name, values in host.moments[kind].items():
                values += kept[kind][name]
        engine.after_step()
        sync = engine.groups.sync
        records.append(
            {
                "slices": host.slices,
                "theta": {n: values.numpy().copy() for n, values in host.full.items()},
                **{
                    kind: {n: each.numpy().copy() for n, each in host.moments[kind].items()}
                    for kind in KINDS
                },
                "sent": sync.payload_bytes + engine.groups.meeting.payload_bytes,
                "reported": [report.wire_bytes for report in reporter.syncs],
                "is_local": list(host.is_local),
            }
        )
    return records
