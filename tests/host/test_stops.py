"""Ends of a run: one replica gets a signal, reaches its time limit, or dies; all exit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.runs import run_edit
from tests.host.test_aedit import AEDIT, HOOKS, run_timed

TRIGGERS: dict[str, Flags] = {
    "a-edit": {"edit_sync_seconds": 0.5},
    "edit": {"edit_strategy": "edit", "edit_sync_interval": 10, "edit_min_round_steps": 100},
}
HOW: dict[str, tuple[str, Flags]] = {
    "signal": ("signal_replica_1", {"exit_signal_handler": True}),
    "duration": ("expire_replica_1", {"exit_duration_in_mins": 30}),
}


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("how", ["signal", pytest.param("duration", marks=pytest.mark.full)])
@pytest.mark.parametrize("step", ["2", "17"], ids=["in-warm-up", "in-a-round"])
def test_stop_on_one_replica_ends_all(tmp_path: Path, trigger: str, how: str, step: str) -> None:
    """In warm-up or within a round, while the others may wait at a meeting: all exit with 0."""
    hook, flags = HOW[how]
    run = run_timed(
        tmp_path, 4, 2, f"slow,{hook}", {"SPY_SLEEP": "[0.01, 0.05]", "SPY_STEP": step},
        train_iters=5000, **flags, **TRIGGERS[trigger],
    )  # fmt: skip
    lines = run.lines("replica-0.jsonl")
    assert 0 < len([x for x in lines if "loss" in x]) < 1000


@pytest.mark.parametrize("how", ["signal", pytest.param("duration", marks=pytest.mark.full)])
@pytest.mark.parametrize("trigger", ["edit", pytest.param("a-edit", marks=pytest.mark.system)])
def test_stop_of_replica_waiting_at_meeting(tmp_path: Path, trigger: str, how: str) -> None:
    """Replica 1 waits at the meeting, long before the other, when it must stop. The other stops at
    its next step, and the meeting does not take place."""
    hook = {"signal": "signal_soon", "duration": "expire_soon"}[how]
    env = {"SPY_SLEEP": "[0.5, 0.01]", "SPY_STEP": "21"}
    flags: Flags = {"edit_sync_interval": 20}
    if trigger == "a-edit":  # only the clock of replica 1 reaches the interval soon
        hook += ",script_clock"
        env["SPY_FACTORS"] = "[0.001, 1]"
        flags = {"edit_sync_seconds": 20}
    run = run_timed(
        tmp_path, 2, 2, f"slow,{hook}", env, train_iters=500, global_batch_size=4,
        **{**HOW[how][1], **TRIGGERS[trigger], **flags},
    )  # fmt: skip
    assert not (tmp_path / "sync.jsonl").exists() or not run.syncs
    steps = [[x for x in run.lines(f"replica-{r}.jsonl") if "loss" in x] for r in (0, 1)]
    assert len(steps[0]) < 10 < len(steps[1]) <= 22


@pytest.mark.parametrize(
    ("step", "how"),
    [
        pytest.param("2", "signal", id="in-warm-up-signal", marks=pytest.mark.system),
        pytest.param("2", "duration", id="in-warm-up-duration"),
        pytest.param("17", "signal", id="in-a-round-signal"),
        pytest.param("17", "duration", id="in-a-round-duration", marks=pytest.mark.system),
    ],
)
def test_stop_between_evaluations_does_not_hang(tmp_path: Path, how: str, step: str) -> None:
    """Evaluated at every step. Would catch a replica that waits in an evaluation for one that
    exited, and a time limit that ends an evaluation on one replica only."""
    hook, flags = HOW[how]
    run = run_timed(
        tmp_path, 4, 2, f"slow,{hook}", {"SPY_SLEEP": "[0, 0.02]", "SPY_STEP": step},
        train_iters=3000, eval_interval=1, eval_iters=2, pipeline_model_parallel_size=2,
        **flags, **TRIGGERS["edit"],
    )  # fmt: skip
    assert "validation loss at iteration 1 " in run.result.ranks[1].stdout


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_stop_at_last_step_finishes_training(tmp_path: Path, trigger: str) -> None:
    """The slower replica gets the signal when the other has made its last step. Training is over:
    all evaluate and exit with 0."""
    last = {"edit": "20", "a-edit": "20"}[trigger]
    run = run_timed(
        tmp_path, 2, 2, "slow,signal_replica_1", {"SPY_SLEEP": "[0.01, 0.1]", "SPY_STEP": last},
        train_iters=20, eval_iters=1, global_batch_size=4, exit_signal_handler=True,
        **TRIGGERS[trigger],
    )  # fmt: skip
    if trigger == "edit":
        assert "on validation set" in run.result.ranks[0].stdout


@pytest.mark.parametrize("strategy", [pytest.param("a-edit", marks=pytest.mark.system), "edit"])
def test_killed_replica_is_named(tmp_path: Path, strategy: str) -> None:
    """Killed within a round: the other reaches the meeting and names the missing replica."""
    flags: Flags = {"edit_sync_interval": 40}
    if strategy == "a-edit":
        flags = AEDIT | {"edit_sync_seconds": 1}
    run = run_edit(
        tmp_path, 2, 2, before=HOOKS, check=False, global_batch_size=4, train_iters=500,
        env={"SPY_HOOKS": "slow,kill_replica_1", "SPY_SLEEP": "[0.01, 0.01]", "SPY_STEP": "30"},
        edit_timeout_seconds=20, **flags,
    )  # fmt: skip
    survivor = run.result.ranks[0]
    assert survivor.returncode == 4
    assert "replica 1 did not reach the sync of round" in survivor.stderr


# ---- the regular end


def test_every_rank_runs_exit_barrier(tmp_path: Path) -> None:
    """Would catch a launcher that ends its ranks without `ReplicaWorld.exit_barrier`
    (test_exit_barrier.py)."""
    run_edit(tmp_path, 4, 2, before="tests.host.spy:record_exit_barrier")
    assert {path.name for path in tmp_path.glob("left-*")} == {f"left-{r}" for r in range(4)}
