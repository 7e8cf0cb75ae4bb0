"""Pretrain a GPT with Megatron without a clone of Megatron-LM.

The megatron-core wheel contains `megatron.training` but not `pretrain_gpt.py`. This script takes
the same flags and gives the same losses, bit for bit, for pretraining on mock or indexed data. It
refuses fine-tuning, packed sequences, multi-token prediction and distillation.

    torchrun --nproc-per-node 2 -m megatron_edit scripts/pretrain_gpt.py --num-layers 2 ...
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

MODEL_INPUTS = ("tokens", "position_ids", "attention_mask", "labels")
# Fields of GPTDatasetConfig whose argument has another name.
RENAMED = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}
UNSUPPORTED = ("sft", "fim_data", "mtp_num_layers", "logits_load_dir", "per_dataset_sequences_path")
PACKED = ("hybrid_context_parallel", "dataloader_inter_document_masking")


def get_batch(data_iterator: Any, vp_stage: int | None) -> Any:
    """Return this rank's part of the next micro-batch; empty on stages that need none."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        keys = (*MODEL_INPUTS, "loss_mask")
        batch = {key: sample[key].cuda(non_blocking=True) for key in keys if key in sample}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, False, mpu.get_context_parallel_group())


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """Return the sum of the token losses, the number of tokens, and both for Megatron's report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        check, message = get_rerun_state_machine().validate_result, "the loss is not finite"
        check(loss, lambda value: ~torch.isfinite(value), message)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Run a forward pass; returns the token losses, and the function that reduces them."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    tokens, position_ids, attention_mask, labels = (batch.get(k) for k in MODEL_INPUTS)
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, batch.get("loss_mask"))


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Return training, validation and test sets of the given sizes, on the ranks that read them."""
    args = get_args()
    names = {f.name: RENAMED.get(f.name, f.name) for f in fields(GPTDatasetConfig) if f.init}
    settings = {name: getattr(args, arg) for name, arg in names.items() if hasattr(args, arg)}
    settings["blend"], settings["blend_per_split"] = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(**settings, tokenizer=build_tokenizer(args))
    on_outer_stage = is_first_or_last_pipeline_stage(vp_stage)
    reads_data = mpu.get_tensor_model_parallel_rank() == 0 and on_outer_stage
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: reads_data, config).build()


def main() -> None:
    """Parse Megatron's flags and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    if unsupported := [name for name in UNSUPPORTED + PACKED if getattr(args, name)]:
        raise SystemExit(f"{unsupported}: not in this script; use Megatron-LM's pretrain_gpt.py")
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
