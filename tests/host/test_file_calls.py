"""The number of calls between the package's files from an optimizer step to the last landing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.host.runs import run_edit

OVERLAP: dict[str, Any] = {
    "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000,
    "edit_sync_mode": "overlap",
}  # fmt: skip
# Now 272 and 346, at d8ddf01 262 and 337 (without the plan of what follows the step, which was then
# made earlier). In overlap mode exchanges that are late are polled, on a busy machine in each sync.
MOST = {"blocking": 273, "overlap": 400}


@pytest.mark.parametrize(
    ("mode", "replicas", "flags"),
    [("blocking", 1, {"edit_sync_mode": "blocking"}), ("overlap", 2, OVERLAP)],
)
def test_calls_between_files_are_bounded(
    tmp_path: Path, mode: str, replicas: int, flags: dict[str, Any]
) -> None:
    """Would catch an engine whose files only pass calls on to each other."""
    run_edit(
        tmp_path, replicas, replicas, before="tests.host.spy_file_calls:record_file_calls",
        train_iters=32, **flags,
    )  # fmt: skip
    by_sync = json.loads((tmp_path / "calls-0.json").read_text())
    assert len(by_sync) >= 3 and all("engine/plan.py:plan_round" in calls for calls in by_sync)
    # A sync whose exchanges are late is polled more often: the one with the fewest calls counts.
    count, calls = min((sum(calls.values()), sorted(calls.items())) for calls in by_sync)
    assert count <= MOST[mode], calls
