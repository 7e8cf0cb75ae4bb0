"""Parallel layouts of a replica: the number of its ranks, and Megatron's flags."""

from __future__ import annotations

from typing import NamedTuple

from tests.harness import Flags


class Layout(NamedTuple):
    """A parallel layout of a replica.

    Attributes:
        ranks: number of ranks of one replica.
        flags: flags that differ from those of the tiny GPT.
    """

    ranks: int
    flags: Flags


GATHER: Flags = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 20000,
}
# Every rank holds everything (M = 1); Megatron gathers nothing, so EDiT cannot overlap.
PLAIN_DDP: Flags = {"use_distributed_optimizer": False, "overlap_param_gather": False}
_MOE: Flags = {
    "num_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
    "disable_bias_linear": True,
}
_LLAMA: Flags = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "group_query_attention": True, "num_query_groups": 2, "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
_VPP: Flags = {"pipeline_model_parallel_size": 2, "num_layers": 4,
               "num_layers_per_virtual_pipeline_stage": 1, "micro_batch_size": 1}  # fmt: skip
_TP_MOE: Flags = {**_MOE, "tensor_model_parallel_size": 2, "sequence_parallel": True,
                  "expert_model_parallel_size": 2}  # fmt: skip

# Megatron aligns the gathers of interleaved stages by default ("vpp"), refuses experts with TP
# but without sequence parallelism, and by default gives experts the same TP as the other layers;
# its alltoall dispatcher then gathers unequal numbers of tokens, which gloo does not support.
LAYOUTS = {
    "plain": Layout(1, {}),
    "m2": Layout(2, {}),
    "tp2": Layout(2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2": Layout(2, {"context_parallel_size": 2}),  # attention: see context_parallel.py
    "pp2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "pp2-untied": Layout(
        2, {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    ),
    "vpp": Layout(2, _VPP),
    "tp2-pp2": Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "ep2": Layout(2, {**_MOE, "expert_model_parallel_size": 2}),
    "tp2-ep2": Layout(2, {**_TP_MOE, "expert_tensor_parallel_size": 1}),
    "tp2-ep2-etp2": Layout(4, {**_TP_MOE, "moe_token_dispatcher_type": "allgather"}),
    "moe": Layout(1, _MOE),
    "ep2-router-bias": Layout(
        2, {**_MOE, "expert_model_parallel_size": 2, "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid"},
    ),
    "two-instances": Layout(2, {"num_distributed_optimizer_instances": 2}),
    "two-instances-m2": Layout(
        4, {"num_distributed_optimizer_instances": 2, "micro_batch_size": 1},
    ),
    "llama": Layout(2, {**_LLAMA, "bf16": True}),
    "accumulation": Layout(2, {"micro_batch_size": 1, "global_batch_size": 16}),
    "recompute-full": Layout(
        2, {"recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1},
    ),
    "recompute-selective": Layout(2, {"recompute_granularity": "selective"}),
    "bf16": Layout(2, {"bf16": True}),
    "fp16": Layout(2, {"fp16": True, "initial_loss_scale": 1024}),
    "grads-in-bf16": Layout(2, {"bf16": True, "grad_reduce_in_bf16": True}),
    "average-in-collective": Layout(2, {"ddp_average_in_collective": True}),
    "many-buckets": Layout(2, {"ddp_bucket_size": 3000}),
    "one-bucket": Layout(2, {"ddp_bucket_size": 10**9}),
    "unaligned-gather": Layout(2, {**_VPP, "no_align_param_gather": True}),
}  # fmt: skip
