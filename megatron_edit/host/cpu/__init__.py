"""Runs unmodified Megatron-LM on CPU with gloo, on machines without a CUDA device.

Megatron uses CUDA in some hundred places, but needs little of it. `enable_cpu_backend` makes
Megatron (and the training script) see one device, places everything for that device on the CPU, and
replaces streams by no-ops. torch's own modules still see no CUDA, so that checkpoints, data loaders
and optimizers stay on their CPU paths.

The numerical results are Megatron's. It cannot show races between streams, the overlap of
communication and computation, or anything in Transformer Engine or Apex.
"""

from __future__ import annotations

import importlib
import os

import torch

from megatron_edit.host.cpu.arguments import cpu_argument_defaults
from megatron_edit.host.cpu.device import (
    is_enabled,
    replace_device,
    replace_random,
    replace_streams,
)
from megatron_edit.host.cpu.gathers import split_coalesced_gathers
from megatron_edit.host.cpu.placement import (
    replace_compiler,
    replace_distributed,
    replace_placement,
)
from megatron_edit.host.seams.patching import Patcher

__all__ = ["cpu_argument_defaults", "cuda_available", "enable_cpu_backend"]

# Megatron requires the second on GPUs older than Blackwell. One thread per rank: several ranks
# share the machine, and sums must not depend on the number of cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def cuda_available() -> bool:
    """Whether this machine has a real CUDA device, also if the CPU backend is enabled."""
    return bool(torch.cuda.is_available())


def enable_cpu_backend(patcher: Patcher) -> None:
    """Make Megatron run on CPU and gloo. Call it before megatron is imported.

    Does nothing if a real CUDA device is available, or if the backend is enabled already.
    Megatron binds some torch functions by name when it is imported: ``patcher.undo()`` restores
    torch, but a Megatron that was imported before can no longer be used.

    Mutates: torch's attributes, and environment variables that are not set, through `patcher`.
    """
    if is_enabled() or cuda_available():
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torch is imported already and ignores the variable
    for name, value in _ENVIRONMENT.items():
        patcher.set_default(os.environ, name, value)
    # torch's compiler classifies torch's functions by identity when it is first imported, which
    # making an optimizer does: import it before they are replaced.
    importlib.import_module("torch._dynamo")
    replace_device(patcher)
    replace_streams(patcher)
    replace_random(patcher)
    replace_placement(patcher)
    replace_distributed(patcher)
    split_coalesced_gathers(patcher)
    replace_compiler(patcher)
