"""The end of a real training: all ranks of all replicas leave together."""

from __future__ import annotations

from pathlib import Path

from tests.host.runs import run_edit


def test_every_rank_waits_for_the_others(tmp_path: Path) -> None:
    """Would catch: a launcher that ends its ranks without `ReplicaWorld.exit_barrier`
    (test_exit_barrier.py)."""
    run_edit(tmp_path, 4, 2, before="tests.host.spy:note_leaving")
    assert {path.name for path in tmp_path.glob("left-*")} == {f"left-{r}" for r in range(4)}
