"""Writes quantized (8-bit) parameters (``--fp8-param-gather``) by Megatron's quantization.

A main shard cannot be copied into such a parameter, because its scale depends on all ranks that
have a shard of it. Megatron's function takes lists of parameters and is collective over these
ranks, so that all of them call it once for each unit and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from megatron.core import fp8_utils

from megatron_edit.errors import UsageError
from megatron_edit.host.seams.megatron import QuantizingOptimizer


def is_quantized(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is stored in 8 bits."""
    is_grouped = getattr(fp8_utils, "is_grouped_tensor_with_quantized_storage", None)  # from 0.19
    return bool(fp8_utils.is_float8tensor(parameter) or (is_grouped and is_grouped(parameter)))


def quantizers_of(
    optimizers: Iterable[object], unit_of: Mapping[torch.nn.Parameter, tuple[str, str]]
) -> dict[str, Callable[[], None]]:
    """Return, for each unit with quantized parameters, a function that writes them.

    Args:
        optimizers: Megatron's distributed optimizers, in the same order on all ranks.
        unit_of: name and unit of each parameter.

    Raises:
        UsageError: this Megatron does not support it (older than 0.19).
    """
    parts: dict[str, list[Callable[[], None]]] = {}
    for optimizer in optimizers:
        if not hasattr(optimizer, "_expand_quantized_param_shard_for_cast"):
            raise UsageError(
                "--fp8-param-gather",
                "with --use-edit it needs megatron-core 0.19 or newer",
                "use a newer Megatron-LM, or drop the flag",
            )
        for unit, quantize in _of_optimizer(optimizer, unit_of).items():
            parts.setdefault(unit, []).append(quantize)
    return {unit: _call_in_order(quantizers) for unit, quantizers in parts.items()}


def _call_in_order(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call_all() -> None:
        for function in functions:
            function()

    return call_all


def _of_optimizer(
    optimizer: QuantizingOptimizer, unit_of: Mapping[torch.nn.Parameter, tuple[str, str]]
) -> dict[str, Callable[[], None]]:
    units: dict[str, set[int]] = {}
    for parameter in optimizer._get_fp8_params_and_shard_fp32_from_fp8()[0]:
        units.setdefault(unit_of[parameter][1], set()).add(id(parameter))
    return {unit: _quantizer(optimizer, chosen) for unit, chosen in units.items()}


def _quantizer(optimizer: QuantizingOptimizer, chosen: set[int]) -> Callable[[], None]:
    def quantize() -> None:
        lists: tuple[list[object], list[object], list[object]] = ([], [], [])
        # Read at each call: a load may have replaced the tensors of main shards.
        for parameter, main, start in zip(
            *optimizer._get_fp8_params_and_shard_fp32_from_fp8(), strict=True
        ):
            if id(parameter) in chosen:
                # The function takes the members of a group of parameters.
                parts = optimizer._expand_quantized_param_shard_for_cast(parameter, main, start)
                for target, part in zip(lists, parts, strict=True):
                    target.extend(part)
        fp8_utils.quantize_param_shard(*lists, optimizer.data_parallel_group)

    return quantize
