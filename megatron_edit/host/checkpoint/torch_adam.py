"""Makes Megatron's checkpoints work without Apex and Transformer Engine, also on GPUs.

Their Adam stores the step count in parameter groups. torch's Adam stores one per parameter, from
the first step on, but Megatron's distributed optimizer reads it before that; and when it loads a
checkpoint, it gives all parameters the same tensor, or the old count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import Parameter

from megatron_edit.host.seams.megatron import ShardOwner
from megatron_edit.host.seams.patching import Patcher


def patch_torch_adam(patcher: Patcher) -> None:
    """Make Megatron's distributed optimizer save and load torch's Adam. Imports Megatron.

    Does nothing where Megatron has the Adam of Apex or Transformer Engine.

    Mutates: through `patcher` that class.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer = distrib_optimizer.DistributedOptimizer
    patcher.wrap(optimizer, "state_dict", _with_initial_state)
    patcher.wrap(optimizer, "load_state_dict", _with_separate_steps)
    patcher.wrap(optimizer, "_set_main_param_and_optimizer_states", _with_own_step)


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
            if "step" in state:
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
