"""Makes Megatron's data loaders and asynchronous saves work on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from megatron_edit.host.seams.megatron import SavePlanner
from megatron_edit.host.seams.patching import Patcher


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
