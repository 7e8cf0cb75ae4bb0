"""Imported once by the process from which all ranks are forked: the start of each is then short.

Megatron without CUDA has to be prepared before it is imported; the launcher then finds it as it
would have made it.
"""

from __future__ import annotations

import importlib
import warnings

from megatron_edit.host.cpu import enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher

with warnings.catch_warnings():  # GPU packages that Megatron misses; no matter here
    warnings.simplefilter("ignore", UserWarning)
    enable_cpu_backend(Patcher("Megatron-LM"))
    for name in (
        "megatron.training.training",
        "megatron.training.argument_utils",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.models.gpt.gpt_layer_specs",
    ):
        importlib.import_module(name)
