"""Places tensors for CUDA devices on the CPU, and replaces NCCL by gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.host.cpu.device import is_called_by_megatron, no_op
from megatron_edit.host.seams.patching import Patcher

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
)


def _on_cpu(device: object) -> object:
    """Return `device`, or the CPU for a CUDA device or device index."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return _CPU if is_index or is_cuda else device


def _with_device_argument[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`, replacing CUDA in ``device=`` by the CPU."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return wrapper


def _with_leading_device[R](to: Callable[..., R]) -> Callable[..., R]:
    """Wrap ``Tensor.to`` or ``Module.to``, whose first argument may be a device."""
    to = _with_device_argument(to)

    @functools.wraps(to)
    def wrapper(self: object, *args: object, **kwargs: object) -> R:
        return to(self, *map(_on_cpu, args[:1]), *args[1:], **kwargs)

    return wrapper


def replace_placement(patcher: Patcher) -> None:
    """Place tensors and modules on the CPU, but show them to Megatron as on CUDA."""
    tensor_type = torch.Tensor.type

    def type_(self: Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
        # Megatron's optimizers sort parameters by the names of the CUDA tensor types.
        name = tensor_type(self, dtype, *args, **kwargs)
        if dtype is None and is_called_by_megatron():
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    for name in _FACTORIES:
        patcher.wrap(torch, name, _with_device_argument)
    patcher.wrap(torch.Tensor, "new_empty", _with_device_argument)
    patcher.wrap(torch.Tensor, "to", _with_leading_device)
    patcher.wrap(torch.nn.Module, "to", _with_leading_device)
    patcher.wrap(torch.nn.Module, "to_empty", _with_device_argument)
    patcher.replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    patcher.replace(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
    patcher.replace(torch.Tensor, "type", type_)
    patcher.replace(torch.Tensor, "record_stream", no_op)
    # Megatron copies values for the host (split sizes) only from tensors on the device.
    patcher.replace(torch.Tensor, "is_cuda", property(lambda self: is_called_by_megatron()))


def replace_distributed(patcher: Patcher) -> None:
    """Use gloo for process groups with NCCL, and drop barriers' device ids, unsupported by gloo."""

    def on_gloo[R](function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> R:
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            return function(*("gloo" if arg == "nccl" else arg for arg in args), **kwargs)

        return wrapper

    def without_devices[R](barrier: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(barrier)
        def wrapper(*args: object, device_ids: object = None, **kwargs: object) -> R:
            return barrier(*args, **kwargs)

        return wrapper

    patcher.wrap(dist, "init_process_group", on_gloo)
    patcher.wrap(dist, "new_group", on_gloo)
    patcher.wrap(dist, "barrier", without_devices)


def replace_compiler(patcher: Patcher) -> None:
    """Disable Megatron's "jit fuser", because compiling takes minutes in each rank."""
    patcher.replace(torch, "compile", _compile_nothing)


def _compile_nothing(model: object = None, **options: object) -> object:
    """Replace ``torch.compile``, as a function or decorator, and return the model unchanged."""
    return (lambda function: function) if model is None else model
