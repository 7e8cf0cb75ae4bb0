"""`stock-instances` of `megatron-edit compare` trains like stock Megatron, with other exchanges.

Would catch flags with which Megatron reduces gradients twice, or in instances that do not hold
whole pipelines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.tools.compare.entries import parse_entries
from megatron_edit.tools.compare.plan import ComparisonSetting, make_plan
from tests.harness import Flags, tiny_gpt, train

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(4, {}, id="data-parallel"),
        pytest.param(8, {"pipeline_model_parallel_size": 2}, id="pipeline", marks=pytest.mark.full),
    ],
)
def test_instances_train_like_stock(num_ranks: int, flags: Flags) -> None:
    """With two replicas, each of two or more data-parallel ranks, and several buckets."""
    tiny = tiny_gpt(
        train_iters=6, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=30_000,
        global_batch_size=16, edit_num_replicas=2, edit_device="cpu", **flags,
    )  # fmt: skip
    setting = ComparisonSetting(SCRIPT, tuple(tiny), num_ranks)
    plan = make_plan(setting, parse_entries("stock,stock-instances", with_ideal=False), ())
    stock, instances = (train(run.words, num_ranks, timeout=250) for run in plan)
    assert "num_distributed_optimizer_instances=2" in "".join(r.stdout for r in instances.ranks)
    assert len(stock.losses) == 6
    assert instances.losses == pytest.approx(stock.losses, rel=1e-6)
    assert instances.grad_norms == pytest.approx(stock.grad_norms, abs=2e-3)  # printed digits
