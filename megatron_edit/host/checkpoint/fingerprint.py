"""Arguments that define the model and the parallel layout: compared before a load."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag_of

_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "group_query_attention", "num_query_groups", "position_embedding_type", "normalization",
    "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "multi_latent_attention",
    "untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "mtp_num_layers", "optimizer",
)  # fmt: skip
_PARALLEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)  # fmt: skip


def model_of(args: Namespace) -> dict[str, object]:
    """Return Megatron's arguments that must be equal in a checkpoint and a run."""
    found = {name: _plain(getattr(args, name, None)) for name in _MODEL}
    if not found["group_query_attention"]:
        del found["num_query_groups"]  # Megatron sets it while it builds the model
    return found


def layout_of(args: Namespace) -> dict[str, int]:
    """Return the sizes of Megatron's groups inside a replica; 0 where one is not set."""
    return {name: int(getattr(args, name, None) or 0) for name in _PARALLEL}


def check_same_model(checkpoint: Path, saved: Mapping[str, object], args: Namespace) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UsageError: a value differs.
    """
    for name, mine in model_of(args).items():
        theirs = saved.get(name, mine)
        if theirs != mine:
            raise UsageError(
                f"--load {checkpoint}",
                f"is of another model: {flag_of(name)} is {theirs} there and {mine} here",
                "give the flags of the model that was saved, or load another checkpoint",
            )


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
