"""Reads, writes and resets the moments of Megatron's optimizers, and scales beta2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from megatron_edit.host.model.optimizer import MASTER
from megatron_edit.host.seams.megatron import (
    InnerOptimizer,
    ParamState,
    TorchOptimizer,
)
from megatron_edit.method.moments import extra_steps, local_beta2

EXP_AVG, EXP_AVG_SQ, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum_buffer"  # the last is Muon's
# Names of the moments in optimizer states; the first existing name is used.
MOMENT_NAMES: Mapping[str, tuple[str, ...]] = {
    FIRST_MOMENT: (EXP_AVG, MOMENTUM),
    SECOND_MOMENT: (EXP_AVG_SQ,),
}
_SCALER = ("_scale", "_growth_tracker", "_hysteresis_tracker")  # of Megatron's `DynamicGradScaler`


def read_moment(
    optimizers: Sequence[InnerOptimizer], main: Tensor | None, kind: str, out: Tensor
) -> None:
    """Copy a moment of a main shard to `out`, fp32 [n]; without such a moment do nothing.

    Args:
        optimizers: optimizers, one of which may have the shard.
        main: the optimizer's key of the state.
        kind: key of `MOMENT_NAMES`.
        out: mutated.
    """
    for optimizer, state, name in _states_with(optimizers, main, kind):
        assert main is not None
        out.copy_(_values_of(optimizer, main, state, name).view(-1))


def write_moment(
    optimizers: Sequence[InnerOptimizer], main: Tensor | None, kind: str, values: Tensor
) -> None:
    """Set a moment of a main shard, fp32 [n]; optimizers with moments in fewer bits round it."""
    for optimizer, state, name in _states_with(optimizers, main, kind):
        assert main is not None
        _set_values(optimizer, main, state, name, values)


def _states_with(
    optimizers: Sequence[InnerOptimizer], main: Tensor | None, kind: str
) -> Iterator[tuple[TorchOptimizer, ParamState, str]]:
    """Yield each optimizer that has a moment of a main shard, the state, and the moment's name."""
    for inner in optimizers:
        if inner.optimizer is None or main is None:
            continue
        state = inner.optimizer.state.get(main, {})
        name = next((name for name in MOMENT_NAMES[kind] if name in state), None)
        if name is not None:
            yield inner.optimizer, state, name


def num_moment_elements(optimizers: Sequence[InnerOptimizer], main: Tensor | None) -> int:
    """Return the number of elements of a shard's moments; 0 before its first applied step."""
    found = (each for kind in MOMENT_NAMES for each in _states_with(optimizers, main, kind))
    return sum(int(state[name].numel()) for _, state, name in found)


def configured_beta2(optimizers: Iterable[InnerOptimizer]) -> list[float]:
    """Return the distinct values of beta2 of all parameter groups, ascending."""
    groups = (group for inner in optimizers for group in inner.param_groups)
    return sorted({group["betas"][1] for group in groups if "betas" in group})


@contextmanager
def scaled_beta2(
    optimizers: Sequence[InnerOptimizer], num_replicas: int, common_steps: int
) -> Iterator[None]:
    """Use beta2^(1/N) with matching bias corrections inside the context, for one step.

    Outside of the step all readers, such as checkpoints, see the configured values.

    Adam has one step count for both bias corrections. It is raised to match the second moment
    (`extra_steps`); the learning rate compensates the effect on the first moment's correction,
    which matters while beta1^t is not small.

    Args:
        optimizers: optimizers that step inside the context.
        num_replicas: N.
        common_steps: steps made with the configured beta2.
    """
    more = extra_steps(common_steps, num_replicas)
    groups = [group for inner in optimizers for group in inner.param_groups if "betas" in group]
    counters, step = _counting(optimizers), num_counted_steps(optimizers) + 1
    given = [group.copy() for group in groups]
    for group in groups:
        beta1, beta2 = group["betas"]
        share = (1.0 - beta1**step) / (1.0 - beta1 ** (step + more))
        group["betas"] = (beta1, local_beta2(beta2, num_replicas))
        group["lr"] = group["lr"] / share
        if "weight_decay" in group:  # Adam multiplies it by the learning rate
            group["weight_decay"] = group["weight_decay"] * share
    for owner in counters:
        owner["step"] += more
    try:
        yield
    finally:
        for group, before in zip(groups, given, strict=True):
            group["betas"], group["lr"] = before["betas"], before["lr"]
            if "weight_decay" in before:
                group["weight_decay"] = before["weight_decay"]
        for owner in counters:
            owner["step"] -= more


def num_counted_steps(optimizers: Iterable[InnerOptimizer]) -> int:
    """Return Adam's step count; 0 before the first step, or without parameters."""
    return max((int(owner["step"]) for owner in _counting(optimizers)), default=0)


def _counting(optimizers: Iterable[InnerOptimizer]) -> list[Any]:
    return [owner for owner in _step_owners(optimizers).values() if "step" in owner]


