"""A-EDiT on real Megatron: replicas at different speeds, and disturbances of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.runs import EditRun, run_edit

HOOKS = "tests.host.spy_speeds:hooks"
AEDIT: Flags = {"edit_strategy": "a-edit", "edit_sync_interval": 128, "edit_min_round_steps": 0,
                "num_workers": 0}  # fmt: skip


def run_timed(
    folder: Path, world_size: int, num_replicas: int, hooks: str, env: dict[str, str],
    **flags: Any,
) -> EditRun:  # fmt: skip
    """Run A-EDiT with hooks; all ranks must exit with 0."""
    return run_edit(
        folder, world_size, num_replicas, before=HOOKS, env={"SPY_HOOKS": hooks, **env},
        **{**AEDIT, **flags},
    )  # fmt: skip


def consumed(folder: Path, world_size: int) -> list[int]:
    """Return the samples that all ranks consumed; ranks without a loader have none."""
    files = (folder / f"consumed-{rank}.json" for rank in range(world_size))
    return [
        index
        for file in files
        if file.exists()
        for batch in json.loads(file.read_text())
        for index in batch
    ]


def assert_equal_replicas(run: EditRun, num_replicas: int) -> None:
    """Check that all replicas have the same digest after every sync."""
    first = run.digests(0)
    assert first and None not in first
    assert all(run.digests(replica) == first for replica in range(1, num_replicas))


def test_final_round_is_not_ended_by_clock(tmp_path: Path) -> None:
    """Each replica trains all steps assigned to it, for longer than the interval (method 5)."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 1]"}, train_iters=30,
        global_batch_size=4, edit_sync_seconds=6,
    )  # fmt: skip
    assert [line["inner_steps"] for line in run.syncs] == [[6, 6], [6, 6], [6, 6], [10, 10]]
    assert_equal_replicas(run, 2)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.system)])
def test_unequal_speeds_consume_every_sample_once(tmp_path: Path, workers: int) -> None:
    """Step times 1x, 2x, 5x. Would catch a block assigned twice, lost, or read ahead and unused."""
    run = run_timed(
        tmp_path, 3, 3, "script_clock,record_consumed", {"SPY_FACTORS": "[1, 2, 5]"},
        train_iters=40, global_batch_size=12, micro_batch_size=2, edit_sync_seconds=10,
        num_workers=workers,
    )  # fmt: skip
    assert_equal_replicas(run, 3)
    assert sorted(consumed(tmp_path, 3)) == list(range(40 * 12))
    assert run.syncs[0]["inner_steps"] == [10, 5, 2]
    assert sum(run.syncs[-1]["samples"]) == 40 * 12
    assert [line["iteration"] for line in run.lines("loss.jsonl")[2:]] == [
        line["iteration"] for line in run.syncs
    ]


def test_data_parallel_ranks_split_each_block(tmp_path: Path) -> None:
    """D = 2 with accumulation: a block is split over ranks and micro-batches. With step weights,
    and the timers in Megatron's log."""
    run = run_timed(
        tmp_path, 4, 2, "script_clock,record_consumed", {"SPY_FACTORS": "[1, 3]"},
        train_iters=12, global_batch_size=16, micro_batch_size=2, edit_sync_seconds=4,
        edit_no_weighting=True, edit_step_weight=0.5, timing_log_level=1,
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    assert sorted(consumed(tmp_path, 4)) == list(range(12 * 16))
    for line in run.syncs:
        steps = line["inner_steps"]
        expected = [0.5 * 0.5 + 0.5 * mine / sum(steps) for mine in steps]
        assert all(weights == pytest.approx(expected) for weights in line["weights"])
    names = ("edit-inner-phase", "edit-sync-wait", "edit-sync-exchange", "edit-outer-step")
    assert all(f"{name} ..." in run.result.ranks[1].stdout for name in names), run.result.ranks[1]


def test_equal_speeds_match_edit_losses(tmp_path: Path) -> None:
    """With 5 steps per round on every replica, the losses are those of `edit` with tau 5."""
    flags: Flags = {
        "train_iters": 62, "global_batch_size": 4, "edit_outer_lr": 0.8,
        "edit_outer_momentum": 0.85,
    }  # fmt: skip
    timed, counted = tmp_path / "a-edit", tmp_path / "edit"
    a = run_timed(timed, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 1]"}, edit_sync_seconds=5,
                  **flags)  # fmt: skip
    b = run_edit(counted, 2, 2, edit_sync_interval=5, **flags)
    assert [line["inner_steps"] for line in a.syncs[:4]] == [[5, 5]] * 4
    ours, theirs = (
        [[x["loss"] for x in run.lines(f"replica-{r}.jsonl") if "loss" in x] for r in (0, 1)]
        for run in (a, b)
    )
    assert [x[:50] for x in ours] == [x[:50] for x in theirs]  # before the final round
    for mine, other in zip(ours, theirs, strict=True):
        assert sum(mine) == pytest.approx(sum(other), rel=0.01)
    rates = [[x["lr"] for x in run.lines("replica-0.jsonl") if "lr" in x] for run in (a, b)]
    assert rates[0][:50] == rates[1][:50]


