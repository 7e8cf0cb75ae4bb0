"""The engine over real process groups against the NumPy oracle: rounds, odd sizes, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import RankResult, run_ranks
from tests.reference.oracle import EditOracle, OracleSettings

SIZES = {"embedding": 130, "layer.1": 33, "layer.2": 7, "final": 1}
SCENARIO = "tests.distributed.scenarios:run_rounds"
_ORACLE_NAMES = {
    "anomaly_warmup_syncs": "warmup_syncs",
    "anomaly_threshold": "threshold",
    "clip": "max_norm",
    "weight_temperature": "temperature",
}
_WITHOUT: dict[str, dict[str, Any]] = {
    "no_anomaly": {"anomaly_elimination": False},
    "no_weighting": {"weighting": False},
    "no_clip": {"max_norm": None},
}
Moves = list[list[dict[str, Any]]]


def make_moves(num_rounds: int, num_replicas: int, seed: int) -> tuple[dict[str, Any], Moves]:
    """Start values and displacements, exact in fp32 so that engine and oracle start equal."""
    rng = np.random.default_rng(seed)

    def draw(size: int, scale: float) -> Any:
        return (rng.standard_normal(size) * scale).astype(np.float32)

    start = {name: draw(size, 1.0) for name, size in SIZES.items()}
    moves = [
        [{name: draw(size, 0.1) for name, size in SIZES.items()} for _ in range(num_replicas)]
        for _ in range(num_rounds)
    ]
    return start, moves


def run_both(
    num_replicas: int, ranks: int, moves: Moves, start: dict[str, Any], **settings: Any
) -> tuple[list[RankResult], EditOracle, list[Any], list[Any]]:
    """Run the engine on num_replicas x ranks processes, and the oracle."""
    results = run_ranks(
        SCENARIO,
        num_replicas * ranks,
        ({"num_replicas": num_replicas, **settings}, SIZES, start, moves),
        check=True,
    )
    expected: dict[str, Any] = {}
    for name, value in settings.items():
        expected |= _WITHOUT.get(name, {_ORACLE_NAMES.get(name, name): value})
    oracle = EditOracle.start(num_replicas, list(start.values()), OracleSettings(**expected))
    records, anchors = [], []
    for round_ in moves:
        for replica, move in enumerate(round_):
            for unit, name in enumerate(SIZES):
                oracle.theta[replica][unit] += move[name]
        records.append(oracle.sync())
        anchors.append(([a.copy() for a in oracle.anchor], [b.copy() for b in oracle.momentum]))
    return results, oracle, records, anchors


def assert_equal_to_oracle(
    results: list[RankResult], records: list[Any], anchors: list[Any]
) -> None:
    """Assert that every rank has the oracle's decisions and its slice of the oracle's state."""
    for result in results:
        for ours, expected, (anchor, momentum) in zip(result.value, records, anchors, strict=True):
            np.testing.assert_array_equal(ours["anomalous"], expected.anomalous)
            np.testing.assert_array_equal(ours["rollback"], expected.rollback)
            np.testing.assert_allclose(ours["norms"], expected.norms, rtol=1e-5)
            np.testing.assert_allclose(ours["weights"], expected.weights, rtol=1e-5)
            np.testing.assert_allclose(ours["clip"], expected.clip, rtol=1e-5)
            # An average may nearly cancel; its error in fp32 then has the size of its addends.
            atol = 1e-6 * np.nanmax(np.where(np.isfinite(ours["norms"]), ours["norms"], 0.0))
            np.testing.assert_allclose(
                ours["update_norm"], expected.update_norm, rtol=1e-5, atol=atol
            )
            for unit, name in enumerate(SIZES):
                piece = ours["slices"][name]
                for key, full in (("anchor", anchor), ("momentum", momentum), ("theta", anchor)):
                    np.testing.assert_allclose(
                        ours[key][name], full[unit][piece], rtol=1e-5, atol=1e-6, err_msg=key
                    )


@pytest.mark.parametrize(("num_replicas", "ranks"), [(2, 1), (3, 1), (2, 2), (1, 2)])
def test_three_rounds_equal_the_oracle(num_replicas: int, ranks: int) -> None:
    """Catches: norms or clip of one rank's shard, wrong weights, a wrong outer step."""
    start, moves = make_moves(3, num_replicas, seed=num_replicas)
    results, _, records, anchors = run_both(num_replicas, ranks, moves, start, clip=0.5)
    assert_equal_to_oracle(results, records, anchors)
    assert min(r.clip.min() for r in records) < 1.0  # some unit was clipped
    digests = {tuple(record["digest"] for record in result.value) for result in results}
    assert len(digests) == 1  # replicas are equal after every sync


