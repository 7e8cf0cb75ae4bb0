"""Imports for the process from which all ranks are forked, so that each rank starts fast.

Megatron without CUDA has to be patched before it is imported, as the launcher does.
"""

from __future__ import annotations

import importlib
import warnings

from megatron_edit.host.cpu import enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher

with warnings.catch_warnings():  # about missing GPU packages
    warnings.simplefilter("ignore", UserWarning)
    enable_cpu_backend(Patcher("Megatron-LM"))
    for name in (
        "megatron.training.training",
        "megatron.training.argument_utils",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.models.gpt.gpt_layer_specs",
    ):
        importlib.import_module(name)
