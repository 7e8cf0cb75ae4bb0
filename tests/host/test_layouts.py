"""Layouts and settings that once failed, or would fail silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags, run_ranks, train
from tests.host.layouts import LAYOUTS
from tests.host.runs import edit_flags, run_edit


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
