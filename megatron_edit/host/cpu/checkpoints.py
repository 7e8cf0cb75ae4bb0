"""What Megatron's checkpoints need where Apex and Transformer Engine are missing.

Those bring an Adam that keeps its step count with its groups. torch's keeps one with each
parameter, from its first step on; Megatron's distributed optimizer asks for it before that. When
it loads, it gives all parameters one and the same tensor, or the number from before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import Parameter
from torch.utils.data import DataLoader

from megatron_edit.host.seams.megatron import SavePlanner, ShardOwner
from megatron_edit.host.seams.patching import Patcher


def serve_checkpoints(patcher: Patcher) -> None:
    """Let Megatron's distributed optimizer save and load torch's Adam. Imports Megatron.

    Mutates: the class, a default of the writer's queue, and torch's data loader, by `patcher`.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        optimizer = distrib_optimizer.DistributedOptimizer
        patcher.wrap(optimizer, "state_dict", _with_a_state)
        patcher.wrap(optimizer, "load_state_dict", _with_steps_apart)
        patcher.wrap(optimizer, "_set_main_param_and_optimizer_states", _without_steps)
    patcher.wrap(DataLoader, "__init__", _with_own_generator)
    patcher.wrap(filesystem_async.FileSystemWriterAsync, "prepare_write_data", _with_snapshots)
    if not hasattr(filesystem_async, "get_write_results_queue"):
        return  # megatron-core 0.16 leaves no choice: it spawns
    # A queue by `spawn` imports the training script once more in each rank: many seconds.
    patcher.wrap(filesystem_async, "get_write_results_queue", _by_fork)
    # The process that writes asynchronous saves: a fork, in which this backend is on, too.
    patcher.wrap(async_utils.PersistentAsyncCaller, "_get_process", _forked)


def _with_a_state[R](state_dict: Callable[[ShardOwner], R]) -> Callable[[ShardOwner], R]:
    @functools.wraps(state_dict)
    def wrapper(self: ShardOwner) -> R:
        inner = self.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:  # as Adam's own first step would begin
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    return wrapper


def _with_steps_apart[T](
    load: Callable[[ShardOwner, T], object],
) -> Callable[[ShardOwner, T], None]:
    @functools.wraps(load)
    def wrapper(self: ShardOwner, state_dict: T) -> None:
        with torch.no_grad():  # main shards are views of parameters
            load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return wrapper


def _without_steps(set_states: Callable[..., None]) -> Callable[..., None]:
    """Step counts come with the groups; what is loaded with a parameter has none, or an old one.

    Each is given its own: Megatron before 0.17 copies whatever the state holds.
    """

    @functools.wraps(set_states)
    def wrapper(self: ShardOwner, model_param: Parameter, tensors: dict[str, object]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][place]
        step = self.optimizer.state[main].get("step")
        set_states(self, model_param, {**tensors, "step": step})

    return wrapper


def _by_fork[R](queue: Callable[..., R]) -> Callable[..., R]:
    return functools.partial(queue, mp_mode="fork")


def _forked(start: Callable[..., object]) -> object:
    """A class method, bound already, whose second argument is how to start a process."""
    return staticmethod(lambda rank, mp_mode="fork", *rest, **kw: start(rank, "fork", *rest, **kw))


def _with_snapshots(prepare: Callable[..., None]) -> Callable[..., None]:
    """Megatron copies what is to be written to the host: what is there already, training would
    change before an asynchronous save is written."""

    @functools.wraps(prepare)
    def wrapper(self: object, plan: object, planner: SavePlanner) -> None:
        from megatron.training import get_args

        prepare(self, plan, Snapshots(planner) if get_args().async_save else planner)

    return wrapper


class Snapshots:
    """A planner of torch's whose tensors are copies, made where the process that writes has them,
    too: to send others there would copy them once more.

    Args:
        planner: knows the tensors.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def resolve_data(self, item: object) -> object:
        """A copy of the tensor, or the bytes, that an item stands for."""
        data = self._planner.resolve_data(item)
        if not isinstance(data, torch.Tensor) or not data.numel():
            return data
        storage = torch.UntypedStorage._new_shared(data.numel() * data.element_size())
        copy = torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape)
        return copy.copy_(data.detach())


def _with_own_generator(init: Callable[..., None]) -> Callable[..., None]:
    """The device's generator is the CPU's here: a loader that draws its seed from it would move
    the dropout of a resumed run."""

    @functools.wraps(init)
    def wrapper(self: DataLoader[object], *args: object, **kwargs: object) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        init(self, *args, **kwargs)

    return wrapper
