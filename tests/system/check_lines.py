"""Command lines for `megatron-edit check` and the launcher, and the files that they use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import torch

from tests.harness import Flags, train
from tests.host.runs import edit_flags

NUM_TOKENS = 4000
VOCABULARY = 100  # of the corpus, with tokens below this
EDIT_OFF: Flags = {
    "use_edit": None, "edit_num_replicas": None, "edit_warmup_steps": None,
    "edit_sync_interval": None, "edit_digest_interval": None,
}  # fmt: skip


def stop_after_a_step() -> None:
    """A `before` hook: each rank prints a line and exits with 0 after its first step."""
    from megatron.training import training

    from tests.host.spy import shorten_grace

    shorten_grace()
    train_step = training.train_step

    def once(*args: object, **kwargs: object) -> None:
        train_step(*args, **kwargs)
        print("A STEP IS DONE", flush=True)
        os._exit(0)

    training.train_step = once


def make_files(folder: Path) -> None:
    """Create corpora, checkpoints and invalid files, under the names in the command lines."""
    write_corpus(folder / "good")
    for name in ("short", "foreign", "cut", "lonely", "a corpus"):
        for ending in (".bin", ".idx"):
            shutil.copyfile(folder / f"good{ending}", folder / f"{name}{ending}")
    _truncate(folder / "short.bin", 0.5)
    _truncate(folder / "cut.idx", 0.7)
    (folder / "foreign.idx").write_bytes(b"This is the index of something else." * 40)
    (folder / "lonely.bin").unlink()
    (folder / "file").write_text("neither a folder nor a checkpoint")
    (folder / "blend").write_text(f"1.0 {folder / 'nowhere'}")
    (folder / "spaces").write_text("0.3 a corpus")
    (folder / "more_spaces").write_text("0.3 a corpus 0.7 good good")
    (folder / "folder").mkdir()
    ends: Flags = {"train_iters": 1000, "save_interval": 4, "exit_interval": 4}
    train(edit_flags(2, save=folder / "saves", **ends), 2)
    train(edit_flags(2, **EDIT_OFF, save=folder / "stock", **ends), 2)
    shutil.copytree(folder / "saves", folder / "damaged")
    victim = next((folder / "damaged").glob("iter_*/*.distcp"))
    _truncate(victim, 0.5)


def write_corpus(prefix: Path, num_tokens: int = NUM_TOKENS) -> None:
    """Write a corpus with all tokens below VOCABULARY, with Megatron's builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    tokens = torch.arange(num_tokens, dtype=torch.int32) % VOCABULARY
    for document in tokens.split(200):
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def corpus(prefix: object, **flags: object) -> Flags:
    """Return flags of a training on files instead of mock data."""
    return {"mock_data": None, "data_path": prefix, "split": "90,10,0", **flags}


