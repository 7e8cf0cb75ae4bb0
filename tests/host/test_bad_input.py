"""Bad input through the launcher: exit code 2 and one line, before any training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_edit.host.groups import SHARED_GPUS, _rank_device
from tests.harness import Flags, RankResult, train
from tests.host.runs import edit_flags, run_edit
from tests.system.check_lines import write_corpus

CASES: dict[str, tuple[Flags, str, str]] = {
    "not-a-divisor": ({"edit_num_replicas": 3}, "--edit-num-replicas 3", "must divide the 2 ranks"),
    "no-replicas": ({"edit_num_replicas": None}, "--edit-num-replicas", "must be given"),
    "tau": ({"edit_sync_interval": 0}, "--edit-sync-interval 0", "at least 1"),
    "cyclic": ({"edit_strategy": "a-edit", "edit_sync_interval": 128,
                "dataloader_type": "cyclic"}, "--dataloader-type cyclic", "blocks to be assigned"),
    "ramp-up": ({"edit_strategy": "a-edit", "edit_sync_interval": 128,
                 "rampup_batch_size": [4, 4, 100]}, "--rampup-batch-size", "what a step consumes"),
    "gather-with-step": ({"overlap_param_gather_with_optimizer_step": True},
                         "--overlap-param-gather-with-optimizer-step", "before a sync"),
    "megatron-fsdp": ({"use_megatron_fsdp": True}, "--use-megatron-fsdp", "own parameter buffers"),
    "torch-fsdp2": ({"use_torch_fsdp2": True}, "--use-torch-fsdp2", "own parameter buffers"),
    "save": (
        {"save": "/dev/null/x", "save_interval": 2}, "--save /dev/null/x", "a writable folder",
    ),
    "format": (
        {"save": "x", "save_interval": 2, "ckpt_format": "torch"},
        "--ckpt-format torch", "torch_dist",
    ),
    "non-persistent": (
        {"non_persistent_save_interval": 2}, "--non-persistent-save-interval 2", "not supported"
    ),
    "overlap": ({"edit_sync_mode": "overlap"}, "--edit-sync-mode overlap", "gathers parameters"),
    "cuda": ({"edit_device": "cuda"}, "--edit-device cuda", "no CUDA device"),
    "units": ({"edit_log_units_to_tensorboard": True}, "--edit-log-units-to-tensorboard",
              "a writer of Megatron"),
    "log-dir": ({"edit_log_dir": "/dev/null/logs"}, "--edit-log-dir", "a writable folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_invalid_flags_are_refused_before_training(tmp_path: Path, case: str) -> None:
    """Exit code 2; one line with value, rule and remedy; no traceback; nothing trained."""
    overrides, value, rule = CASES[case]
    argv = edit_flags(2, **overrides)
    ranks = train(argv, 2, before="tests.host.spy:shorten_grace", check=False).ranks
    # A folder or a GPU may be missing on one host only: in these cases each rank reports the error.
    _assert_refused(ranks, value, rule, is_reported_once=case not in ("log-dir", "cuda"))


def test_tensor_parallel_overlap_on_a_shared_host_is_refused() -> None:
    """By the hosts that the ranks report. Would catch a check that no rank calls."""
    flags: Flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True,
                    "tp_comm_overlap": True}  # fmt: skip
    hook = "tests.host.spy:keep_tensor_parallel_overlap"
    ranks = train(edit_flags(2, **flags), 4, before=hook, check=False).ranks
    _assert_refused(ranks, "--tp-comm-overlap", "2 replicas are on ")


def test_corpus_missing_on_one_host_is_refused(tmp_path: Path) -> None:
    """All ranks exit, with one line from the rank that checked the file. Would catch a rank that
    continues and waits for the other, or no message."""
    write_corpus(tmp_path / "corpus")
    flags: Flags = {"mock_data": None, "data_path": "corpus", "split": "90,10,0"}
    done = train(
        edit_flags(2, **flags),
        2,
        before="tests.host.spy:simulate_second_host",
        check=False,
        cwd=tmp_path,
    )
    assert [rank.returncode for rank in done.ranks] == [2, 2]
    lines = [x for r in done.ranks for x in r.stderr.splitlines() if "megatron_edit: " in x]
    assert len(lines) == 1 and "--data-path corpus: there is no file corpus.idx" in lines[0], lines


@pytest.mark.parametrize(
    ("hook", "value", "rule"),
    [
        ("fake_version", "megatron-core 0.15.0", "supports 0.16.x to 0.20.x"),
        ("remove_symbol", "megatron-core 0.19", "training_log is missing"),
    ],
)
def test_unsupported_megatron_is_refused(hook: str, value: str, rule: str) -> None:
    """An unknown Megatron version or API is an error that names it, never a silent no-op."""
    ranks = train(edit_flags(2), 2, before=f"tests.host.spy:{hook}", check=False).ranks
    # One host alone may have it, and no process group exists yet: each rank reports the error.
    _assert_refused(ranks, value, rule, is_reported_once=False)


def _assert_refused(
    ranks: list[RankResult], value: str, rule: str, *, is_reported_once: bool = True
) -> None:
    assert [rank.returncode for rank in ranks] == [2] * len(ranks)
    lines = ranks[0].stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron_edit: ")
    assert value in lines[0] and rule in lines[0]
    assert lines[0].count("; ") >= 1  # the remedy
    assert all("Traceback" not in rank.stderr for rank in ranks)
    if is_reported_once:
        assert all("megatron_edit:" not in rank.stderr for rank in ranks[1:])
    assert "lm loss" not in "".join(rank.stdout for rank in ranks)


def test_warmup_as_long_as_training_warns(tmp_path: Path) -> None:
    """EDiT would never start: that is a warning, not an error."""
    run = run_edit(tmp_path, 2, 2, train_iters=2, global_batch_size=4, edit_warmup_steps=2)
    warnings = [
        x for r in run.result.ranks for x in r.stdout.splitlines() if "EDiT never starts" in x
    ]
    assert len(warnings) == 1 and "--edit-warmup-steps 2" in warnings[0]
    assert not (tmp_path / "sync.jsonl").exists()


def test_lack_of_memory_for_the_rounds_is_refused_at_the_start(tmp_path: Path) -> None:
    """On one rank; all end. Catches a run that trains a warm-up of a thousand steps first."""
    done = run_edit(
        tmp_path, 2, 2, before="tests.host.spy_faults:lack_memory", check=False, grace=30
    ).result
    assert [rank.returncode for rank in done.ranks] == [2, 2]
    lines = [x for r in done.ranks for x in r.stderr.splitlines() if "megatron_edit: " in x]
    assert len(lines) == 1 and "GB per rank for anchor" in lines[0], lines
    assert "must fit beside the model (CUDA out of memory); use more ranks per replica" in lines[0]
    assert "lm loss" not in "".join(rank.stdout for rank in done.ranks)


# ---- replaced functions


@pytest.mark.parametrize(
    ("spy", "hook", "step"),
    [("replace_optimizer_step", "optimizer.step", 1), ("replace_training_log", "training_log", 1)],
)
def test_replaced_hook_ends_training_before_the_first_sync(
    tmp_path: Path, spy: str, hook: str, step: int
) -> None:
    """Would catch replicas that train side by side without a sync, or sync without losses."""
    run = run_edit(tmp_path, 2, 2, before=f"tests.host.spy_hooks:{spy}", check=False)
    assert [rank.returncode for rank in run.result.ranks] == [2, 2]
    message = f"the hook {hook}: was not called by Megatron's training loop in step {step}"
    assert message in run.result.ranks[0].stderr
    assert not (tmp_path / "sync.jsonl").exists()


def test_difference_beyond_rounding_ends_training_at_the_switch(tmp_path: Path) -> None:
    """Would catch replicas that were not averaged, and are equalized with a friendly message."""
    run = run_edit(tmp_path, 2, 2, before="tests.host.spy_hooks:turn_an_update", check=False)
    assert [rank.returncode for rank in run.result.ranks] == [3, 3]
    line = run.result.ranks[0].stderr
    assert "the replicas differ after the warm-up in unit " in line
    assert "and rounding explains at most " in line
    assert not (tmp_path / "sync.jsonl").exists()


# ---- devices of ranks


@pytest.mark.parametrize(("value", "may_share"), [(None, False), ("0", False), ("1", True)])
def test_ranks_share_a_gpu_only_where_nccl_is_told_to(
    monkeypatch: pytest.MonkeyPatch, value: str | None, may_share: bool
) -> None:
    """Catches replicas on one GPU that are refused NCCL although the variable allows it, and the
    reverse."""
    monkeypatch.delenv(SHARED_GPUS, raising=False)
    if value is not None:
        monkeypatch.setenv(SHARED_GPUS, value)
    assert _rank_device(torch.device("cpu"), 0).may_share is may_share
