"""Chooses the device of training, CUDA or CPU; the CPU never silently replaces a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_edit.config import EditConfig
from megatron_edit.constants import AUTO, CPU
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

ROOT = Path("/")
# Files by which drivers show their GPUs, and the variables by which a user hides them.
_NVIDIA = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*")
_AMD = ("dev/kfd",)
_HIDING = {
    _NVIDIA: ("CUDA_VISIBLE_DEVICES",),
    _AMD: ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
_NONE = ("", "-1", "NoDevFiles")  # SLURM sets the last for jobs without GPUs


def visible_gpus(env: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Return paths of driver files for GPUs that the user has not hidden, without using torch.

    Args:
        env: environment; an empty `CUDA_VISIBLE_DEVICES` hides GPUs.
    """
    return [
        str(path)
        for patterns, variables in _HIDING.items()
        if not any(env.get(name) in _NONE for name in variables)
        for path in _first_found(patterns, root)
    ]


def _first_found(patterns: tuple[str, ...], root: Path) -> Iterator[Path]:
    for pattern in patterns:
        if found := sorted(root.glob(pattern)):
            yield from found
            return


def unusable_gpus(env: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Describe the GPUs of this machine that torch cannot use, and why; None if there are none.

    Args:
        env: see `visible_gpus`.
    """
    gpus = visible_gpus(env, root)
    if torch.cuda.is_available() or not gpus:
        return None
    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    reason = (
        f"built for {built_for}, does not find (driver, container, LD_LIBRARY_PATH?)"
        if built_for
        else "built for the CPU, cannot use"
    )
    more = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    return f"the machine has GPUs ({gpus[0]}{more}) that torch {torch.__version__}, {reason}"


def choose_device(config: EditConfig, root: Path = ROOT) -> torch.device:
    """Return the requested device; `auto` uses CUDA, and the CPU only if the machine has no GPU.

    Requesting the CPU hides the GPUs from this process, which must not have used them yet.

    Args:
        root: root of the file system in which drivers show their GPUs.

    Raises:
        UsageError: CUDA was requested and there is none, or torch cannot use the machine's GPUs.
    """
    if config.device == CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    unusable = unusable_gpus(os.environ, root)
    if config.device == AUTO and unusable is None:
        return torch.device("cpu")
    raise UsageError(
        f"{flag('device')} {config.device}",
        unusable or "no CUDA device was found",
        f"install a torch that can use them, or train on the CPU with {flag('device')} cpu"
        if unusable
        else f"use {flag('device')} auto or cpu",
        is_local=True,  # other machines of the job may have what this one lacks
    )