STAGES: Flags = {"global_batch_size": None, "micro_batch_size": 2}
# Overrides of the flags of a valid command line; "words" are appended unchanged.
# Paths are relative to the folder that `make_files` has filled.
RIGHT: dict[str, Flags] = {
    "plain": {},
    "stock": EDIT_OFF,
    "a-edit": {"edit_strategy": "a-edit", "edit_sync_interval": None},
    "overlap": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "corpus": corpus("good"),
    "weighted-corpus": corpus(["0.3", "good", "0.7", "good"], eval_iters=1),
    "space-in-a-path": corpus(["0.3", "a corpus", "0.7", "good"], eval_iters=1),
    "train-and-valid": corpus(None, split=None, train_data_path="good", valid_data_path="good"),
    "save": {"save": "new/saves", "save_interval": 2},
    "log-dir": {"edit_log_dir": "new/log"},
    "load": {"load": "saves", "train_iters": 1000},
    "load-stock": {"load": "stock", "train_iters": 1000},
    "load-nothing": {"load": "new", "save": "new", "save_interval": 2},
    "load-pretrained": {"load": "new", "pretrained_checkpoint": "stock", "finetune": True},
    "stages": STAGES | {"step_batch_size_schedule": "0:4 64:8"},
    "full-validation": corpus(
        None,
        split=None,
        train_data_path="good",
        valid_data_path="good",
        full_validation=True,
        multiple_validation_sets=True,
        eval_iters=1,
    ),
    "tau-too-long": {"edit_sync_interval": 99999999999999999999},
}
WRONG: dict[str, Flags] = {
    # unknown flags, and values that do not parse
    "one-letter": {"words": "--num-layer 3"},
    "spelling": {"words": "--hidden-sise 64"},
    "underscores": {"words": "--train_iters 5"},
    "equals": {"words": "--micro-batchsize=2"},
    "no-such-flag": {"words": "--of-another-trainer"},
    "stray-word": {"words": "extra"},
    "edit-spelling": {"words": "--edit-sync-intervall 5"},
    "stock-spelling": {**EDIT_OFF, "words": "--num-layer 3"},
    "not-a-number": {"lr": "fast"},
    "not-whole": {"num_layers": "many"},
    "no-value": {"words": "--seed"},
    "no-such-choice": {"lr_decay_style": "linearr"},
    "no-such-tokenizer": {"tokenizer_type": "NulTokenizer"},
    # flags of EDiT
    "replicas": {"edit_num_replicas": 3},
    "tau": {"edit_sync_interval": 0},
    "too-long-timeout": {"edit_timeout_seconds": 1e300},
    "too-large-rate": {"edit_outer_lr": 1e308},
    "empty-log-dir": {"words": "--edit-log-dir="},
    "without-use-edit": {"use_edit": None},
    "overlap-not-to-be-had": {"edit_sync_mode": "overlap"},
    "batch": {"global_batch_size": 9},
    "micro-batch": {"global_batch_size": 6},
    "layout": {"tensor_model_parallel_size": 2},
    "megatron-fsdp": {"use_megatron_fsdp": True},
    "format": {"save": "new", "save_interval": 2, "ckpt_format": "torch"},
    "save-that-cannot-be-made": {"save": "/proc/x", "save_interval": 2},
    "rendezvous-with-a-scheme": {"edit_replica_id": 0, "edit_rendezvous": "tcp://node0:29400"},
    "wandb-without-a-name": {"wandb_project": "edit"},
    # packages that scripts/setup.sh does not install
    "no-wandb": {"wandb_project": "edit", "wandb_exp_name": "a"},
    "no-nvrx": {"save": "new", "save_interval": 2, "async_save": True,
                "use_persistent_ckpt_worker": True},
    # accepted by Megatron, which fails later
    "second-stage": STAGES | {"step_batch_size_schedule": "0:4 64:6"},
    "smaller-stage": STAGES | {"step_batch_size_schedule": "0:8 64:4"},
    "no-stages": STAGES | {"step_batch_size_schedule": "4"},
    "ramp-up": {"rampup_batch_size": [4, 4, 16]},
    "full-validation-alone": {"full_validation": True, "eval_iters": 1},
    "several-sets-alone": {"multiple_validation_sets": True, "eval_iters": 1},
    "names-alone": {"validation_set_names": "a"},
    "eval-interval": {"eval_interval": 0},
    "log-interval": {"log_interval": 0},
    "workers": {"num_workers": -1},
    "no-length": {"train_iters": None},
    # Megatron's own validation
    "positions": {"seq_length": 128},
    "two-lengths": {"train_samples": 80},
    "no-rate": {"lr": None},
    "rates": {"min_lr": 1.0},
    "two-warmups": {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2},
    "two-types": {"fp16": True, "bf16": True},
    "no-interval": {"save": "new"},
    "heads": {"num_attention_heads": 3},
    "query-groups": {"group_query_attention": True, "num_query_groups": 3},
    "gathers-without-reduces": {"overlap_param_gather": True},
    "recompute": {"recompute_granularity": "full"},
    "top-k": {"num_experts": 2, "moe_router_topk": 8},
    "no-vocabulary": {"vocab_size": None},
    "no-tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "nowhere",
                     "vocab_size": None},
    "positions-of-mtp": {"mtp_num_layers": 1},
    # files
    "save-in-a-file": {"save": "/dev/null/x", "save_interval": 2},
    "save-is-a-file": {"save": "file", "save_interval": 2},
    "log-dir-is-a-file": {"edit_log_dir": "file"},
    "log-dir-in-a-file": {"edit_log_dir": "file/log"},
    "no-corpus": corpus("nowhere"),
    "half-a-corpus": corpus("lonely"),
    "truncated-corpus": corpus("short"),
    "foreign-index": corpus("foreign"),
    "truncated-index": corpus("cut"),
    "one-file-of-two": corpus("good.bin"),
    "folder-for-a-corpus": corpus("folder"),
    "one-of-two-corpora": corpus(["0.3", "good", "0.7", "nowhere"]),
    "no-valid-corpus": corpus(None, split=None, train_data_path="good", valid_data_path="gone"),
    "no-list-of-corpora": corpus(None, data_args_path="nowhere"),
    "listed-corpus": corpus(None, data_args_path="blend"),
    "small-vocabulary": corpus("good", vocab_size=62),
    "split": corpus("good", split="all"),
    "no-training-set": corpus(None, split=None, valid_data_path="good"),
    "no-validation-set": corpus(None, split=None, train_data_path="good", eval_iters=1),
    "no-validation-share": corpus("good", split="100,0,0", eval_iters=1),
    "several-sets-and-test": corpus(
        None, split=None, train_data_path="good", valid_data_path="good", test_data_path="good",
        full_validation=True, multiple_validation_sets=True),
    "too-few-names": corpus(
        None, split=None, train_data_path="good", valid_data_path=["good", "good", "good"],
        full_validation=True, multiple_validation_sets=True, validation_set_names="a"),
    "space-in-a-list": corpus(None, data_args_path="spaces"),
    "spaces-in-a-list": corpus(None, data_args_path="more_spaces"),
    # checkpoints
    "load-another-model": {"load": "saves", "train_iters": 1000, "num_layers": 3},
    "load-another-stock": {"load": "stock", "train_iters": 1000, "hidden_size": 128},
    "load-a-file": {"load": "file"},
    "load-damaged": {"load": "damaged", "train_iters": 1000},
    "load-no-such-step": {"load": "saves", "train_iters": 1000, "ckpt_step": 99},
    "load-back-to-warmup": {"load": "saves", "train_iters": 1000, "edit_warmup_steps": 50},
    "load-nowhere": {"load": "folder"},
    "load-nowhere-saving": {"load": "folder", "save": "new", "save_interval": 2},
    "load-must-exist": {"load": "folder", "exit_on_missing_checkpoint": True},
}  # fmt: skip


def argv_of(overrides: Flags) -> list[str]:
    """Return the arguments of a command line."""
    flags = dict(overrides)
    words = str(flags.pop("words", "")).split()
    return edit_flags(2, **flags) + words
