"""Makes Megatron's checkpoints work without Apex and Transformer Engine.

Their Adam stores the step count in parameter groups. torch's Adam stores one per parameter, from
the first step on, but Megatron's distributed optimizer reads it before that; and when it loads a
checkpoint, it gives all parameters the same tensor, or the old count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import Parameter
from torch.utils.data import DataLoader

from megatron_edit.host.seams.megatron import SavePlanner, ShardOwner
from megatron_edit.host.seams.patching import Patcher


def patch_checkpoints(patcher: Patcher) -> None:
    """Make Megatron's distributed optimizer save and load torch's Adam. Imports Megatron.

    Mutates: through `patcher` that class, Megatron's asynchronous writers, and torch's data loader.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        optimizer = distrib_optimizer.DistributedOptimizer
        patcher.wrap(optimizer, "state_dict", _with_initial_state)
        patcher.wrap(optimizer, "load_state_dict", _with_separate_steps)
        patcher.wrap(optimizer, "_set_main_param_and_optimizer_states", _with_own_step)
    patcher.wrap(DataLoader, "__init__", _with_own_generator)
    patcher.wrap(filesystem_async.FileSystemWriterAsync, "prepare_write_data", _with_snapshots)
    if not hasattr(filesystem_async, "get_write_results_queue"):
        return  # megatron-core 0.16 always spawns
    # With `spawn` the queue imports the training script again in each rank, which takes seconds.
    patcher.wrap(filesystem_async, "get_write_results_queue", _with_fork_queue)
    # Fork the process that writes asynchronous saves, so that this backend is enabled there, too.
    patcher.wrap(async_utils.PersistentAsyncCaller, "_get_process", _start_forked)


def _with_initial_state[R](state_dict: Callable[[ShardOwner], R]) -> Callable[[ShardOwner], R]:
    @functools.wraps(state_dict)
    def wrapper(self: ShardOwner) -> R:
        inner = self.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:  # as in Adam's first step
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    return wrapper


def _with_separate_steps[T](
    load: Callable[[ShardOwner, T], object],
) -> Callable[[ShardOwner, T], None]:
    @functools.wraps(load)
    def wrapper(self: ShardOwner, state_dict: T) -> None:
        with torch.no_grad():  # main shards are views of parameters
            load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return wrapper


def _with_own_step(set_states: Callable[..., None]) -> Callable[..., None]:
    """Keep each parameter's step count when its state is loaded.

    Step counts are loaded with the groups; the loaded state of a parameter has none or an old one,
    which Megatron before 0.17 would copy.
    """

    @functools.wraps(set_states)
    def wrapper(self: ShardOwner, model_param: Parameter, tensors: dict[str, object]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][place]
        step = self.optimizer.state[main].get("step")
        set_states(self, model_param, {**tensors, "step": step})

    return wrapper


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
