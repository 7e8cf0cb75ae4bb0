"""A-EDiT when its clock must be stopped, when time or samples run out, and with late landings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER
from tests.host.runs import run_edit
from tests.host.spy import read_records
from tests.host.test_aedit import AEDIT, assert_equal_replicas, consumed, run_timed
from tests.reference.ledger import SlowLedger


@pytest.mark.parametrize(
    "called", ["evaluate", "save_checkpoint", "build_train_valid_test_datasets"]
)
def test_clock_stops_outside_training_steps(tmp_path: Path, called: str) -> None:
    """Steps of 1 s, no warm-up, 100 s in each call. Would catch a clock that runs during
    evaluations, saves, or the building of datasets, which would shorten the next round."""
    env = {"SPY_FACTORS": "[1, 1]", "SPY_LINGER": f"megatron.training.training.{called}"}
    run = run_timed(
        tmp_path, 2, 2, "script_clock,linger", env,
        train_iters=20, global_batch_size=4, edit_sync_seconds=4, edit_warmup_steps=0,
        eval_interval=4, eval_iters=1, save_interval=4, save=tmp_path / "saves",
    )  # fmt: skip
    assert [line["inner_steps"] for line in run.syncs] == [[4, 4], [4, 4], [4, 4], [8, 8]]


def test_samples_match_reference_ledger_at_unequal_speeds(tmp_path: Path) -> None:
    """Step times 1x and 8x, and `--train-samples` that end with an incomplete batch: each replica
    consumes the blocks that `SlowLedger` assigns by the step counts of `sync.jsonl`."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock,record_consumed", {"SPY_FACTORS": "[1, 8]"},
        train_iters=None, train_samples=40 * 4 + 3, global_batch_size=4, edit_sync_seconds=16,
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    assert run.syncs[0]["inner_steps"] == [16, 2]
    ledger, expected = SlowLedger(2, 80, consumed=4), [[0, 2], [1, 3]]  # two steps of warm-up
    for line in run.syncs:
        for blocks, mine, steps in zip(expected, ledger.assigned, line["inner_steps"], strict=True):
            blocks += mine[:steps]
        ledger.next_round(line["inner_steps"])
    for replica, blocks in enumerate(expected):
        batches = json.loads((tmp_path / f"consumed-{replica}.json").read_text())
        assert batches == [[2 * block, 2 * block + 1] for block in blocks]
    assert ledger.consumed == set(range(80))


def test_exit_duration_on_one_replica_ends_all(tmp_path: Path) -> None:
    """Within a round, while one may wait, both stop at their own next step, with exit code 0."""
    run = run_timed(
        tmp_path, 2, 2, "slow,expire_replica_1", {"SPY_SLEEP": "[0.01, 0.05]", "SPY_STEP": "17"},
        train_iters=5000, global_batch_size=4, edit_sync_seconds=0.5, exit_duration_in_mins=30,
    )  # fmt: skip
    for replica in (0, 1):
        losses = [x for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        assert 17 <= len(losses) < 1000


@pytest.mark.parametrize("strategy", ["a-edit", "edit"])
@pytest.mark.parametrize("warmup", [100, 5])
def test_resume_past_train_iters_trains_no_step(tmp_path: Path, strategy: str, warmup: int) -> None:
    """The checkpoint has ten steps of warm-up and `--train-iters` is 5: the run exits with 0. With
    a warm-up of 5, local training begins at the load, and no step follows."""
    flags: Flags = {"global_batch_size": 4, "lr_decay_iters": 10} | (
        AEDIT if strategy == "a-edit" else {}
    )
    saves = tmp_path / "saves"
    run_edit(
        tmp_path, 2, 2, save=saves, save_interval=10, train_iters=10, edit_warmup_steps=100, **flags
    )
    again = tmp_path / "again"
    run = run_edit(
        again, 2, 2, load=saves, save=saves, save_interval=10, train_iters=5,
        edit_warmup_steps=warmup, override_opt_param_scheduler=True, **flags,
    )  # fmt: skip
    assert not run.result.losses and not (again / "sync.jsonl").exists()


# ---- late landings


VARIANTS: dict[str, Flags] = {
    "fragments": {"edit_fragments": 2},
    "delay": {"edit_delay_steps": 4},
    "all": {"edit_fragments": 2, "edit_delay_steps": 3, "edit_mix": 0.25,
            "edit_sync_dtype": "int8", "edit_sync_mode": "overlap", **GATHER},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "all" else [pytest.mark.full]) for n in VARIANTS]
)
def test_late_landings_at_unequal_speeds(tmp_path: Path, name: str) -> None:
    """Step times 1x, 2x and 5x. Would catch a hang between a meeting and an exchange, a unit that
    lands twice, a sample assigned twice, and replicas that differ in the end."""
    run = run_timed(
        tmp_path, 3, 3, "script_clock,record_consumed,record_spy", {"SPY_FACTORS": "[1, 2, 5]"},
        train_iters=40, global_batch_size=12, micro_batch_size=2, edit_sync_seconds=10,
        **VARIANTS[name],
    )  # fmt: skip
    assert_equal_replicas(run, 3)
    assert sorted(consumed(tmp_path, 3)) == list(range(40 * 12))
    finals = {record["digest"] for record in read_records(tmp_path, 3)}
    assert len(finals) == 1
    rounds = [sync["round"] for sync in run.syncs]
    assert sorted(rounds) == list(range(1, len(rounds) + 1))
    times = Counter(unit for sync in run.syncs for unit in sync["units"])
    assert max(times.values()) - min(times.values()) <= 1
