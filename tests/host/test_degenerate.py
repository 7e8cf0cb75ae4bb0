"""Degenerate cases of method section 8 on real Megatron: each must equal stock training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags, run_ranks, tiny_gpt
from tests.harness.launch import REPOSITORY
from tests.host.runs import PENALTY_OFF, cached_run, run_edit, run_stock, stock_run
from tests.host.spy import read_records

RECORD = "tests.host.spy:record"
SGD: Flags = {
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "clip_grad": 0.0,
    "use_distributed_optimizer": False,
    "lr": 0.1,
}


def losses(folder: Path, world_size: int) -> list[float]:
    """Return the training losses by iteration, from a rank that has them."""
    record = next(r for r in read_records(folder, world_size)[::-1] if r["losses"])
    return [float.fromhex(value) for value in record["losses"].values()]


def grad_norms(folder: Path, world_size: int) -> list[float]:
    """Return gradient norms before clipping, as Adam and clipping hide a wrong scale in losses."""
    norms = read_records(folder, world_size)[0]["grad_norms"].values()
    return [float.fromhex(value) for value in norms if value is not None]


def test_launcher_without_use_edit_is_stock_bit_for_bit(tmp_path: Path) -> None:
    """The launcher does not change a stock run. Would catch a wrapper active without the flag."""
    (tmp_path / "plain").mkdir()
    argv = tiny_gpt(hidden_dropout=0.1)
    env: dict[str, str | None] = {"SPY_DIR": str(tmp_path / "plain")}
    script = str(REPOSITORY / "scripts/pretrain_gpt.py")
    run_ranks("tests.host.spy:plain_main", 2, (script, argv, RECORD), env=env, check=True)
    run_stock(tmp_path / "launched", 2, hidden_dropout=0.1)
    plain, launched = (read_records(tmp_path / name, 2) for name in ("plain", "launched"))
    assert plain == launched
    assert plain[0]["digest"] and len(plain[1]["losses"]) == 10


@pytest.mark.parametrize(
    "flags",
    [
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        pytest.param({"calculate_per_token_loss": True}, marks=pytest.mark.full),
        pytest.param({"data_parallel_random_init": True}, marks=pytest.mark.full),
        pytest.param({"bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
                     marks=pytest.mark.full),
        pytest.param({"use_distributed_optimizer": False}, marks=pytest.mark.full),
        pytest.param({"fp16": True, "initial_loss_scale": 65536}, marks=pytest.mark.full),
        pytest.param({"global_batch_size": 16, "micro_batch_size": 1}, marks=pytest.mark.full),
    ],
    ids=["dropout", "per-token-loss", "random-init", "bf16-overlap", "plain-ddp", "fp16",
         "accumulation"],
)  # fmt: skip
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_endless_warmup_equals_stock_training(
    tmp_path: Path, num_replicas: int, flags: Flags
) -> None:
    """N replicas of D ranks in warm-up equal one job of N*D ranks. Would catch wrong gradient
    scales, sample assignment, random streams and schedules."""
    stock = cached_run(stock_run, 4, **flags).folder
    run = run_edit(tmp_path, 4, num_replicas, before=RECORD, edit_strategy="ddp", **flags)
    tolerance = 2e-3 if {"bf16", "fp16"} & flags.keys() else 2e-6
    expected = losses(stock, 4)
    assert [line["loss"] for line in run.lines("loss.jsonl")] == pytest.approx(
        expected, rel=tolerance
    )
    assert len(expected) == 10 and expected[-1] < expected[0] - 0.1
    assert grad_norms(tmp_path, 4) == pytest.approx(grad_norms(stock, 4), rel=100 * tolerance)
    assert run.result.consumed_samples[10] == 10 * int(str(flags.get("global_batch_size", 8)))


def test_warmup_equals_stock_where_the_loop_sets_the_gradient_function(tmp_path: Path) -> None:
    """Before 0.19 Megatron's loop replaces the model's function for gradients. Would catch a
    warm-up that the loop prevents from averaging."""
    stock = cached_run(stock_run, 4).folder
    before = "tests.host.spy_hooks:finalize_gradients_as_before_0_19"
    run = run_edit(tmp_path, 4, 2, before=before, edit_strategy="ddp")
    assert losses(tmp_path, 4) == pytest.approx(losses(stock, 4), rel=2e-6)
    assert len(run.lines("loss.jsonl")) == 10
    assert grad_norms(tmp_path, 4) == pytest.approx(grad_norms(stock, 4), rel=2e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_replica_with_identity_outer_step_is_stock(tmp_path: Path, world_size: int) -> None:
    """N = 1, nu = 1, mu_o = 0, no penalty: theta <- A - (A - theta). Would catch a wrong sign
    or scale in the outer step, and any other change made by a sync."""
    run_stock(tmp_path / "stock", world_size)
    run_edit(
        tmp_path / "edit", world_size, 1, before=RECORD, edit_outer_lr=1.0,
        edit_outer_momentum=0.0, **PENALTY_OFF,
    )  # fmt: skip
    expected = losses(tmp_path / "stock", world_size)
    assert losses(tmp_path / "edit", world_size) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 2), (4, 2)])
def test_sgd_synced_at_every_step_is_ddp(
    tmp_path: Path, world_size: int, num_replicas: int
) -> None:
    """tau = 1, nu = 1, mu_o = 0, inner SGD: the mean of the replicas' steps is the step with the
    mean gradient. Would catch local gradients divided by the wrong number of ranks."""
    run_stock(tmp_path / "stock", world_size, **SGD)
    run = run_edit(
        tmp_path, world_size, num_replicas, before=RECORD, edit_warmup_steps=0,
        edit_sync_interval=1, edit_outer_lr=1.0, edit_outer_momentum=0.0, **SGD, **PENALTY_OFF,
    )  # fmt: skip
    expected = losses(tmp_path / "stock", world_size)
    assert [line["loss"] for line in run.lines("loss.jsonl")] == pytest.approx(expected, rel=2e-6)
    assert len(run.syncs) == 10
