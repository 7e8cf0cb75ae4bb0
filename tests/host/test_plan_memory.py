"""The planner's memory and bytes compared with allocations and traffic of tiny real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.tools.plan.costs import edit_parts, stock_parts, sync_traffic
from megatron_edit.tools.plan.job import Job, read_job
from tests.harness import Flags
from tests.harness.planned_state import persistent_bytes
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import edit_flags, run_edit

TOLERANCE = 0.10
PLAIN_DDP: Flags = {"use_distributed_optimizer": False, "overlap_param_gather": False}


def planned(num_replicas: int, world_size: int, **flags: Any) -> Job:
    """Read the same command line with the planner."""
    argv = [*edit_flags(num_replicas, **flags), "--edit-device", "cpu"]
    return read_job(argv, num_replicas=None, world_size=world_size, ranks_per_host=None)


@pytest.mark.parametrize(
    "layout",
    ["m2", pytest.param("tp2", marks=pytest.mark.full), pytest.param("pp2", marks=pytest.mark.full),
     pytest.param("pp2-untied", marks=pytest.mark.full),
     pytest.param("tp2-pp2", marks=pytest.mark.full),
     pytest.param("two-instances-m2", marks=pytest.mark.system)],
)  # fmt: skip
@pytest.mark.parametrize("wire", ["fp32", pytest.param("int8", marks=pytest.mark.full)])
def test_planned_outer_state_and_traffic_match_run(tmp_path: Path, layout: str, wire: str) -> None:
    """Elements on each rank and bytes of a sync are exactly as planned."""
    ranks, flags = LAYOUTS[layout]
    flags = {**GATHER, **flags, "edit_sync_dtype": wire, "num_layers": 4}
    run = run_edit(
        tmp_path, 2 * ranks, 2, before="tests.host.spy_memory:measure", train_iters=5, timeout=300,
        **flags,
    )  # fmt: skip
    job = planned(2, 2 * ranks, **flags)
    config = job.config("edit")
    facts = [json.loads((tmp_path / f"memory-{rank}.json").read_text()) for rank in range(ranks)]
    measured = [fact["outer_bytes"] for fact in facts]
    assert sum(measured) == persistent_bytes(job, config)
    if wire == "fp32":
        assert measured == [8 * sum(row) for row in job.rank_numels]
    sync = run.syncs[-1]
    assert sync["state_bytes"] == persistent_bytes(job, config)
    assert sync["wire_bytes"] == sync_traffic(job, config, 3).per_replica


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"bf16": True},
        {"bf16": True, "grad_reduce_in_bf16": True},
        {"fp16": True, "initial_loss_scale": 1024},
        {"fp16": True, "initial_loss_scale": 1024, "accumulate_allreduce_grads_in_fp32": True},
        {**PLAIN_DDP, "fp16": True, "initial_loss_scale": 1024},
        {**PLAIN_DDP, "bf16": True, "optimizer": "sgd"},
        {"use_rotary_position_embeddings": True},
        {"num_distributed_optimizer_instances": 2},
    ],
    ids=lambda flags: "-".join(map(str, flags)) or "fp32",
)
def test_planned_stock_memory_matches_run(tmp_path: Path, flags: Flags) -> None:
    """For gradients and optimizer state of every type. Would catch bytes that Megatron does not
    use."""
    flags = {**GATHER, **flags, "num_layers": 4}
    run_edit(
        tmp_path, 4, 2, before="tests.host.spy_memory:measure_stock", train_iters=5, timeout=300,
        **flags,
    )  # fmt: skip
    job = planned(2, 4, **flags)
    parts = {part.name: part.nbytes for part in stock_parts(job)}
    facts = [json.loads((tmp_path / f"stock-{rank}.json").read_text()) for rank in range(2)]
    assert {fact["model_numel"] for fact in facts} == {job.on_rank}
    assert max(fact["state_bytes"] for fact in facts) == parts["optimizer state"]
    for fact in facts:  # buffers are padded
        assert fact["gradient_bytes"] == pytest.approx(parts["gradients"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("depth", "offload"),
    [pytest.param(1, False, marks=pytest.mark.system),
     *(pytest.param(*x, marks=pytest.mark.full) for x in ((3, True), (3, False), (1, True)))],
)  # fmt: skip
def test_planned_staging_matches_peak(tmp_path: Path, depth: int, offload: bool) -> None:
    """The planned staging is the peak on the rank with the largest one."""
    flags: Flags = {
        **GATHER, "num_layers": 6, "edit_prefetch_units": depth, "edit_offload": offload,
    }  # fmt: skip
    run_edit(
        tmp_path, 4, 2, before="tests.host.spy_places:measure_staging", edit_sync_mode="overlap",
        train_iters=11, edit_digest_interval=100, **flags,
    )  # fmt: skip
    facts = [json.loads((tmp_path / f"staging-{rank}.json").read_text()) for rank in range(2)]
    job = planned(2, 4, **flags)
    parts = {part.name: part.nbytes for part in edit_parts(job, job.config("edit"), overlaps=True)}
    assert max(fact["largest_shard"] for fact in facts) == max(max(row) for row in job.rank_numels)
    peak = max(fact["peak"] for fact in facts)
    assert parts["staging"] == pytest.approx(peak, rel=TOLERANCE)
