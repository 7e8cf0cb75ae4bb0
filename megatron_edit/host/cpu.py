"""Runs unmodified Megatron-LM on CPU with gloo, on machines without a CUDA device.

Megatron uses CUDA in some hundred places, but needs little of it. `enable_cpu_backend` makes
Megatron (and the training script) see one device, places everything for that device on the CPU, and
replaces streams by no-ops. torch's own modules still see no CUDA, so that checkpoints, data loaders
and optimizers stay on their CPU paths.

The numerical results are Megatron's. It cannot show races between streams, the overlap of
communication and computation, or anything in Transformer Engine or Apex.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader

from megatron_edit.constants import ADAM, MUON
from megatron_edit.host.seams.megatron import NormConfig, SavePlanner
from megatron_edit.host.seams.patching import Patcher

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


# ---- Megatron's arguments for runs without CUDA kernels and Transformer Engine


# With "medium", Muon's matrix products are rounded to bf16 on CPU, too.
MUON_DEFAULTS: dict[str, object] = {"muon_fp32_matmul_prec": "high"}


def cpu_argument_defaults(optimizer: str = ADAM) -> dict[str, object]:
    """Return names and values of Megatron's parsed arguments that a run on CPU needs.

    Set after parsing and before Megatron's validation, they let a command line for GPUs run
    unchanged. Each selects the plain implementation of the same mathematics, so that the loss
    differs by rounding only, with two exceptions: fp8 and fp4 are replaced by the precision of the
    other flags, and GELU is exact, while the fused form approximates it by tanh. Fusions by
    torch's compiler are not listed: on CPU they are plain functions.

    Args:
        optimizer: value of `--optimizer`.
    """
    return (MUON_DEFAULTS if optimizer == MUON else {}) | {
        "distributed_backend": "gloo",
        # Transformer Engine
        "transformer_impl": "local",
        "te_rng_tracker": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,  # needs Transformer Engine, and all is on the CPU
        "fp8": None,
        "fp8_param_gather": False,
        "fp4": None,
        "fp4_param_gather": False,
        "tp_comm_overlap": False,
        "cuda_graph_impl": "none",
        "cuda_graph_scope_deprecated": None,
        "cuda_graph_modules": [],
        "enable_cuda_graph": False,
        "external_cuda_graph": False,
        # Apex, or Megatron's CUDA extensions
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "bias_gelu_fusion": False,  # refused by sequential experts
        # Kernels for mixtures of experts
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        # NCCL and the device's own counters
        "nccl_ub": False,
        "use_sharp": False,
        "high_priority_stream_groups": [],
        "nccl_communicator_config_path": None,
        "log_device_memory_used": False,
        "log_memory_to_tensorboard": False,
        "record_memory_history": False,
        "profile": False,
    }


# ---- Emulates one CUDA device for Megatron on the CPU: queries, streams and random numbers


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


# ---- Places tensors for CUDA devices on the CPU, and replaces NCCL by gloo


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


# ---- Replaces gathers of Megatron that do not work with gloo
#
# Coalesced gathers are split into single ones, because torch's coalesced gather corrupts the
# heap: two threads of a gloo group finish its operations, and each assigns the operation's name
# to a string of the group without a lock (``ProcessGroupGloo::runLoop``, seen in torch 2.13.0).
# Only the name ``ALLGATHER_COALESCED`` is too long for the string's inline storage, so that two
# such operations that end at the same time free the same heap block twice.


# Coalesced -> single; names in newer torch, then in older (2.13 has both).
_SINGLE = {
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "_allgather_base",
}


def split_coalesced_gathers(patcher: Patcher) -> None:
    """Replace coalesced gathers by single ones with a common handle.

    The gathered bits, and the order in which ranks issue the gathers, are the same.

    Mutates: the class of torch's process groups, through `patcher`.
    """
    for coalesced, single in _SINGLE.items():
        if hasattr(dist.ProcessGroup, coalesced):
            patcher.wrap(
                dist.ProcessGroup, coalesced, _one_by_one(getattr(dist.ProcessGroup, single))
            )


class _Gathers:
    """Handle of several gathers."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all gathers are complete."""
        for work in self._works:
            work.wait()


def _one_by_one(
    single: Callable[..., dist.Work],
) -> Callable[[Callable[..., object]], Callable[..., _Gathers]]:
    def around(coalesced: Callable[..., object]) -> Callable[..., _Gathers]:
        @functools.wraps(coalesced)
        def gather(
            group: dist.ProcessGroup,
            outputs: Sequence[torch.Tensor],
            inputs: Sequence[torch.Tensor],
            *options: object,
        ) -> _Gathers:
            pairs = zip(outputs, inputs, strict=True)
            return _Gathers([single(group, output, part, *options) for output, part in pairs])

        return gather

    return around