def test_very_slow_replica_gets_no_block_in_final_round(tmp_path: Path) -> None:
    """It joins the last meeting without a step, with weight 0."""
    run = run_timed(
        tmp_path, 4, 4, "script_clock,record_consumed", {"SPY_FACTORS": "[1, 1, 1, 30]"},
        train_iters=16, global_batch_size=8, micro_batch_size=2, edit_sync_seconds=20,
        eval_interval=12, eval_iters=1,
    )  # fmt: skip
    assert_equal_replicas(run, 4)
    assert sorted(consumed(tmp_path, 4)) == list(range(16 * 8))
    assert [line["inner_steps"] for line in run.syncs] == [[14, 14, 14, 2], [4, 4, 4, 0]]
    assert all(weights[3] == 0.0 for weights in run.syncs[1]["weights"])
    # The evaluation was due at the first sync, after which one replica had no step left.
    assert run.result.ranks[0].stdout.count("validation loss at iteration 16 |") == 1


def test_short_rounds_are_extended(tmp_path: Path) -> None:
    """A round with fewer steps than `--edit-min-round-steps` continues without an outer step."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 2]"}, train_iters=40,
        global_batch_size=4, edit_sync_seconds=4, edit_min_round_steps=10,
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    assert run.syncs[0]["inner_steps"] == [8, 4]


def test_learning_rates_are_equal_after_every_sync(tmp_path: Path) -> None:
    """All replicas start a round at the schedule position of all consumed samples."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 3]"}, train_iters=24,
        global_batch_size=4, edit_sync_seconds=6, lr_decay_style="linear", lr=1e-2, min_lr=0,
    )  # fmt: skip
    for line in run.syncs[:2]:
        position = sum(line["samples"]) / (24 * 4)
        rates = []
        for replica, steps in enumerate(_steps_at(run, line["round"])):
            lines = [x for x in run.lines(f"replica-{replica}.jsonl") if "lr" in x]
            rates.append(lines[steps - 1]["lr"])
        assert rates[0] == rates[1] == pytest.approx(1e-2 * (1 - position), rel=1e-6)


def _steps_at(run: EditRun, round_: int) -> list[int]:
    """Return the steps of each replica by the end of a round, with two of warm-up."""
    counts = [line["inner_steps"] for line in run.syncs[:round_]]
    return [2 + sum(column) for column in zip(*counts, strict=True)]


def test_evaluation_and_exit_count_samples_of_all_replicas(tmp_path: Path) -> None:
    """Both happen at the first sync beyond a multiple of the interval, on all replicas."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 4]"}, train_iters=60,
        global_batch_size=4, edit_sync_seconds=8, eval_interval=10, eval_iters=1, exit_interval=30,
    )  # fmt: skip
    samples = [sum(line["samples"]) for line in run.syncs]
    assert samples[-2] < 30 * 4 <= samples[-1]  # the exit
    crossings = sum(a // 40 < b // 40 for a, b in zip([8, *samples], samples, strict=False))
    text = run.result.ranks[0].stdout
    assert text.count("validation loss at iteration") == crossings
    assert "exiting program at iteration" in text


def test_evaluation_at_switch_and_without_warmup(tmp_path: Path) -> None:
    """W = 0, and an evaluation due exactly at the switch. Without a warm-up, a round of 4 steps is
    followed by a final one of 8, at the end of which the second and third evaluation are due."""
    flags: Flags = {
        "train_iters": 12,
        "global_batch_size": 4,
        "eval_iters": 1,
        "edit_sync_seconds": 4,
    }
    for warmup, evaluations in ((0, 2), (4, 3)):
        folder = tmp_path / str(warmup)
        run = run_timed(
            folder, 2, 2, "script_clock", {"SPY_FACTORS": "[1, 1]"}, edit_warmup_steps=warmup,
            eval_interval=4, **flags,
        )  # fmt: skip
        assert_equal_replicas(run, 2)
        text = run.result.ranks[0].stdout
        found = [x for x in text.splitlines() if "validation loss at" in x and " set |" not in x]
        assert len(found) == evaluations


@pytest.mark.parametrize(
    "sync_mode", [pytest.param("blocking", marks=pytest.mark.system), "overlap"]
)
def test_rank_0_clock_decides_for_tp_pp_replica(tmp_path: Path, sync_mode: str) -> None:
    """TP2 x PP2, two replicas; the clocks of the other ranks run two to four times as fast as rank
    0's. Would catch a rank that decides by its own clock."""
    gather = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    run = run_timed(
        tmp_path, 8, 2, "script_clock,record_consumed",
        {"SPY_FACTORS": "[1, 2]", "SPY_JITTER": "1"}, train_iters=20, global_batch_size=4,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, edit_sync_seconds=8,
        edit_sync_mode=sync_mode,
        **(gather if sync_mode == "overlap" else {}),
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    first_stages = [index for rank in (0, 4) for index in _of_rank(tmp_path, rank)]
    assert sorted(first_stages) == list(range(20 * 4))
    assert run.syncs[0]["inner_steps"] == [8, 4]


def _of_rank(folder: Path, rank: int) -> list[int]:
    batches = json.loads((folder / f"consumed-{rank}.json").read_text())
    return [index for batch in batches for index in batch]


@pytest.mark.system
def test_paused_replica_and_clock_offset_are_tolerated(tmp_path: Path) -> None:
    """After a SIGSTOP of 10 s within a round the other replica waits, and training continues."""
    run = run_timed(
        tmp_path, 2, 2, "slow,shift_clocks,pause_replica_1,record_consumed",
        {"SPY_SLEEP": "[0.01, 0.01]", "SPY_STEP": "30"}, train_iters=80, global_batch_size=4,
        edit_sync_seconds=1,
    )  # fmt: skip
    assert_equal_replicas(run, 2)
    assert max(line["seconds"]["wait"] for line in run.syncs) > 5
    assert sorted(consumed(tmp_path, 2)) == list(range(80 * 4))
