"""What Megatron's arguments must be where CUDA kernels and Transformer Engine are missing."""

from __future__ import annotations

from megatron_edit.constants import ADAM, MUON

# Beside it, "medium" lets matrix products of Muon round to bf16 on CPU, too.
MUON_DEFAULTS: dict[str, object] = {"muon_fp32_matmul_prec": "high"}


def cpu_argument_defaults(optimizer: str = ADAM) -> dict[str, object]:
    """Names and values of Megatron's parsed arguments that a run on CPU needs.

    Setting them after parsing and before Megatron's own validation lets a command line that was
    written for GPUs run unchanged. Each picks the plain implementation of the same mathematics,
    so that the loss differs by rounding, with two exceptions: fp8 and fp4 become the precision
    that was asked for beside them, and GELU becomes the exact one, which the fused form
    approximates by tanh. The fusions that Megatron leaves to torch's compiler are not here: on
    CPU they are plain functions.

    Args:
        optimizer: the value of `--optimizer`.
    """
    return (MUON_DEFAULTS if optimizer == MUON else {}) | {
        "distributed_backend": "gloo",
        # Transformer Engine
        "transformer_impl": "local",
        "te_rng_tracker": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,  # stands on it, and all is on the CPU
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
        "bias_gelu_fusion": False,  # refused by experts that run one after the other
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
