"""Pairs the parameter groups of an optimizer with those of a checkpoint, also at other rates.

Megatron 0.19 looks for a saved group with the same rates, so that a resume with another `--lr`
fails; earlier versions find it and silently keep the saved rates, and mix up groups that differ in
their rates alone, as with `--decoupled-lr`.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.nn import Parameter

from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.refusals import parameters_only
from megatron_edit.host.seams.megatron import ShardOwner
from megatron_edit.host.seams.patching import Call, Patcher

type _Group = dict[str, object]

# What the schedule computes a group's learning rate and weight decay from; and what distinguishes
# groups at any rates. Groups of one kind are in the same order in every run.
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_KIND = (
    "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer", "default_config",
)  # fmt: skip


def patch_param_groups(patcher: Patcher) -> None:
    """Let Megatron's optimizers load checkpoints with other rates. Imports Megatron.

    Mutates: through `patcher` their classes.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    patcher.wrap(optimizer.MegatronOptimizer, "_filter_and_reorder_param_groups", _reordered)
    patcher.wrap(distrib_optimizer.DistributedOptimizer, "load_state_dict", _with_paired_groups)


def _reordered(_: Callable[..., object]) -> object:
    from megatron.training import get_args

    def reorder(current: Sequence[_Group], saved: Sequence[_Group]) -> list[_Group]:
        places = [group["params"] for group in saved]
        found = resumed_groups(current, saved, get_args())
        return [{**group, "params": at} for group, at in zip(found, places, strict=False)]

    return staticmethod(reorder)


def _with_paired_groups(
    load: Callable[[ShardOwner, Mapping[str, Any]], None],
) -> Callable[[ShardOwner, Mapping[str, Any]], None]:
    from megatron.training import get_args

    @wraps(load)
    def wrapper(self: ShardOwner, state_dict: Mapping[str, Any]) -> None:
        inner = state_dict["optimizer"]
        current = self.optimizer.param_groups
        found = resumed_groups(current, inner["param_groups"], get_args())
        # Megatron finds each by the values that this run has.
        named = [
            {**group, **_without(mine, "params", "step")}
            for group, mine in zip(found, current, strict=True)
        ]
        load(self, {**state_dict, "optimizer": {**inner, "param_groups": named}})
        for group, wanted in zip(self.optimizer.param_groups, found, strict=True):
            group.update(_without(wanted, "params", "step"))

    return wrapper


def resumed_groups(
    current: Sequence[_Group], saved: Sequence[_Group], args: Namespace
) -> list[_Group]:
    """Return the saved group of each current one, with the rates that this run is to use: its own,
    or with `--use-checkpoint-opt_param-scheduler` the saved ones.

    Args:
        current: groups of this run's optimizer.
        args: Megatron's.

    Raises:
        UsageError: a group has none.
    """
    left = list(saved)
    partners: dict[int, _Group] = {}
    for keys in ((*_KIND, *_RATES, "eps"), _KIND):  # those with the same values first
        for index, group in enumerate(current):
            match = next((each for each in left if _are_equal(group, each, keys)), None)
            if index not in partners and match is not None:
                partners[index] = match
                left = [each for each in left if each is not match]
    return [_at_rates(group, partners.get(index), args) for index, group in enumerate(current)]


@contextmanager
def new_rates_kept(call: Call[object], args: Namespace) -> Iterator[None]:
    """Inside, a load with `--override-opt_param-scheduler` keeps this run's rates of all groups.

    After it Megatron's main gives all groups those of `--lr`, also groups with `--decoupled-lr`.

    Args:
        call: of Megatron's `load_checkpoint`.
        args: Megatron's.
    """
    optimizer = call.arguments["optimizer"]
    if optimizer is None or not args.override_opt_param_scheduler or parameters_only(args):
        yield
        return
    rates = [{x: group[x] for x in _RATES if x in group} for group in optimizer.param_groups]
    yield
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        group.update(own)
    call.arguments["opt_param_scheduler"].step(increment=0)


def _are_equal(group: _Group, other: _Group, keys: Sequence[str]) -> bool:
    # Checkpoints of other versions lack some of them.
    return all(group.get(key) == other.get(key) for key in keys if key in group and key in other)


def _at_rates(group: _Group, partner: _Group | None, args: Namespace) -> _Group:
    if partner is None:
        raise UsageError(
            f"--load {args.load}",
            f"has no parameter group like {_without(group, 'params')}",
            "give the flags of the run that saved it (--decoupled-lr and the like), or "
            "--no-load-optim",
        )
    if args.use_checkpoint_opt_param_scheduler:
        return partner
    return {**_without(partner, *_RATES), **{x: group[x] for x in _RATES if x in group}}


def _without(group: _Group, *names: str) -> _Group:
    return {name: value for name, value in group.items() if name not in names}


# ---- Makes Megatron's checkpoints work without Apex and Transformer Engine, also on GPUs
#
# Their Adam stores the step count in parameter groups. torch's Adam stores one per parameter,
# from the first step on, but Megatron's distributed optimizer reads it before that; and when it
# loads a checkpoint, it gives all parameters the same tensor, or the old count.


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
