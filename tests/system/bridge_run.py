"""Runs a script that trains with Megatron-Bridge on the CPU: `bridge_run.py SCRIPT [ARGUMENTS]`.

Megatron-Bridge imports two packages that have no build for this: `transformer_engine`
(`bridge/peft/lora_layers.py`) and, with glibc before 2.39, `nvidia_resiliency_ext` 0.6
(`bridge/training/pretrain.py`). While Megatron-Bridge is imported, and only then, empty modules
take their place. Nothing of them is called in pretraining.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_edit.bridge.cpu import prepare_cpu

MISSING = ("transformer_engine", "transformer_engine.pytorch", "nvidia_resiliency_ext",
           "nvidia_resiliency_ext.inprocess")  # fmt: skip


class Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_bridge() -> None:
    """Import Megatron-Bridge, with empty modules in place of missing ones."""
    prepare_cpu()
    # Megatron must find these packages missing.
    for name in ("core.dist_checkpointing", "core.optimizer", "core.models.gpt", "training"):
        importlib.import_module(f"megatron.{name}")
    logging.getLogger("megatron.bridge.utils.import_utils").setLevel(logging.CRITICAL)
    added = [name for name in MISSING if name.partition(".")[0] not in found()]
    for name in added:
        module = Empty(name)
        module.__spec__ = ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        sys.modules[name] = module
    sys.modules["transformer_engine.pytorch"].ops = Empty("ops")  # type: ignore[attr-defined]
    importlib.import_module("megatron.bridge.training.pretrain")
    importlib.import_module("megatron.bridge.training.gpt_step")
    for name in added:
        del sys.modules[name]


def found() -> set[str]:
    """Return which of the packages are installed."""
    tops = {name.partition(".")[0] for name in MISSING}
    specs = {top: importlib.util.find_spec(top) for top in tops}
    return {top for top, spec in specs.items() if spec is not None and spec.origin is not None}


if __name__ == "__main__":
    import_bridge()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