@pytest.mark.parametrize("what", [100.0, np.nan, np.inf], ids=["x100", "nan", "inf"])
def test_anomalous_replica_is_left_out_and_recovers(what: float) -> None:
    """Catches: NaN that spreads, an excluded replica that still shrinks the mean, lock-out."""
    start, moves = make_moves(8, 3, seed=7)
    bad_move = moves[5][1]
    if np.isfinite(what):
        bad_move["layer.1"] = bad_move["layer.1"] * np.float32(what)
    else:
        bad_move["layer.1"][3] = what
    # a threshold above the noise of so small units
    results, _, records, anchors = run_both(
        3, 1, moves, start, anomaly_warmup_syncs=3, anomaly_threshold=12.0
    )
    left_out = [record.anomalous[:, 1].tolist() for record in records]
    assert left_out == [[False] * 3] * 5 + [[False, True, False]] + [[False] * 3] * 2
    # theta <- A overwrites an infinite theta, so the bad replica equals the oracle, too
    assert_equal_to_oracle(results, records, anchors)


@pytest.mark.parametrize("what", [100.0, np.nan], ids=["x100", "nan"])
@pytest.mark.parametrize(
    "settings",
    [
        {"no_anomaly": True, "clip": 0.5}, {"no_weighting": True, "clip": 0.5}, {"no_clip": True},
        {"weight_temperature": 1.0, "clip": 0.5},
        {"no_anomaly": True, "no_weighting": True, "no_clip": True},
    ],
    ids=lambda settings: "-".join(settings),
)  # fmt: skip
def test_parts_of_the_penalty_are_optional(settings: dict[str, Any], what: float) -> None:
    """Of three replicas one moves much farther in a round, or to NaN, which is never averaged.
    Catches a part that acts although it is switched off, and parts that do not agree together."""
    start, moves = make_moves(5, 3, seed=13)
    if "no_anomaly" in settings:
        what = (
            what if np.isnan(what) else 3.0
        )  # an accepted norm of x100 would leave no weight to compare
    for name in SIZES:
        moves[4][1][name] = moves[4][1][name] * np.float32(what)
    results, _, records, anchors = run_both(
        3, 1, moves, start, anomaly_warmup_syncs=3, anomaly_threshold=12.0, **settings
    )
    has_rejection = bool(np.isnan(what)) or "no_anomaly" not in settings
    assert records[4].anomalous[1, :3].tolist() == [has_rejection] * 3
    assert_equal_to_oracle(results, records, anchors)


def test_unit_anomalous_on_all_replicas_is_rolled_back() -> None:
    """Catches: an outer step without an average, momentum that decays or takes in NaN."""
    start, moves = make_moves(3, 2, seed=3)
    for replica in range(2):
        moves[1][replica]["final"][0] = np.nan
    results, _, records, anchors = run_both(2, 1, moves, start)
    assert records[1].rollback.tolist() == [False, False, False, True]
    for result in results:
        before, after = result.value[0], result.value[1]
        np.testing.assert_array_equal(before["momentum"]["final"], after["momentum"]["final"])
        np.testing.assert_array_equal(before["anchor"]["final"], after["anchor"]["final"])
        np.testing.assert_array_equal(after["theta"]["final"], after["anchor"]["final"])
    assert_equal_to_oracle(results, records, anchors)


