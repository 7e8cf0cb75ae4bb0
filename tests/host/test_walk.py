"""How far it is from an optimizer step to the last landing: visits of one file to another."""

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
# At d8ddf01 262 and 368, without the plan of what follows the step, which was made before it.
MOST = {"blocking": 273, "overlap": 430}


@pytest.mark.parametrize(
    ("mode", "replicas", "flags"),
    [("blocking", 1, {"edit_sync_mode": "blocking"}), ("overlap", 2, OVERLAP)],
)
def test_visits_from_a_step_to_the_last_landing(
    tmp_path: Path, mode: str, replicas: int, flags: dict[str, Any]
) -> None:
    """Catches an engine whose files pass things on to each other, call by call."""
    run_edit(
        tmp_path, replicas, replicas, before="tests.host.spy_walk:record_walk", train_iters=8,
        **flags,
    )  # fmt: skip
    walks = json.loads((tmp_path / "walk-0.json").read_text())
    assert "engine/plan.py:plan_round" in walks[-1]
    visits = sum(walks[-1].values())
    assert visits <= MOST[mode], sorted(walks[-1].items())
