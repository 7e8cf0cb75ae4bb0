"""Run unmodified Megatron-LM on CPU with gloo, where there is no CUDA device.

Megatron asks for CUDA in some hundred places, but needs little of it. `enable_cpu_backend`
tells Megatron (and the training script) that one device exists, sends whatever it puts on that
device to the CPU, and makes streams do nothing. torch's own modules go on seeing no CUDA, so
checkpoints, data loaders and optimizers stay on their CPU paths.

The numbers are Megatron's own. What it cannot show: races between streams (there are none),
the hiding of communication behind computation, and anything in Transformer Engine or Apex.
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
from megatron_edit.host.cpu.gathers import separate_gathers
from megatron_edit.host.cpu.placement import (
    replace_compiler,
    replace_distributed,
    replace_placement,
)
from megatron_edit.host.seams.patching import Patcher

__all__ = ["cpu_argument_defaults", "cuda_available", "enable_cpu_backend"]

# Megatron insists on the second where it believes to see a GPU of before Blackwell. One thread
# for each rank: several ranks share the machine, and sums must not depend on its core count.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def cuda_available() -> bool:
    """Whether this machine has a real CUDA device, also once the CPU backend is on."""
    return bool(torch.cuda.is_available())


def enable_cpu_backend(patcher: Patcher) -> None:
    """Make Megatron run on CPU and gloo. Call it once, before megatron is imported.

    Does nothing where a real CUDA device is available, or where the backend is on already.
    Megatron binds a few torch functions by name when it is imported, so after
    ``patcher.undo()`` torch is as before, but a Megatron imported in between is of no use.

    Mutates: torch's attributes through `patcher`; environment defaults that are not set yet.
    """
    if is_enabled() or cuda_available():
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torch is imported: for this process the variable comes late
    for name, value in _ENVIRONMENT.items():
        patcher.set_default(os.environ, name, value)
    # torch's compiler sorts torch's functions by identity when it is first imported, which the
    # first optimizer does: let it see the originals.
    importlib.import_module("torch._dynamo")
    replace_device(patcher)
    replace_streams(patcher)
    replace_random(patcher)
    replace_placement(patcher)
    replace_distributed(patcher)
    separate_gathers(patcher)
    replace_compiler(patcher)