def test_reported_bytes_equal_sent_bytes() -> None:
    """The group's counter equals the bytes in the report, and no gather sends a full unit."""
    start, moves = make_moves(2, 2, seed=5)
    results, _, _, _ = run_both(2, 2, moves, start)
    last = [result.value[-1] for result in results]
    first = [result.value[0] for result in results]
    # Ranks 0 and 1 are replica 0. Digest tables (8 bytes per unit) are control traffic in addition.
    sent = sum(a["bytes"] - b["bytes"] for a, b in zip(last[:2], first[:2], strict=True))
    digest_bytes = 2 * 8 * len(SIZES)
    assert sent - digest_bytes == last[0]["wire_bytes"]
    assert last[0]["wire_bytes"] >= 4 * sum(SIZES.values())


@pytest.mark.parametrize(("num_replicas", "ranks"), [(3, 1), (2, 2)])
@pytest.mark.parametrize(
    "settings", [{}, {"sync_dtype": "bf16"}, {"sync_dtype": "int8"}, {"offload": True}]
)
def test_check_before_commit_changes_no_result(
    num_replicas: int, ranks: int, settings: dict[str, Any]
) -> None:
    """Every bit of the rounds is the same; a rejected replica and a roll-back are among them."""
    start, moves = make_moves(4, num_replicas, seed=11)
    moves[2][1]["layer.1"][:] = np.nan
    for replica in range(num_replicas):
        moves[3][replica]["layer.2"][:] = np.inf
    found = []
    for checks in (False, True):
        given = {"num_replicas": num_replicas, "check_commits": checks, **settings}
        results = run_ranks(
            SCENARIO, num_replicas * ranks, (given, SIZES, start, moves), check=True
        )
        found.append([result.value for result in results])
    for plain, checked in zip(*found, strict=True):
        for before, after in zip(plain, checked, strict=True):
            for key in ("weights", "clip", "digest", "theta", "anchor", "momentum"):
                np.testing.assert_equal(after[key], before[key])


@pytest.mark.parametrize(("ranks", "fragments"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("what", "place"), [("momentum", "in unit layer.2"), ("plan", "in their plans of the round")]
)
def test_difference_is_found_before_anything_changes(
    ranks: int, fragments: int, what: str, place: str
) -> None:
    """All ranks of all replicas end with the same error, and hold the state before the round."""
    scenario = "tests.distributed.scenarios:differ_before_commit"
    for result in run_ranks(scenario, 2 * ranks, (what, fragments), check=True):
        assert result.value["message"] == f"the replicas differ before round 2 was applied {place}"
        assert result.value["is_unchanged"]


def test_replicas_start_from_replica_0() -> None:
    """Catches: starts that are only compared, or broadcast over the wrong group."""
    results = run_ranks("tests.distributed.scenarios:start_from_different_values", 4, check=True)
    values = [result.value for result in results]
    # ranks 0, 1 are replica 0, with slices of 0.0 and 1.0; ranks 2, 3 take these values
    assert values == [[0.0] * 3, [1.0] * 2, [0.0] * 3, [1.0] * 2]


def test_rounding_differences_are_removed_at_the_switch() -> None:
    """Hardware may round differently: replica 0's parameters are broadcast, and that is logged."""
    scenario = "tests.distributed.scenarios:switch_with_rounding_difference"
    results = run_ranks(scenario, 2, check=True)
    for result in results:
        messages, theta = result.value
        assert theta == [1.0, 2.0, 3.0]
        assert any("rounded differently" in text for text in messages)


def test_learning_rate_schedules_are_aligned_at_a_sync() -> None:
    """A replica that skipped steps (fp16) must not keep another learning rate."""
    results = run_ranks("tests.distributed.scenarios:sync_with_schedule_lag", 2, (8,), check=True)
    assert [result.value for result in results] == [100, 100]


def test_replica_missing_at_a_sync_is_named() -> None:
    """A hang of one replica is an error with its number and the round."""
    results = run_ranks("tests.distributed.scenarios:miss_a_sync", 2, timeout=60, grace=1)
    assert results[0].returncode == 1
    assert "replica 1 did not reach the sync of round 1" in results[0].stderr
