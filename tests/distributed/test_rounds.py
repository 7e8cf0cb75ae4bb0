"""The engine over real process groups against the NumPy oracle: rounds, sizes, faults, costs."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine
from megatron_edit.engine.rounds.meeting import size_of_record
from megatron_edit.errors import DriftError
from tests.distributed.toy import build_engine, with_outer
from tests.harness import RankResult, run_ranks
from tests.reference.oracle import OracleSettings
from tests.reference.outer_rules import settings_for
from tests.reference.strategies import Simulation

SIZES = {"embedding": 130, "layer.1": 33, "layer.2": 7, "final": 1}
SCENARIO = "tests.distributed.test_rounds:run_rounds"
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
) -> tuple[list[RankResult], list[Any], list[Any]]:
    """Run the engine on num_replicas x ranks processes, and the oracle.

    Returns:
        Results of the ranks; for each round, the oracle's decisions as tables like those of a
        report, and its anchor and momentum by unit.
    """
    results = run_ranks(
        SCENARIO,
        num_replicas * ranks,
        ({"num_replicas": num_replicas, **settings}, SIZES, start, moves),
        check=True,
    )
    expected: dict[str, Any] = {}
    for name, value in settings.items():
        expected |= _WITHOUT.get(name, {_ORACLE_NAMES.get(name, name): value})
    penalty = OracleSettings(**expected)
    oracle = Simulation.start(num_replicas, start, settings_for("edit", tau=1, penalty=penalty))
    tables, states = [], []
    for round_ in moves:
        oracle.step(round_)
        units = oracle.records[-len(SIZES) :]
        tables.append(
            SimpleNamespace(
                norms=np.array([unit.norms for unit in units]).T,
                weights=np.array([unit.weights for unit in units]).T,
                anomalous=np.array([unit.left_out for unit in units]).T,
                rollback=np.array([unit.rolled_back for unit in units]),
                update_norm=np.array([unit.update_norm for unit in units]),
                clip=np.array([unit.clip for unit in units]),
            )
        )
        states.append((dict(oracle.anchor), dict(oracle.momentum)))
    return results, tables, states


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
            for name in SIZES:
                piece = ours["slices"][name]
                for key, full in (("anchor", anchor), ("momentum", momentum), ("theta", anchor)):
                    np.testing.assert_allclose(
                        ours[key][name], full[name][piece], rtol=1e-5, atol=1e-6, err_msg=key
                    )


@pytest.mark.parametrize(("num_replicas", "ranks"), [(2, 1), (3, 1), (2, 2), (1, 2)])
def test_three_rounds_equal_the_oracle(num_replicas: int, ranks: int) -> None:
    """Catches: norms or clip of one rank's shard, wrong weights, a wrong outer step."""
    start, moves = make_moves(3, num_replicas, seed=num_replicas)
    results, records, anchors = run_both(num_replicas, ranks, moves, start, clip=0.5)
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
    results, records, anchors = run_both(
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
    results, records, anchors = run_both(
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
    results, records, anchors = run_both(2, 1, moves, start)
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
    results, _, _ = run_both(2, 2, moves, start)
    last = [result.value[-1] for result in results]
    first = [result.value[0] for result in results]
    # Ranks 0 and 1 are replica 0. Digest tables (8 bytes per unit) are control traffic in addition.
    sent = sum(a["bytes"] - b["bytes"] for a, b in zip(last[:2], first[:2], strict=True))
    digest_bytes = 2 * 8 * len(SIZES)
    assert sent - digest_bytes == last[0]["wire_bytes"]
    assert last[0]["wire_bytes"] >= 4 * sum(SIZES.values())


@pytest.mark.parametrize(
    ("num_replicas", "ranks", "settings"),
    [
        (3, 1, {"sync_dtype": "int8"}),
        (2, 2, {}),
        (2, 2, {"sync_dtype": "bf16", "offload": True}),
    ],
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
    scenario = "tests.distributed.test_rounds:differ_before_commit"
    for result in run_ranks(scenario, 2 * ranks, (what, fragments), check=True):
        assert result.value["message"] == f"the replicas differ before round 2 was applied {place}"
        assert result.value["is_unchanged"]


def test_replica_missing_at_a_sync_is_named() -> None:
    """A hang of one replica is an error with its number and the round."""
    results = run_ranks("tests.distributed.test_rounds:miss_a_sync", 2, timeout=60, grace=1)
    assert results[0].returncode == 1
    assert "replica 1 did not reach the sync of round 1" in results[0].stderr


# ---- Functions of the distributed tests. Each runs on every rank


Record = dict[str, Any]


def run_rounds(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: dict[str, Any],
    displacements: list[list[dict[str, Any]]],
) -> list[Record]:
    """Make rounds of one step: move by `displacements[round][replica]`, then sync.

    Returns:
        One record per round: the decision of the sync, and this rank's shards after it.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=1, digest_interval=1,
                        **with_outer(settings))  # fmt: skip
    engine, host, reporter = build_engine(config, sizes, start)
    engine.start()
    replica = engine.groups.sync.rank
    records = []
    for moves in displacements:
        engine.before_step()
        host.move(moves[replica])
        engine.after_step()
        report = reporter.syncs[-1]
        records.append(
            {
                "norms": report.decision.norms.numpy(),
                "z": report.decision.verdict.scores.numpy(),
                "anomalous": report.decision.verdict.anomalous.numpy(),
                "weights": report.decision.weights.numpy(),
                "rollback": report.decision.rollback.numpy(),
                "clip": report.clip.numpy(),
                "update_norm": report.update_norm.numpy(),
                "digest": report.digest,
                "theta": {name: values.numpy().copy() for name, values in host.full.items()},
                "anchor": {n: u.anchor.numpy().copy() for n, u in engine.syncs.outer.units.items()},
                "momentum": {
                    n: u.momentum.numpy().copy() for n, u in engine.syncs.outer.units.items()
                },
                "slices": host.slices,
                "bytes": _payload(engine),
                "wire_bytes": report.wire_bytes,
            }
        )
    return records


def _payload(engine: EditEngine) -> int:
    """Return the bytes that this rank has sent to other replicas."""
    return engine.groups.sync.payload_bytes + engine.groups.meeting.payload_bytes


def differ_before_commit(what: str, fragments: int) -> dict[str, Any]:
    """Sync twice; before the second sync, replica 1's state or plan differs in one place.

    Returns:
        The error, and whether parameters, anchor and round are as they were before that sync.
    """
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=0, sync_interval=fragments,
                        fragments=fragments, check_commits=True, digest_interval=100)  # fmt: skip
    sizes = {"embedding": 6, "layer.1": 5, "layer.2": 3, "final": 4}
    engine, host, _ = build_engine(config, sizes, {n: [1.0] * k for n, k in sizes.items()})
    engine.start()
    moves = {name: torch.arange(size) * 0.01 for name, size in sizes.items()}
    for number in range(2):
        if number == 1 and engine.groups.sync.rank == 1 and engine.groups.replica.rank == 0:
            if what == "momentum":
                engine.syncs.outer.units["layer.2"].momentum[0] += 1e-3
            elif what == "plan":
                engine.state.rounds = replace(engine.state.rounds, first_loss=7.0)
        engine.before_step()
        host.move(moves)
        before = {name: values.clone() for name, values in host.full.items()}
        outer = engine.syncs.outer.units.items()
        anchors = {name: unit.anchor.clone() for name, unit in outer}
        count, message = engine.state.rounds.count, ""
        try:
            engine.after_step()
        except DriftError as error:
            message = str(error)
    return {
        "message": message,
        "is_unchanged": engine.state.rounds.count == count
        and all(torch.equal(host.full[name], before[name]) for name in sizes)
        and all(torch.equal(unit.anchor, anchors[name]) for name, unit in outer),
    }


def miss_a_sync() -> None:
    """Wait at a sync that replica 1 never reaches."""
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=0, sync_interval=1,
                        timeout_seconds=3.0)  # fmt: skip
    engine, _, _ = build_engine(config, {"embedding": 2, "final": 3},
                                {"embedding": [0.0] * 2, "final": [0.0] * 3})  # fmt: skip
    engine.start()
    engine.groups.sync.timeout = engine.groups.meeting.timeout = timedelta(seconds=3)
    if engine.groups.sync.rank == 1:
        import time

        time.sleep(3600)
        return
    engine.before_step()
    engine.after_step()


class _Counter:
    """A process group that counts the collectives issued on it, by name."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in ("allgather", "allreduce", "broadcast"):
            return method

        def counted(*args: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return method(*args)

        return counted


def count_messages(num_replicas: int, num_layers: int, unit_numel: int) -> Record:
    """Count collectives and bytes of one sync without a drift check."""
    names = ["embedding", *(f"layer.{i + 1}" for i in range(num_layers)), "final"]
    config = EditConfig(use_edit=True, num_replicas=num_replicas, warmup_steps=0, sync_interval=1)
    zeros = torch.zeros(unit_numel)
    engine, host, _ = build_engine(
        config, dict.fromkeys(names, unit_numel), dict.fromkeys(names, zeros)
    )
    engine.start()
    counters = {}
    for name in ("sync", "meeting", "replica"):
        group = getattr(engine.groups, name)
        group.process_group = counters[name] = _Counter(group.process_group)
    engine.before_step()
    host.move(dict.fromkeys(names, torch.ones(unit_numel) * (1 + engine.groups.sync.rank)))
    before = _payload(engine)
    engine.after_step()
    nbytes = size_of_record(engine.host, engine.state, has_digests=False)
    table = nbytes * (num_replicas - 1)
    return {
        **{name: counter.counts for name, counter in counters.items()},
        "bytes": _payload(engine) - before,
        "control_bytes": table,
        "numel": host.plan.numel,
    }


def run_rounds_with_losses(losses: list[list[float]], settings: dict[str, Any]) -> list[Record]:
    """Make rounds of two steps with the loss `losses[round][replica]` in both of them.

    Only the last rank of a replica has its loss, as with pipeline stages, and only after the step
    and its sync, as in Megatron.

    Returns:
        The decision of each sync, as this rank saw it.
    """
    config = EditConfig(use_edit=True, num_replicas=len(losses[0]), warmup_steps=0,
                        digest_interval=1, **{"sync_interval": 2, **settings})  # fmt: skip
    sizes = {"embedding": 4, "layer.1": 5, "final": 3}
    engine, host, reporter = build_engine(config, sizes, {n: [0.0] * s for n, s in sizes.items()})
    engine.start()
    replica, control = engine.groups.sync.rank, engine.groups.control
    has_loss = control.rank == control.size - 1
    for own in (row[replica] for row in losses):
        for _ in range(2):
            engine.before_step()
            host.move({name: [1.0 + replica] * size for name, size in sizes.items()})
            engine.after_step()
            engine.record_loss(own if has_loss else float("nan"))
    engine.finish()
    return [
        {
            "units": list(report.units),
            "why": report.decision.reasons(),
            "round_loss": report.decision.loss.losses.tolist(),
            "weights": report.decision.weights.tolist(),
            "rollback": report.decision.rollback.tolist(),
            "digest": report.digest,
        }
        for report in reporter.syncs
    ]


# ---- Costs of a sync: linear bytes, one gather of records, one scalar gather per unit


COUNTING = "tests.distributed.test_rounds:count_messages"


@pytest.mark.parametrize("num_layers", [4, 16, 64])
def test_number_of_messages_depends_only_on_units(num_layers: int) -> None:
    """Catches records per unit, a message per parameter, or more messages inside the replica."""
    units = num_layers + 2
    for result in run_ranks(COUNTING, 4, (2, num_layers, 20_000), check=True):
        counts = result.value
        assert counts["sync"] == {"allreduce": units}
        assert counts["meeting"] == {"allgather": 1}
        assert counts["replica"] == {"allgather": 1 + units}  # norms once, then a scalar each
        assert counts["control_bytes"] <= 0.01 * counts["bytes"]


@pytest.mark.parametrize("num_replicas", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_bytes_per_replica_grow_as_in_a_ring(num_replicas: int) -> None:
    """2 (N - 1) / N of 4 bytes per parameter from every replica, and the control records."""
    for result in run_ranks(COUNTING, num_replicas, (num_replicas, 4, 20_000), check=True):
        counts = result.value
        payload = 2 * (num_replicas - 1) * 4 * counts["numel"] // num_replicas
        assert counts["bytes"] - counts["control_bytes"] == pytest.approx(payload, abs=100)


# ---- The loss check over real process groups: a burst of bad loss on one replica


WITH_LOSSES = "tests.distributed.test_rounds:run_rounds_with_losses"
NUM_ROUNDS, FIRST_BAD, NUM_BAD = 16, 12, 2  # a burst of two complete rounds


def losses_of(num_replicas: int) -> list[list[float]]:
    """Losses `[round][replica]`: small differences, and a burst on replica 1."""
    return [
        [
            3.0 + 0.01 * ((round_ + replica) % 3) + (4.0 if replica == 1 and is_bad else 0.0)
            for replica in range(num_replicas)
        ]
        for round_ in range(NUM_ROUNDS)
        for is_bad in [FIRST_BAD <= round_ < FIRST_BAD + NUM_BAD]
    ]


def run(num_replicas: int, ranks: int, **settings: Any) -> list[list[dict[str, Any]]]:
    """The decisions of all syncs, by rank."""
    args = (losses_of(num_replicas), settings)
    results = run_ranks(WITH_LOSSES, num_replicas * ranks, args, check=True)
    return [result.value for result in results]


@pytest.mark.parametrize(("num_replicas", "ranks"), [(3, 1), (3, 2), (2, 1)])
def test_loss_burst_is_rejected_at_its_first_sync(num_replicas: int, ranks: int) -> None:
    """Catches: a rank without the loss that decides differently, a late or missing rejection."""
    seen = run(num_replicas, ranks)
    for syncs in seen:
        for number, sync in enumerate(syncs):
            assert sync["why"] == seen[0][number]["why"]
            assert sync["digest"] == seen[0][number]["digest"]
            assert not any(sync["rollback"])
            # The loss of a round's last step is known only after its sync.
            is_rejected = FIRST_BAD <= number <= FIRST_BAD + NUM_BAD
            expected = ["loss" if is_rejected and r == 1 else None for r in range(num_replicas)]
            assert sync["why"] == [expected] * 3, number
            assert (sync["weights"][1] == [0.0] * 3) == is_rejected
    assert seen[0][0]["round_loss"][1] == pytest.approx(3.01)  # of its first step only
    assert seen[0][FIRST_BAD]["round_loss"][1] == pytest.approx(5.01, abs=0.02)


@pytest.mark.parametrize("switch", ["no_loss_check", "no_anomaly"])
def test_disabled_loss_check_rejects_nothing(switch: str) -> None:
    """The losses are still reported."""
    for syncs in run(3, 1, **{switch: True}):
        assert all(sync["why"] == [[None] * 3] * 3 for sync in syncs)
        assert not any(math.isnan(loss) for sync in syncs for loss in sync["round_loss"])


def test_loss_check_with_delayed_syncs_and_fragments() -> None:
    """Losses are judged at the meeting, for the units that sync; reported at the landing."""
    for syncs in run(3, 1, sync_interval=4, fragments=2, delay_steps=1):
        rejected = [sync for sync in syncs if any("loss" in row for row in sync["why"])]
        assert rejected and all(
            row == [None, "loss", None] for sync in rejected for row in sync["why"]
        )
        assert {len(sync["units"]) for sync in syncs[:-1]} == {1, 2}
