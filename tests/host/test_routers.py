"""Biases of MoE routers, which no optimizer owns, are equal on all replicas after a sync."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.runs import PENALTY_OFF, run_edit, run_stock
from tests.host.spy import read_records

MOE = {
    "num_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}  # fmt: skip
EXPERT_BIAS: Flags = {
    **MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.05,
}  # fmt: skip
QUANTILES = {**MOE, "moe_router_load_balancing_type": "quantile_balancing",
             "moe_router_quantile_balancing_ema": 0.5}  # fmt: skip
RECORD_BIASES = "tests.host.spy_state:record_biases"


def biases(folder: Path, rank: int) -> dict[str, dict[int, list[float]]]:
    """Read what `record_biases` wrote, by step."""
    log = json.loads((folder / f"biases-{rank}.json").read_text())
    return {when: {int(s): b for s, b in steps.items()} for when, steps in log.items()}


@pytest.mark.parametrize("flags", [EXPERT_BIAS, QUANTILES], ids=["expert-bias", "quantiles"])
def test_router_biases_are_averaged_over_replicas(tmp_path: Path, flags: Flags) -> None:
    """A sync sets them to the mean over the replicas; in warm-up they are always equal."""
    run = run_edit(
        tmp_path, 2, 2, global_batch_size=4, before=RECORD_BIASES, train_iters=11, **flags
    )
    one, two = biases(tmp_path, 0), biases(tmp_path, 1)
    for step in (5, 8, 11):
        first, second = one["before"][step], two["before"][step]
        assert first != second, "the replicas do not differ: nothing is tested"
        mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        assert one["after"][step] == pytest.approx(mean, abs=1e-7)
        assert one["after"][step] == two["after"][step]
    assert run.digests(0) == run.digests(1)
    assert one["after"][1] == two["after"][1]  # in warm-up tokens of all replicas count


def test_expert_biases_under_ep_and_pp_stay_equal(tmp_path: Path) -> None:
    """Stages have different routers, EP ranks the same ones; each sync group averages its own."""
    run = run_edit(
        tmp_path, 8, 2, before=RECORD_BIASES, **EXPERT_BIAS, pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    )  # fmt: skip
    logs = [biases(tmp_path, rank)["after"][8] for rank in range(8)]
    assert logs[:4] == logs[4:]
    (first, also_first), (second, also_second) = logs[:2], logs[2:4]
    assert first == also_first and second == also_second
    assert len(first) == 4 and first != second
    assert biases(tmp_path, 0)["before"][8] != biases(tmp_path, 4)["before"][8]
    assert run.digests(0) == run.digests(1)


@pytest.mark.parametrize(
    ("flags", "hook"),
    [
        pytest.param(EXPERT_BIAS, "spy:record", id="expert-bias"),
        pytest.param(
            EXPERT_BIAS,
            "spy_state:count_in_integers",
            id="integer-counts",
            marks=pytest.mark.system,
        ),
        pytest.param(QUANTILES, "spy:record", id="quantiles", marks=pytest.mark.system),
    ],
)
def test_endless_warmup_with_router_biases_equals_stock(
    tmp_path: Path, flags: Flags, hook: str
) -> None:
    """Token counts of all replicas change a bias. Would catch a replica that counts only its
    own, and counts of a type that cannot be summed."""
    run_stock(tmp_path / "stock", 2, global_batch_size=4, **flags)
    run_edit(
        tmp_path / "edit", 2, 2, global_batch_size=4, before=f"tests.host.{hook}",
        edit_strategy="ddp", **PENALTY_OFF, **flags,
    )  # fmt: skip
    stock = read_records(tmp_path / "stock", 2)[0]["grad_norms"].values()
    edit = read_records(tmp_path / "edit", 2)[0]["grad_norms"].values()
    want, got = ([float.fromhex(x) for x in norms] for norms in (stock, edit))
    assert got == pytest.approx(want, rel=2e-5)
