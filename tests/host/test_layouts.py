"""Layouts and settings that once failed, or would fail silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.tools.compare.entries import parse_entries
from megatron_edit.tools.compare.plan import ComparisonSetting, make_plan
from tests.harness import Flags, run_ranks, tiny_gpt, train
from tests.host.layouts import GATHER, LAYOUTS, PLAIN_DDP
from tests.host.runs import edit_flags, run_edit
from tests.host.spy import read_records


def test_untied_embeddings_on_two_stages_do_not_hang(tmp_path: Path) -> None:
    """Stages without a shared parameter must not wait for each other (the first sync once hung)."""
    ranks, flags = LAYOUTS["pp2-untied"]
    run = run_edit(tmp_path, 2 * ranks, 2, edit_timeout_seconds=20, **flags)
    assert run.digests(0) == run.digests(1) and len(run.syncs) == 3


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_tied_embeddings_stay_equal_with_three_replicas(
    tmp_path: Path, use_distributed_optimizer: bool
) -> None:
    """Copies of the embedding on two stages are equal from the warm-up on. With three addends the
    order of a sum depends on the position in the buffers."""
    run_edit(
        tmp_path, 6, 3, pipeline_model_parallel_size=2, vocab_size=1021, global_batch_size=6,
        use_distributed_optimizer=use_distributed_optimizer, train_iters=9,
        before="tests.host.spy:record_embeddings",
    )  # fmt: skip
    digests = [(tmp_path / f"embedding-{rank}").read_text().splitlines() for rank in range(6)]
    for first_stage, last_stage in zip(digests[::2], digests[1::2], strict=True):
        assert first_stage == last_stage and len(first_stage) == 9


def test_last_round_is_synced_before_skipped_iterations(tmp_path: Path) -> None:
    """`--iterations-to-skip` at the end must not lose the partial round."""
    run = run_edit(tmp_path, 2, 2, train_iters=10, iterations_to_skip=[3, 10], global_batch_size=4)
    assert [line["iteration"] for line in run.syncs] == [5, 8]
    assert run.syncs[-1]["inner_steps"] == [3, 3]


def test_exit_interval_ends_all_replicas(tmp_path: Path) -> None:
    """Within a round: no forced sync, all losses are reported, exit code 0."""
    run = run_edit(tmp_path, 2, 2, train_iters=20, exit_interval=7, global_batch_size=4)
    assert [line["iteration"] for line in run.syncs] == [5]
    assert [line["iteration"] for line in run.lines("loss.jsonl")] == list(range(1, 8))


def test_train_samples_ends_with_partial_round_sync(tmp_path: Path) -> None:
    """Sample-based training syncs the partial round at the end."""
    run = run_edit(
        tmp_path, 2, 2, train_iters=None, train_samples=40, global_batch_size=4,
        lr_decay_style="constant",
    )  # fmt: skip
    assert run.syncs[-1]["iteration"] == 10 and run.syncs[-1]["samples"] == [20, 20]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"expert_model_parallel_size": 4, "num_experts": 4}, "expert TP x EP x PP = 4"),
        ({"num_distributed_optimizer_instances": 4}, "optimizer instances = 4"),
        ({"tensor_model_parallel_size": 0}, "must be at least 1"),
        ({"micro_batch_size": 0}, "must be at least 1"),
        ({"skip_train": True}, "--skip-train"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"error_injection_rate": 5}, "--error-injection-rate 5"),
    ],
    ids=str,
)
def test_flags_unsupported_in_a_replica_are_refused(flags: Flags, complaint: str) -> None:
    """The layout must fit into one replica, and no flag may affect one replica only."""
    result = train(edit_flags(2, **flags), 4, before="tests.host.spy:shorten_grace", check=False)
    assert [rank.returncode for rank in result.ranks] == [2] * 4
    assert complaint in result.ranks[0].stderr and result.ranks[0].stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "values"), [("lr", (1e-3, 1e-2)), ("edit_outer_lr", (0.8, 0.7))])
def test_launches_with_different_flags_are_refused(
    tmp_path: Path, name: str, values: tuple[float, float]
) -> None:
    """Replicas with different flags would silently train differently, or drift."""
    argvs = [edit_flags(2, **{name: value}) for value in values]
    ranks = run_ranks("tests.host.spy:train_with_own_flags", 2, (argvs,))
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert f"on replica 1: must be as on replica 0, which has {values[0]}" in ranks[0].stderr


def test_script_without_megatron_loop_is_refused(tmp_path: Path) -> None:
    """--use-edit without Megatron's training loop must not be a silent no-op."""
    script = tmp_path / "own_loop.py"
    script.write_text("print('training by hand')\n")
    result = train(edit_flags(1), 1, script=script, check=False)
    assert result.ranks[0].returncode == 2
    assert "did not train through megatron.training.pretrain" in result.ranks[0].stderr


