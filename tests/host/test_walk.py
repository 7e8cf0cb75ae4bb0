"""How far it is from an optimizer step to a landing: functions that one file calls in another."""

from __future__ import annotations

import json
from pathlib import Path

from tests.host.runs import run_edit

MOST = 45  # 00d2a33 had 95


def test_the_walk_from_a_step_to_a_landing(tmp_path: Path) -> None:
    """One rank, blocking `edit`. Would catch an engine that hands things on from room to room."""
    run_edit(
        tmp_path, 1, 1, before="tests.host.spy_walk:record_walk", train_iters=8,
        edit_sync_mode="blocking",
    )  # fmt: skip
    walks = json.loads((tmp_path / "walk-0.json").read_text())
    assert len(walks) == 2 and "engine/plan.py:plan_round" in walks[-1]
    assert len(walks[-1]) <= MOST, sorted(walks[-1])
