"""The end of a real training: all ranks of all replicas exit together."""

from __future__ import annotations

from pathlib import Path

from tests.host.runs import run_edit


def test_every_rank_runs_exit_barrier(tmp_path: Path) -> None:
    """Would catch a launcher that ends its ranks without `ReplicaWorld.exit_barrier`
    (test_exit_barrier.py)."""
    run_edit(tmp_path, 4, 2, before="tests.host.spy:record_exit_barrier")
    assert {path.name for path in tmp_path.glob("left-*")} == {f"left-{r}" for r in range(4)}