def patch_unequal_gathers(patcher: Patcher) -> None:
    """Make `all_gather` accept tensors of different sizes from the ranks, by a broadcast from each.

    Megatron's layer-wise distributed optimizer gathers parameters in that way, after the step or,
    bucket by bucket, in the forward pass. NCCL supports it, gloo does not.

    Mutates: `torch.distributed`, through `patcher`.
    """
    patcher.wrap(dist, "all_gather", _by_broadcasts(dist.broadcast))


def _by_broadcasts(
    broadcast: Callable[..., dist.Work | None],
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def around(equal: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(equal)
        def gather(
            tensor_list: Sequence[torch.Tensor],
            tensor: torch.Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> object:
            if len({output.numel() for output in tensor_list}) == 1:
                return equal(tensor_list, tensor, group=group, async_op=async_op)
            tensor_list[dist.get_rank(group)].copy_(tensor)
            works = [
                broadcast(output, group=group, group_src=rank, async_op=async_op)
                for rank, output in enumerate(tensor_list)
                if output.numel()
            ]
            return _Gathers([work for work in works if work is not None]) if async_op else None

        return gather

    return around


# ---- Makes Megatron's data loaders and asynchronous saves work on the CPU


def patch_checkpoints(patcher: Patcher) -> None:
    """Make Megatron's asynchronous saves and torch's data loader work on the CPU. Imports Megatron.

    Mutates: through `patcher` Megatron's asynchronous writers, and torch's data loader.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    patcher.wrap(DataLoader, "__init__", _with_own_generator)
    patcher.wrap(filesystem_async.FileSystemWriterAsync, "prepare_write_data", _with_snapshots)
    if not hasattr(filesystem_async, "get_write_results_queue"):
        return  # megatron-core 0.16 always spawns
    # With `spawn` the queue imports the training script again in each rank, which takes seconds.
    patcher.wrap(filesystem_async, "get_write_results_queue", _with_fork_queue)
    # Fork the process that writes asynchronous saves, so that this backend is enabled there, too.
    patcher.wrap(async_utils.PersistentAsyncCaller, "_get_process", _start_forked)


def _with_fork_queue[R](queue: Callable[..., R]) -> Callable[..., R]:
    return functools.partial(queue, mp_mode="fork")


def _start_forked(start: Callable[..., object]) -> object:
    """Wrap a bound class method so that its second argument, the start method, is `fork`."""
    return staticmethod(lambda rank, mp_mode="fork", *rest, **kw: start(rank, "fork", *rest, **kw))


def _with_snapshots(prepare: Callable[..., None]) -> Callable[..., None]:
    """Copy tensors before asynchronous saves: Megatron only copies from the device to the host, so
    that training would change tensors on the CPU before they are written."""

    @functools.wraps(prepare)
    def wrapper(self: object, plan: object, planner: SavePlanner) -> None:
        from megatron.training import get_args

        prepare(self, plan, Snapshots(planner) if get_args().async_save else planner)

    return wrapper


class Snapshots:
    """A planner of torch that returns copies of tensors, in memory shared with the writing process.

    Other tensors would be copied once more when they are sent to that process.

    Args:
        planner: resolves items to tensors.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def resolve_data(self, item: object) -> object:
        """Return a copy of an item's tensor, or its bytes."""
        data = self._planner.resolve_data(item)
        if not isinstance(data, torch.Tensor) or not data.numel():
            return data
        storage = torch.UntypedStorage._new_shared(data.numel() * data.element_size())
        copy = torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape)
        return copy.copy_(data.detach())


def _with_own_generator(init: Callable[..., None]) -> Callable[..., None]:
    """Give each data loader its own generator. On CPU the default generator is also the device's: a
    loader that draws its seed from it would change the dropout of a resumed run."""

    @functools.wraps(init)
    def wrapper(self: DataLoader[object], *args: object, **kwargs: object) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        init(self, *args, **kwargs)

    return wrapper


# ---- Enables sequence parallelism with torch's norms; Megatron supports only Apex's and TE's
#
# Under sequence parallelism each tensor-parallel rank normalizes its own part of the sequence.
# Norms treat each token separately, so that the forward computation is unchanged. Only the
# gradients of norm parameters are partial sums. Megatron sums them over the tensor-parallel group
# for every parameter that is marked ``sequence_parallel``; its wrapper of torch's norms does not
# mark them but refuses sequence parallelism.


def patch_sequence_parallelism(patcher: Patcher) -> None:
    """Make Megatron's wrapper of torch's norms mark parameters instead of refusing.

    Imports Megatron. The constructor is patched because Megatron imports the wrapper's class under
    several names in several modules. Without sequence parallelism nothing changes.

    Mutates: the class, through `patcher`.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patcher.wrap(WrappedTorchNorm, "__new__", _marking)


def _marking(new: Callable[..., Module]) -> staticmethod[..., Module]:
    """Wrap `__new__`; the result is a static method, as `__new__` is."""

    @functools.wraps(new)
    def marked(cls: type, config: NormConfig, *args: object, **kwargs: object) -> Module:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        plain = copy.copy(config)  # Megatron's other checks still see the original config
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(marked)
