"""A-EDiT with fragments, delays and wire types: late landings, at a different step per replica."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER
from tests.host.spy import read_records
from tests.host.test_aedit import assert_equal_replicas, consumed, run_timed

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
