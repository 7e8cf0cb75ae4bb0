"""Moments in the exchange of a unit, over real process groups, against NumPy, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from tests.distributed.test_rounds import SIZES, Moves, make_moves
from tests.distributed.toy import cut
from tests.harness import RankResult, run_ranks
from tests.reference.wire import Round

SCENARIO = "tests.distributed.moment_scenarios:run_moments"
KINDS = {FIRST_MOMENT: "log8", SECOND_MOMENT: "ulog8"}
BOTH = {"average_moments": "both", "no_anomaly": True}


def make_moments(num_steps: int, num_replicas: int, seed: int) -> list[list[dict[str, Any]]]:
    """What each step adds: first moments of any sign, second ones over many decades."""
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
    """On world[0] replicas of world[1] ranks."""
    everything = {"num_replicas": world[0], **settings}
    return run_ranks(
        SCENARIO, world[0] * world[1], (everything, SIZES, start, moves, moments), check=True
    )


def mean(values: list[Any], accepted: list[bool], ranks: int, kind: str) -> Any:
    """Of a moment of a unit: each rank's cut travels by itself, in its codes."""
    share, out = np.float32(1.0 / sum(accepted)), np.zeros_like(values[0])
    left_out = {replica for replica, is_in in enumerate(accepted) if not is_in}
    for where in cut(len(out), ranks):
        addends = [value[where] * share for value in values]
        if len(addends[0]):
            out[where] = Round(addends, left_out).sum(KINDS[kind], None)
    return out


def assert_moments(
    results: list[RankResult],
    step: int,
    expected: list[dict[str, dict[str, Any]]],
    ranks: int,
) -> None:
    """What each rank holds after a step, counted from 0, is its cut of `expected[replica]`."""
    for result in results:
        held = result.value[step]
        for kind in KINDS:
            for name, whole in expected[result.rank // ranks][kind].items():
                np.testing.assert_array_equal(held[kind][name], whole[held["slices"][name]])


def course(
    moments: Any, syncs: dict[int, list[bool]], num_replicas: int, ranks: int, delay: int = 0
) -> list[list[dict[str, dict[str, Any]]]]:
    """Moments of all replicas after each step.

    Args:
        moments: what each step adds.
        syncs: who is accepted, by step from 1.
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
def test_means_equal_the_formula(world: tuple[int, int], wire: str) -> None:
    """Bit for bit on all replicas, whatever the parameters travel as, and every second sync. Bytes
    are those that were sent. Catches weights of the parameters in the mean, and K off by one."""
    replicas, ranks = world
    start, moves = make_moves(6, replicas, seed=3)
    moments = make_moments(6, replicas, seed=4)
    settings = {**BOTH, "average_moments_every": 2, "sync_interval": 1, "sync_dtype": wire}
    results = run(settings, world, start, moves, moments)
    everybody = [True] * replicas
    frames = course(moments, {step: everybody for step in (2, 4, 6)}, replicas, ranks)
    for step, expected in enumerate(frames):
        assert_moments(results, step, expected, ranks)
    mine = [result.value for result in results[:ranks]]
    reported = mine[0][-1]["reported"]
    assert reported[1] > reported[0] == reported[2]
    digests = 8 * (replicas - 1) * ranks * len(SIZES)
    sent = sum(held[-1]["sent"] - held[0]["sent"] for held in mine)
    assert sent == sum(reported[1:]) + digests * len(reported[1:])


def test_parameters_do_not_depend_on_moments() -> None:
    """In the same exchange: catches sums that are mixed up, or rounded by the moments' codes."""
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


def test_one_that_is_left_out_takes_the_others() -> None:
    """Its parameters and moments are not finite: it comes back with the mean of the others. Where
    all are left out of a unit, each keeps its own moments of it."""
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
        frames = course(moments, syncs, 3, 1)
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


def test_a_delayed_mean_replaces_what_was_trained_since() -> None:
    """Sampled when the sync begins, landed with it."""
    start, moves = make_moves(8, 2, seed=9)
    moments = make_moments(8, 2, seed=10)
    settings = {**BOTH, "sync_interval": 4, "delay_steps": 2}
    results = run(settings, (2, 2), start, moves, moments)
    frames = course(moments, {4: [True, True]}, 2, 2, delay=2)
    for step, expected in enumerate(frames[:-1]):  # the last sync lands at once
        assert_moments(results, step, expected, 2)


def test_one_replica_keeps_its_own_moments() -> None:
    """N = 1: not even a code rounds them."""
    start, moves = make_moves(2, 1, seed=11)
    moments = make_moments(2, 1, seed=12)
    results = run({**BOTH, "sync_interval": 1}, (1, 1), start, moves, moments)
    for step, expected in enumerate(course(moments, {}, 1, 1)):
        assert_moments(results, step, expected, 1)
