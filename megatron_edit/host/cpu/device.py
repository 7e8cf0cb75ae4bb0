"""Emulates one CUDA device for Megatron on the CPU: queries, streams and random numbers."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

from megatron_edit.host.seams.patching import Patcher

_MARK = "_megatron_edit_cpu_backend"
# Loggers of warnings that are expected here: Megatron's tracker warns if the CPU generator changes
# while the device's is in use, and torch's extensions that there is no CUDA.
_LOGGERS = ("megatron.core.tensor_parallel.random", "torch.utils.cpp_extension")
_SUPPRESSED_MESSAGES = ("CPU RNG state changed", "No CUDA runtime is found")


def is_enabled() -> bool:
    """Whether the replacements are in place."""
    return hasattr(torch.cuda.is_available, _MARK)


def is_called_by_megatron() -> bool:
    """Whether the caller of our caller belongs to Megatron or to the training script."""
    asker: str = sys._getframe(2).f_globals.get("__name__", "")
    return asker == "__main__" or asker.partition(".")[0] == "megatron"


def no_op(*args: object, **kwargs: object) -> None:
    """Do nothing; replaces functions that only affect the device."""


def replace_device(patcher: Patcher) -> None:
    """Make Megatron, and no other module, see one CUDA device."""
    count = torch.cuda.device_count

    def is_available() -> bool:
        return is_called_by_megatron()

    def device_count() -> int:
        return 1 if is_called_by_megatron() else int(count())

    setattr(is_available, _MARK, True)
    # Compute capability of Ampere, for which Megatron enables no features of newer GPUs.
    properties = SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1
    )
    patcher.replace(torch.cuda, "is_available", is_available)
    patcher.replace(torch.cuda, "device_count", device_count)
    patcher.replace(torch.cuda, "current_device", lambda: 0)
    patcher.replace(torch.cuda, "set_device", no_op)
    patcher.replace(torch.cuda, "synchronize", no_op)
    patcher.replace(torch.cuda, "get_device_properties", lambda device=None: properties)


class _Event:
    """An event that is always complete."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    record = wait = synchronize = no_op

    def query(self) -> bool:
        """Return True: all work is complete."""
        return True


class _Stream:
    """A stream on which all work runs synchronously."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    wait_stream = wait_event = synchronize = no_op

    def record_event(self, event: object = None) -> object:
        """Return the given event, or a new one."""
        return event or _Event()


def replace_streams(patcher: Patcher) -> None:
    """Replace streams and events by ones without effect."""
    default = _Stream()
    patcher.replace(torch.cuda, "Event", _Event)
    patcher.replace(torch.cuda, "Stream", _Stream)
    # `nullcontext`, because Megatron enters the same stream context several times.
    patcher.replace(torch.cuda, "stream", nullcontext)
    patcher.replace(torch.cuda, "current_stream", lambda device=None: default)


def replace_random(patcher: Patcher) -> None:
    """Use the CPU generator as the device's generator."""

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    for module in (torch.cuda, torch.cuda.random):
        patcher.replace(module, "get_rng_state", get_rng_state)
        patcher.replace(module, "set_rng_state", set_rng_state)
        patcher.replace(module, "manual_seed", manual_seed)
    patcher.replace(torch.cuda, "default_generators", (torch.default_generator,))
    patcher.replace(torch.cuda, "_lazy_call", lambda function, **kwargs: function())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        patcher.replace(logger, "filters", [*logger.filters, _is_not_suppressed])

    def around(init: Callable[..., None]) -> Callable[..., None]:
        # A loader without its own generator draws a seed per epoch from the CPU's: a resumed run
        # would draw once more than an uninterrupted one, and its dropout would differ.
        @functools.wraps(init)
        def wrapper(self: DataLoader[object], *args: object, **kwargs: object) -> None:
            if kwargs.get("generator") is None:
                kwargs["generator"] = torch.Generator()
            init(self, *args, **kwargs | {"pin_memory": False})

        return wrapper

    patcher.wrap(DataLoader, "__init__", around)


def _is_not_suppressed(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_SUPPRESSED_MESSAGES)
