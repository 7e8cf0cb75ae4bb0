"""A-EDiT where time or samples run out."""

from __future__ import annotations

import json
from pathlib import Path

from tests.host.test_aedit import assert_equal_replicas, run_timed
from tests.reference.ledger import SlowLedger


def test_samples_follow_the_ledger_at_speeds_far_apart(tmp_path: Path) -> None:
    """1x and 8x, and a training given in samples, the last of which make no batch: each replica
    consumed the blocks that a slow ledger deals it by the step counts of `sync.jsonl`."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock,record_consumed", {"SPY_FACTORS": "[1, 8]"},
        train_iters=None, train_samples=40 * 4 + 3, global_batch_size=4, edit_sync_seconds=16,
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    assert run.syncs[0]["inner_steps"] == [16, 2]
    ledger, expected = SlowLedger(2, 80, consumed=4), [[0, 2], [1, 3]]  # two steps of warm-up
    for line in run.syncs:
        for blocks, dealt, steps in zip(expected, ledger.dealt, line["inner_steps"], strict=True):
            blocks += dealt[:steps]
        ledger.settle(line["inner_steps"])
    for replica, blocks in enumerate(expected):
        batches = json.loads((tmp_path / f"consumed-{replica}.json").read_text())
        assert batches == [[2 * block, 2 * block + 1] for block in blocks]
    assert ledger.consumed == set(range(80))


def test_the_time_of_one_replica_is_over(tmp_path: Path) -> None:
    """In a round, while the fast one may wait: both end at steps of their own, with 0."""
    run = run_timed(
        tmp_path, 2, 2, "slow,expire_one", {"SPY_SLEEP": "[0.01, 0.05]", "SPY_STEP": "17"},
        train_iters=5000, global_batch_size=4, edit_sync_seconds=0.5, exit_duration_in_mins=30,
    )  # fmt: skip
    for replica in (0, 1):
        losses = [x for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        assert 17 <= len(losses) < 1000
