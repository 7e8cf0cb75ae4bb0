"""Assigns parameters of Megatron's GPT models to sync units, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from megatron_edit.constants import EMBEDDING, FINAL, LAYER, MTP
from megatron_edit.errors import UsageError
from megatron_edit.host.seams.megatron import ModelChunk

_LAYER = re.compile(r"^(?:decoder|encoder)\.layers\.(\d+)\.")
_MTP = re.compile(r"^mtp\.(?:layers\.)?(\d+)\.")
_FINAL = re.compile(r"^(?:(?:decoder|encoder)\.final_(?:layer)?norm|output_layer)\.")
_EMBEDDING = re.compile(r"^(?:embedding|position_embedding)\.")


def unit_of(name: str, parameter: torch.nn.Parameter, model: ModelChunk) -> str:
    """Return the name of a parameter's unit.

    Layers are numbered as Megatron numbers them over all pipeline stages (`layer_number`, from 1).

    Args:
        name: name from `model.named_parameters()`.
        parameter: the parameter; a tied copy of the embedding belongs to `embedding`.
        model: the unwrapped model chunk.

    Raises:
        UsageError: the parameter belongs to no known unit.
    """
    if getattr(parameter, "shared_embedding", False) or _EMBEDDING.match(name):
        return EMBEDDING
    if found := _LAYER.match(name):
        stack = getattr(model, name.partition(".")[0])
        return f"{LAYER}.{stack.layers[int(found.group(1))].layer_number}"
    if found := _MTP.match(name):
        return f"{MTP}.{found.group(1)}"
    if _FINAL.match(name):
        return FINAL
    raise UsageError(
        f"model parameter {name}",
        "belongs to no supported sync unit (embedding, layers, final, mtp)",
        "train a GPT model, or report this model as unsupported",
        is_local=True,
    )


def named_units(model: ModelChunk) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    """Yield name, parameter and unit of every trainable parameter of an unwrapped model chunk."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, unit_of(name, parameter, model)
