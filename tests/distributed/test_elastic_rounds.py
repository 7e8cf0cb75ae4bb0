"""Elastic rounds over real process groups against the NumPy oracle, with a scripted membership."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed.elastic_scenarios import Exchange, Script
from tests.distributed.test_rounds import SIZES, make_moves
from tests.harness import RankResult, run_ranks
from tests.reference.elastic_rounds import ElasticCommit, ElasticRounds, ElasticSettings
from tests.reference.oracle import OracleSettings
from tests.reference.outer_rules import settings_for

SCENARIO = "tests.distributed.elastic_scenarios:run_script"
NAMES = ("B", "a", "b-2", "node9")  # sorted by code point
TAU = 2
PENALTY = OracleSettings(threshold=12.0, alpha=0.3, warmup_syncs=2, max_norm=0.5)
SETTINGS = {
    "sync_interval": TAU, "clip": 0.5, "anomaly_threshold": 12.0, "anomaly_alpha": 0.3,
    "anomaly_warmup_syncs": 2,
}  # fmt: skip
Moves = list[dict[str, list[dict[str, Any]]]]


def draw_moves(rounds: int, seed: int) -> tuple[dict[str, Any], Moves]:
    """Start values, and a displacement for each round, name and step."""
    start, rows = make_moves(rounds, len(NAMES) * TAU, seed)
    moves = [
        {name: row[place * TAU : (place + 1) * TAU] for place, name in enumerate(NAMES)}
        for row in rows
    ]
    return start, moves


def expect(
    script: Script, start: dict[str, Any], moves: Moves, target: int, **phases: Any
) -> list[ElasticCommit]:
    """Play the script in the oracle.

    Args:
        phases: `warmup` and `local` of `ElasticSettings`.
    """
    strategy = settings_for("edit", tau=TAU, penalty=PENALTY, dtype=np.float32)
    settings = ElasticSettings(strategy, target, **phases)
    oracle = ElasticRounds(settings, start, script.founders)
    commits = []
    for number, tries in enumerate(script.rounds):
        joined = {name for each in tries for name in each.joined}
        steps: dict[str, int] = {}
        gradients: dict[str, dict[str, Any]] = {}
        for name in tries[-1].members:
            steps[name] = 0 if name in joined else oracle.most_steps(name)
            gradients[name] = {}
            for unit, anchor in oracle.anchor.items():
                theta = np.array(anchor, dtype=np.float32)
                for move in moves[number][name][: steps[name]]:
                    theta += move[unit]
                gradients[name][unit] = anchor - theta
        commits.append(oracle.commit(tries[-1].members, steps, gradients, {}))
    return commits


def assert_equal_to_oracle(
    results: list[RankResult], expected: list[ElasticCommit], slack: float = 1e-6
) -> None:
    """Compare all that each replica has applied, and that all members of a round have the same.

    Args:
        slack: allowed error of a parameter, besides a relative one.
    """
    bits: list[set[bytes]] = [set() for _ in expected]
    applied: list[set[str]] = [set() for _ in expected]
    for result, name in zip(results, NAMES, strict=True):
        for ours in result.value:
            commit = expected[ours["round"]]
            applied[ours["round"]].add(name)
            assert ours["members"] == commit.members
            assert ours["inner_steps"] == tuple(len(commit.blocks[n]) for n in commit.members)
            assert ours["blocks"] == commit.blocks[name]
            is_over = not any(commit.assignment.values())
            assert ours["samples"] == commit.samples and ours["told"] == (commit.samples, is_over)
            for u, unit in enumerate(SIZES):
                want = [commit.weights[unit][n] for n in commit.members]
                np.testing.assert_allclose(
                    ours["weights"][:, u], want, rtol=max(1e-5, slack), err_msg=unit
                )
                left_out = [n in commit.left_out[unit] for n in commit.members]
                assert ours["anomalous"][:, u].tolist() == left_out
                for key, full in (
                    ("anchor", commit.anchor),
                    ("momentum", commit.momentum),
                    ("theta", commit.anchor),
                ):
                    np.testing.assert_allclose(
                        ours[key][unit], full[unit], rtol=1e-5, atol=slack,
                        err_msg=f"{key} of {unit} after round {ours['round']}",
                    )  # fmt: skip
            bits[ours["round"]].add(
                b"".join(ours[k][u].tobytes() for k in ("anchor", "momentum") for u in SIZES)
            )
    assert applied == [set(commit.members) for commit in expected]
    assert all(len(each) == 1 for each in bits)


def run_both(
    script: Script, target: int, seed: int, wire: str = "fp32", slack: float = 1e-6
) -> list[ElasticCommit]:
    """Run a script with real replicas and in the oracle, and compare them."""
    start, moves = draw_moves(len(script.rounds), seed)
    moves[5]["b-2"][0]["layer.1"][3] = np.nan
    expected = expect(script, start, moves, target)
    closeness = min(r.closeness for commit in expected for r in commit.records.values())
    assert closeness > 1e-3, "rounding decides; change the seed"
    assert_equal_to_oracle(play(script, start, moves, target, wire), expected, slack)
    return expected


def play(
    script: Script,
    start: dict[str, Any],
    moves: Moves,
    target: int,
    wire: str,
    last_local_step: int | None = None,
    **more: Any,
) -> list[RankResult]:
    """Run a script with real replicas.

    Args:
        last_local_step: before a final phase; None: there is none.
        more: settings.
    """
    settings = SETTINGS | {"sync_dtype": wire} | more
    last = target if last_local_step is None else last_local_step
    arguments = (NAMES, script, settings, start, moves, target, last)
    return run_ranks(SCENARIO, len(NAMES), arguments, check=True)


@pytest.mark.parametrize(("wire", "slack"), [("fp32", 1e-6), ("int8", 0.02)])
def test_replicas_that_leave_join_and_return_equal_the_oracle(wire: str, slack: float) -> None:
    """Catches: blocks of a lost replica that are dropped, a joiner with weight or with another
    state, an abandoned exchange that moves parameters, rows of another name. The oracle does not
    encode: encoded averages are close to its own."""
    founders, two, three = ("a", "b-2", "node9"), ("a", "b-2"), ("a", "b-2", "node9")
    script = Script(
        founders,
        (
            (Exchange(founders),),
            (Exchange(two),),  # node9 is lost in the middle of the round
            (Exchange(("B", *two), joined=("B",)),),
            (Exchange(("B", *two), lost=("b-2",)), Exchange(("B", "a"))),
            (
                Exchange(NAMES, joined=("b-2", "node9"), lost=("B",), is_complete=False),
                Exchange(three),
            ),
            (Exchange(three),),
            (Exchange(("a",)),),  # the two others are lost in the middle of the round
            (Exchange(two, joined=("b-2",)),),
            # b-2 is lost and back before the commit
            (Exchange(two, lost=("b-2",)), Exchange(two, joined=("b-2",))),
            (Exchange(two),),
            (Exchange(two),),
        ),
    )
    commits = run_both(script, target=37, seed=3, wire=wire, slack=slack)
    assert not any(commits[-1].assignment.values())  # the run is over
    assert "b-2" in commits[5].left_out["layer.1"]
    steps = [{n: len(run) for n, run in commit.blocks.items()} for commit in commits]
    assert steps[2] == {"B": 0, "a": 2, "b-2": 2} and steps[-1] == {"a": 1, "b-2": 0}


def test_replicas_change_in_warm_up_and_final_phase() -> None:
    """In either phase one is lost in the middle of a round, one in the exchange, and one joins.
    Catches: a phase with other weights, a clip or a momentum, a joiner in a round of another
    length, and a round that goes on in the final phase."""
    three, two = ("a", "b-2", "node9"), ("a", "b-2")
    changes = (
        (Exchange(three),),
        (Exchange(two),),  # node9 is lost in the middle of the round
        (Exchange(("B", *two), joined=("B",)),),
        (Exchange(("B", *two), lost=("B",), is_complete=False), Exchange(two)),
        (Exchange(three, joined=("node9",)),),
    )
    script = Script(three, (*changes, *((Exchange(three),),) * 4, *changes))
    start, moves = draw_moves(len(script.rounds), seed=7)
    moves[0]["b-2"][0]["layer.1"][3] = np.nan
    # A warm-up of 4 steps of 3 replicas, then 21 blocks up to step 11.
    expected = expect(script, start, moves, 60, warmup=12, local=33)
    closeness = min(r.closeness for commit in expected for r in commit.records.values())
    assert closeness > 1e-3, "rounding decides; change the seed"
    more = {"warmup_steps": 4, "last_local_step": 11}
    assert_equal_to_oracle(play(script, start, moves, 60, "fp32", **more), expected)
    steps = [max(map(len, commit.blocks.values())) for commit in expected]
    assert steps == [1] * 6 + [2, 2, 2, 1] + [1] * 4, steps
    assert expected[0].left_out["layer.1"] == {"b-2"} and not expected[0].left_out["layer.2"]
    for number, is_zero in ((0, True), (5, True), (9, False), (13, True)):
        assert any(values.any() for values in expected[number].momentum.values()) is not is_zero


def applied_by(results: list[RankResult], name: str) -> list[dict[str, bytes]]:
    """The bits of all that a replica has applied, round by round."""
    commits = results[NAMES.index(name)].value
    kinds = ("anchor", "momentum")
    return [{f"{k} {u}": c[k][u].tobytes() for k in kinds for u in SIZES} for c in commits]


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"delay_steps": 1}, {"fragments": 2}, {"fragments": 2, "delay_steps": 1}], ids=str
)
def test_abandoned_exchange_changes_nothing(more: dict[str, Any], *, is_complete: bool) -> None:
    """A replica that is lost in an exchange, or after it, leaves the others as if it had been lost
    before, whether they wait for the result or train on. Catches: encoding errors of an abandoned
    exchange that are sent with the next one, addends of parameters that were trained on since the
    meeting, blocks that are lost or consumed twice."""
    three, two = ("a", "b-2", "node9"), ("a", "b-2")
    before, after = ((Exchange(three),),) * 2, ((Exchange(two),),) * 3
    lost = Exchange(three, lost=("node9",), is_complete=is_complete)
    start, moves = draw_moves(6, seed=5)
    found = [
        play(Script(three, (*before, tries, *after)), start, moves, 60, "int8", **more)
        for tries in ((lost, Exchange(two)), (Exchange(two),))
    ]
    for name in two:
        assert len(applied_by(found[0], name)) == 6
        assert applied_by(found[0], name) == applied_by(found[1], name)
    for results in found:
        check_blocks(results[NAMES.index("a")].value)


def test_replica_joins_rounds_that_train_on() -> None:
    """It begins at the anchor, and applies the same commits from then on. Catches: a joiner that
    exchanges another fragment, or without the blocks that are late."""
    two, three = ("a", "b-2"), ("a", "b-2", "node9")
    rounds = (
        (Exchange(two),),
        (Exchange(two),),
        (Exchange(three, joined=("node9",)),),
        (Exchange(three),),
        (Exchange(three, lost=("b-2",)), Exchange(("a", "node9"))),
        (Exchange(("a", "node9")),),
        (Exchange(three, joined=("b-2",)),),
        (Exchange(three),),
    )
    start, moves = draw_moves(len(rounds), seed=6)
    more = {"fragments": 2, "delay_steps": 1}
    results = play(Script(two, rounds), start, moves, 100, "int8", **more)
    for number, tries in enumerate(rounds):
        applied = {
            tuple(commit[kind][unit].tobytes() for kind in ("anchor", "momentum") for unit in SIZES)
            for name in tries[-1].members
            for commit in results[NAMES.index(name)].value
            if commit["round"] == number
        }
        assert len(applied) == 1, number
    check_blocks(results[NAMES.index("a")].value)


def check_blocks(commits: list[dict[str, Any]]) -> None:
    """Check that no block was committed twice, and that few are left out for long."""
    blocks = [
        block
        for commit in commits
        for _, runs in commit["committed"]
        for first, count in runs
        for block in range(first, first + count)
    ]
    assert len(blocks) == len(set(blocks)) == commits[-1]["samples"]
    assert len(set(range(max(blocks) + 1)) - set(blocks)) <= 2 * TAU * len(NAMES)
