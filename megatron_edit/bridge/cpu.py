"""Prepares a script that imports Megatron-Bridge for a machine without CUDA."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from megatron_edit.host.cpu import cuda_available, enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher

# Megatron-Bridge imports these without a condition, and calls nothing of them in pretraining. The
# first package has no build without CUDA, the second none for glibc before 2.39.
_MODULES = ("transformer_engine", "transformer_engine.pytorch", "nvidia_resiliency_ext",
            "nvidia_resiliency_ext.inprocess")  # fmt: skip
# Imported before: Megatron itself must find these packages missing.
_OF_MEGATRON = ("core.dist_checkpointing", "core.optimizer", "core.models.gpt", "training")
_OF_BRIDGE = ("bridge.training.pretrain", "bridge.training.gpt_step")


class _Empty(type):
    """The type of a class, each public attribute of which is again such a class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


def prepare_cpu() -> None:
    """Make Megatron run on CPU and gloo in this process, and import Megatron-Bridge.

    While Megatron-Bridge is imported, and only then, empty classes take the place of Transformer
    Engine and NVIDIA's resiliency extension where these are not installed. Call it before megatron
    is imported. Does nothing where CUDA is available. It is not undone.
    """
    if cuda_available():
        return
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    enable_cpu_backend(Patcher("the host"))
    for name in _OF_MEGATRON:
        importlib.import_module(f"megatron.{name}")
    logging.getLogger("megatron.bridge.utils.import_utils").setLevel(logging.CRITICAL)
    missing = [name for name in _MODULES if find_spec(name.partition(".")[0]) is None]
    empty: Any = {name: _Empty(name, (), {"__spec__": ModuleSpec(name, None), "__path__": []})
                  for name in missing}  # fmt: skip
    sys.modules.update(empty)
    try:
        for name in _OF_BRIDGE:
            importlib.import_module(f"megatron.{name}")
    finally:
        for name in missing:
            del sys.modules[name]