# ---- Megatron's DDP without the distributed optimizer


def train_plain(
    folder: Path, *, bf16: bool, offload: bool
) -> tuple[list[str | None], list[str], list[dict[str, Any]]]:
    """Train two replicas of two ranks; return digests by sync, final digests and sync lines."""
    run = run_edit(
        folder, 4, 2, before="tests.host.spy:record", edit_sync_mode="blocking",
        edit_offload=offload, bf16=bf16, train_iters=17, **PLAIN_DDP,
    )  # fmt: skip
    assert run.digests(0) == run.digests(1)
    return run.digests(0), [record["digest"] for record in read_records(folder, 4)], run.syncs


@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=pytest.mark.full)], ids=["fp32", "bf16"]
)
def test_replicas_agree_and_offload_changes_no_bit(tmp_path: Path, bf16: bool) -> None:
    """For fp32 the main copies are the parameters themselves; for bf16 they are separate. Would
    catch a shard that is written to only one of the two, and one that offload loses."""
    resident = train_plain(tmp_path / "resident", bf16=bf16, offload=False)
    offloaded = train_plain(tmp_path / "offloaded", bf16=bf16, offload=True)
    digests, finals, syncs = resident
    assert len(digests) == 5 and None not in digests and len(set(digests)) == 5
    assert [sync["iteration"] for sync in syncs] == [5, 8, 11, 14, 17]
    assert len(set(finals)) == 1  # the last sync ends the training: all ranks hold the same
    assert (digests, finals) == offloaded[:2]
    for ours, theirs in zip(syncs, offloaded[2], strict=True):
        assert all(ours[key] == theirs[key] for key in ("norms", "weights", "clip", "update_norm"))


# ---- a replica of NaN


DAMAGE = "tests.host.spy:damage_before_sync"
UNITS = ("embedding", "layer.1", "layer.2", "final")
ROUND = 3
FULL = pytest.mark.full


@pytest.mark.parametrize("mode", [pytest.param("blocking", marks=pytest.mark.system), "overlap"])
@pytest.mark.parametrize(
    ("layout", "flags", "late"),
    [
        pytest.param("m2", {}, 0, id="at-once"),
        pytest.param("pp2", {"edit_mix": 0.25}, 0, id="mix", marks=FULL),
        pytest.param("pp2", {"edit_delay_steps": 1}, 1, id="delay"),
        pytest.param("m2", {"edit_offload": True}, 0, id="offload", marks=FULL),
        pytest.param(
            "m2", {"edit_strategy": "streaming-diloco", "edit_delay_steps": 1}, 1, id="diloco",
            marks=FULL,
        ),
        pytest.param("tp2", {"edit_strategy": "co2"}, 0, id="co2", marks=FULL),
        pytest.param("m2", {"edit_strategy": "sparse-loco"}, 0, id="sparse-loco", marks=FULL),
        pytest.param("m2", {"edit_strategy": "co2", "first": 1}, 0, id="co2-first", marks=FULL),
    ],
)  # fmt: skip
def test_nan_units_return_to_anchor_at_first_fragment_sync(
    tmp_path: Path, layout: str, flags: Flags, late: int, mode: str
) -> None:
    """Would catch units that stay NaN until their own fragment syncs: in the next forward pass they
    would spread NaN to the units that were just reset, and so on forever."""
    ranks, given = LAYOUTS[layout]
    flags = dict(flags)
    bad_round = flags.pop("first", ROUND)
    run = run_edit(
        tmp_path, 2 * ranks, 2, before=DAMAGE,
        env={"SPY_DAMAGE": json.dumps([[bad_round, [1], unit, "nan"] for unit in UNITS])},
        no_check_for_nan_in_loss_and_grad=True, train_iters=22, edit_sync_interval=4,
        edit_fragments=2, edit_sync_mode=mode, **{**GATHER, **given, **flags},
    )  # fmt: skip
    damaged = run.syncs[bad_round - 1]["iteration"]
    lines = [line for line in run.lines("replica-1.jsonl") if "loss" in line]
    lost = [line["iteration"] for line in lines if line["loss"] is None]
    assert lost == list(range(damaged + 1, damaged + 1 + late))
    for line in run.syncs:
        out = [units[1] for units in line["anomalous"]]
        assert all(out) if line["round"] == bad_round else not any(out), line["round"]
    assert run.digests(0) == run.digests(1)
    losses = [line["loss"] for line in run.lines("loss.jsonl")]
    assert losses[-1] < losses[0]


# ---- `stock-instances`


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
