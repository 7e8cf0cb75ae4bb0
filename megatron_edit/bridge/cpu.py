"""Prepares a script that imports Megatron-Bridge for a machine without CUDA."""

from __future__ import annotations

import warnings

from megatron_edit.host.cpu import enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher


def prepare_cpu() -> None:
    """Make Megatron run on CPU and gloo in this process. Call it before megatron is imported.

    Does nothing where CUDA is available. It is not undone.
    """
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    enable_cpu_backend(Patcher("the host"))