def _step_owners(optimizers: Iterable[InnerOptimizer]) -> dict[str, Any]:
    """Return the dicts that may have a step count `step`: groups, and states of main shards.

    Their names are equal on all replicas. Which of them have one is not: Megatron adds one to the
    groups of torch's Adam, which counts in its states, when it loads a checkpoint.
    """
    owners: dict[str, Any] = {}
    for i, inner in enumerate(optimizers):
        optimizer = inner.optimizer
        for j, part in enumerate(getattr(optimizer, "sub_optimizers", (optimizer,))):
            for k, group in enumerate(() if part is None else part.param_groups):
                owners[f"{i}.{j}.{k}"] = group
                states = (part.state.get(main, {}) for main in group["params"])
                owners |= {f"{i}.{j}.{k}.{m}": state for m, state in enumerate(states)}
    return owners


def zero_nonfinite(optimizers: Sequence[InnerOptimizer], main: Tensor | None) -> int:
    """Zero non-finite elements in the moments of a main shard; return their number."""
    zeroed = 0
    for optimizer in (inner.optimizer for inner in optimizers):
        if optimizer is None or main is None:
            continue
        state = optimizer.state.get(main, {})
        for name in [name for name, value in state.items() if _is_moment(name, value)]:
            moment = _values_of(optimizer, main, state, name)
            nonfinite = ~torch.isfinite(moment)
            if count := int(nonfinite.sum()):
                _set_values(optimizer, main, state, name, moment.masked_fill(nonfinite, 0.0))
                zeroed += count
    return zeroed


def create(optimizers: Sequence[InnerOptimizer]) -> None:
    """Create the moments of all main shards, as a first step does: by one with gradients of zero.

    Mutates: the main shards, as far as weight decay does.
    """
    for inner in optimizers:
        if (optimizer := inner.optimizer) is None or num_counted_steps([inner]):
            continue
        for main in (main for group in optimizer.param_groups for main in group["params"]):
            main.grad = torch.zeros_like(main)
            if hasattr(main, "decoupled_grad"):
                main.decoupled_grad = main.grad
        optimizer.step()
        optimizer.zero_grad()


def reset(optimizers: Sequence[InnerOptimizer]) -> None:
    """Clear all moments and step counts; main shards in optimizer states are kept."""
    for inner in optimizers:
        optimizer = inner.optimizer
        if optimizer is None:
            continue
        if hasattr(optimizer, "sub_optimizers"):
            for part in optimizer.sub_optimizers:
                part.state.clear()  # their main shards are parameters, not state
            optimizer.state.clear()
        elif any(MASTER in state for state in optimizer.state.values()):
            _zero_all_but_main(optimizer)
        else:
            optimizer.state.clear()
        for group in optimizer.param_groups:
            group.pop("step", None)


def _zero_all_but_main(optimizer: TorchOptimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != MASTER and isinstance(value, Tensor):
                value.zero_()


def _values_of(optimizer: TorchOptimizer, main: Tensor, state: ParamState, name: str) -> Tensor:
    """Return a moment; in fp32 where the optimizer stores it in fewer bits, with scales."""
    if hasattr(optimizer, "get_unscaled_state"):
        return optimizer.get_unscaled_state(main, name)
    return state[name]


def _set_values(
    optimizer: TorchOptimizer, main: Tensor, state: ParamState, name: str, values: Tensor
) -> None:
    if hasattr(optimizer, "set_scaled_state"):
        shaped = values.view(state[name].shape)
        optimizer.set_scaled_state(main, name, shaped)
    else:
        state[name].view(-1).copy_(values.view(-1))


def _is_moment(name: str, value: object) -> bool:
    return name != MASTER and isinstance(value, Tensor) and value.dim() > 0


def read_counters(optimizers: Sequence[InnerOptimizer]) -> dict[str, float]:
    """Return step counts of groups and of shards, and scale and trackers of dynamic loss scaling.

    Args:
        optimizers: Megatron's optimizers.

    Returns:
        By names that are equal on all replicas.
    """
    places = _counter_places(optimizers).items()
    return {name: float(owner[key]) for name, (owner, key) in places if key in owner}


def write_counters(optimizers: Sequence[InnerOptimizer], values: Mapping[str, float]) -> None:
    """Set the counters to those of a replica, keeping their types; remove those it does not have.

    Args:
        optimizers: Megatron's optimizers.
        values: `read_counters` of that replica.
    """
    for name, (owner, key) in _counter_places(optimizers).items():
        if name not in values:
            owner.pop(key, None)
        elif isinstance(owner.get(key), Tensor):
            owner[key].fill_(values[name])
        else:
            owner[key] = type(owner.get(key, 0))(values[name])


def _counter_places(optimizers: Sequence[InnerOptimizer]) -> dict[str, tuple[Any, str]]:
    """Return dict and key of each counter that there may be, by name."""
    places = {f"step {name}": (owner, "step") for name, owner in _step_owners(optimizers).items()}
    for number, scaler in enumerate(_dynamic_scalers(optimizers)):
        places |= {f"{name} {number}": (vars(scaler), name) for name in _SCALER}
    return places


def loss_scale_of(optimizers: Sequence[InnerOptimizer]) -> Tensor | None:
    """Return the dynamic loss scale, fp32 [1], which is equal in all optimizers; None without."""
    scaler = next(_dynamic_scalers(optimizers), None)
    return None if scaler is None else scaler._scale


def _dynamic_scalers(optimizers: Sequence[InnerOptimizer]) -> Iterator[Any]:
    """Yield each `DynamicGradScaler`."""
    for inner in optimizers:
        scaler = getattr(inner, "grad_scaler", None)
        if hasattr(scaler, "_growth_tracker"):
            yield scaler
