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
# At d8ddf01 262 and 368, without the plan of what follows the step, which was then made earlier.
MOST = {"blocking": 273, "overlap": 430}


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
        train_iters=8, **flags,
    )  # fmt: skip
    by_sync = json.loads((tmp_path / "calls-0.json").read_text())
    assert "engine/plan.py:plan_round" in by_sync[-1]
    count = sum(by_sync[-1].values())
    assert count <= MOST[mode], sorted(by_sync[-1].items())
