"""Trains a tiny GPT by Megatron-Bridge: `bridge_cases.py JSON`.

JSON has `settings` of EDiT, values of the `config` by path, `how` the callback is used, and the
folder `out`, in which each replica writes a hash of its parameters after every step.
"""

# ruff: noqa: E402 - Megatron is imported after `prepare_cpu`.
from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_edit.bridge import EditCallback, edit_recipe
from megatron_edit.bridge.cpu import prepare_cpu

prepare_cpu()

import megatron.bridge.training.initialize as initialize
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

SEQ_LENGTH, STEPS = 32, 9


def recipe() -> ConfigContainer:
    """Return the configuration of a GPT with two layers."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            ffn_hidden_size=64,
            seq_length=SEQ_LENGTH,
            vocab_size=128,
            transformer_layer_spec=local_layer_spec,
            position_embedding_type="rope",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            persist_layer_norm=False,
        ),
        train=TrainingConfig(train_iters=STEPS, global_batch_size=8, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=4, eval_iters=2),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=SEQ_LENGTH,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            persistent_workers=False,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=CheckpointConfig(),
        dist=DistributedInitConfig(distributed_backend="gloo"),
        rng=RNGConfig(seed=1234),
    )


class ParameterHashes:
    """A callback that writes a hash of this rank's parameters after every step."""

    def __init__(self, folder: Path, rank: str) -> None:
        self._file = folder / f"hashes-{rank}.jsonl"

    def on_train_step_end(self, context: Any) -> None:
        """Append step, loss and hash."""
        content = hashlib.sha256()
        for chunk in context.model:
            for parameter in chunk.parameters():
                content.update(parameter.detach().numpy().tobytes())
        step = int(context.state.train_state.step) + 1
        losses = {name: float(loss) for name, loss in context.loss_dict.items()}
        line = {"step": step, "losses": losses, "hash": content.hexdigest()}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


class ReplacedStep(EditCallback):
    """A callback after which a script replaces `optimizer.step` by Megatron's own."""

    def on_train_start(self, context: Any) -> None:
        """Replace it."""
        super().on_train_start(context)
        step = type(context.optimizer).step
        context.optimizer.step = lambda: step(context.optimizer)


def build(values: Mapping[str, object]) -> ConfigContainer:
    """Return the recipe with other values, by path."""
    config = recipe()
    for path, value in values.items():
        owner: Any = config
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


def main(given: Mapping[str, Any]) -> None:
    """Train."""
    how, values = given.get("how", ""), given.get("config", {})
    hashes = ParameterHashes(Path(given["out"]), os.environ["RANK"])
    if how == "stock":
        initialize.compile_helpers = lambda: None  # the wheel of megatron-core has it compiled
        pretrain(build(values), forward_step, callbacks=[hashes])
        return
    config = edit_recipe(**given["settings"])(build)(values)
    kind = ReplacedStep if how == "replaced step" else EditCallback
    with kind(config) as edit:
        trained = copy.deepcopy(config) if how == "copy" else config
        callbacks = [hashes] if how == "no callback" else [edit, hashes]
        pretrain(trained, forward_step, callbacks=callbacks)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
