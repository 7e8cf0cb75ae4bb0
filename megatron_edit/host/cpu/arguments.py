"""Megatron's arguments for runs without CUDA kernels and Transformer Engine."""

from __future__ import annotations

from megatron_edit.constants import ADAM, MUON

# With "medium", Muon's matrix products are rounded to bf16 on CPU, too.
MUON_DEFAULTS: dict[str, object] = {"muon_fp32_matmul_prec": "high"}


def cpu_argument_defaults(optimizer: str = ADAM) -> dict[str, object]:
    """Return names and values of Megatron's parsed arguments that a run on CPU needs.

    Set after parsing and before Megatron's validation, they let a command line for GPUs run
    unchanged. Each selects the plain implementation of the same mathematics, so that the loss
    differs by rounding only, with two exceptions: fp8 and fp4 are replaced by the precision of the
    other flags, and GELU is exact, while the fused form approximates it by tanh. Fusions by
    torch's compiler are not listed: on CPU they are plain functions.

    Args:
        optimizer: value of `--optimizer`.
    """
    return (MUON_DEFAULTS if optimizer == MUON else {}) | {
        "distributed_backend": "gloo",
        # Transformer Engine
        "transformer_impl": "local",
        "te_rng_tracker": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,  # needs Transformer Engine, and all is on the CPU
        "fp8": None,
        "fp8_param_gather": False,
        "fp4": None,
        "fp4_param_gather": False,
        "tp_comm_overlap": False,
        "cuda_graph_impl": "none",
        "cuda_graph_scope_deprecated": None,
        "cuda_graph_modules": [],
        "enable_cuda_graph": False,
        "external_cuda_graph": False,
        # Apex, or Megatron's CUDA extensions
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "bias_gelu_fusion": False,  # refused by sequential experts
        # Kernels for mixtures of experts
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        # NCCL and the device's own counters
        "nccl_ub": False,
        "use_sharp": False,
        "high_priority_stream_groups": [],
        "nccl_communicator_config_path": None,
        "log_device_memory_used": False,
        "log_memory_to_tensorboard": False,
        "record_memory_history": False,
        "profile": False,
    }
