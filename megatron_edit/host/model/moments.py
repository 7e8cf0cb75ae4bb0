"""Inner moments: what Megatron's optimizers remember of each main shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from megatron_edit.host.model.held import MASTER
from megatron_edit.host.seams.megatron import (
    FusedAdam,
    HybridOptimizer,
    InnerOptimizer,
    ParamState,
    TorchOptimizer,
)

_SCALER = ("_scale", "_growth_tracker", "_hysteresis_tracker")  # of Megatron's `DynamicGradScaler`


def zero_nonfinite(optimizers: Sequence[InnerOptimizer], main: Tensor | None) -> int:
    """Zero the moments of a main shard that are not finite; returns how many elements."""
    zeroed = 0
    for inner in optimizers:
        state = {} if inner.optimizer is None else inner.optimizer.state.get(main, {})
        if inner.optimizer is not None and main is not None and _is_scaled(inner.optimizer):
            zeroed += _zero_scaled(cast(FusedAdam, inner.optimizer), main, state)
            continue
        for moment in _moments(state):
            broken = ~torch.isfinite(moment)
            zeroed += int(broken.sum())
            moment.masked_fill_(broken, 0.0)
    return zeroed


def reset(optimizers: Sequence[InnerOptimizer]) -> None:
    """Forget all moments, and how many steps were made. Main shards that lie among them stay."""
    for inner in optimizers:
        optimizer = inner.optimizer
        if optimizer is None:
            continue
        if hasattr(optimizer, "sub_optimizers"):
            for part in cast(HybridOptimizer, optimizer).sub_optimizers:
                part.state.clear()  # their main shards are their parameters, and stay
            optimizer.state.clear()
        elif any(MASTER in state for state in optimizer.state.values()):
            _zero_beside_main(optimizer)
        else:
            optimizer.state.clear()
        for group in optimizer.param_groups:
            group.pop("step", None)


def _zero_beside_main(optimizer: TorchOptimizer) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != MASTER and isinstance(value, Tensor):
                value.zero_()


def _is_scaled(optimizer: TorchOptimizer) -> bool:
    return hasattr(optimizer, "get_unscaled_state")


def _zero_scaled(optimizer: FusedAdam, main: Tensor, state: ParamState) -> int:
    """Of an optimizer that keeps moments in few bits, with scales."""
    zeroed = 0
    for name in [name for name, value in state.items() if _is_moment(name, value)]:
        moment = optimizer.get_unscaled_state(main, name)
        broken = ~torch.isfinite(moment)
        count = int(broken.sum())
        if count:
            optimizer.set_scaled_state(main, name, moment.masked_fill(broken, 0.0))
        zeroed += count
    return zeroed


def _is_moment(name: str, value: object) -> bool:
    return name != MASTER and isinstance(value, Tensor) and value.dim() > 0


def _moments(state: ParamState) -> Iterator[Tensor]:
    """Of one parameter: everything that has more than one element, and is no main shard."""
    for name, value in state.items():
        if _is_moment(name, value) and value.is_floating_point():
            yield value


@dataclass(frozen=True)
class StoredMoment:
    """One moment of a main shard, in the state of the optimizer that steps it.

    Attributes:
        optimizer: that keeps it.
        main: the optimizer's key of the state.
        name: of the moment, such as `exp_avg`.
    """

    optimizer: TorchOptimizer
    main: Tensor
    name: str

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.optimizer.state[self.main][self.name].numel())

    def read(self) -> Tensor:
        """Its value, fp32 [numel]; do not write to it."""
        if _is_scaled(self.optimizer):
            value = cast(FusedAdam, self.optimizer).get_unscaled_state(self.main, self.name)
        else:
            value = self.optimizer.state[self.main][self.name]
        return value.detach().float().reshape(-1)

    def write(self, value: Tensor) -> None:
        """Replace it by `value`, fp32 [numel], rounded to the precision that it is kept in."""
        stored = self.optimizer.state[self.main][self.name]
        if _is_scaled(self.optimizer):
            shaped = value.to(stored.device).view_as(stored)
            cast(FusedAdam, self.optimizer).set_scaled_state(self.main, self.name, shaped)
        else:
            stored.copy_(value.view_as(stored))


def moments_of(optimizers: Sequence[InnerOptimizer], main: Tensor | None) -> Iterator[StoredMoment]:
    """The moments of a main shard, by name; none before the first applied step."""
    for inner in optimizers:
        if (optimizer := inner.optimizer) is None or main is None:
            continue
        state = optimizer.state.get(main, {})
        for name in sorted(state):
            is_number = _is_scaled(optimizer) or state[name].is_floating_point()
            if _is_moment(name, state[name]) and is_number:
                yield StoredMoment(optimizer, main, name)


def counters_of(
    optimizers: Sequence[InnerOptimizer], mains: Sequence[Tensor]
) -> list[tuple[Any, str]]:
    """Where the optimizers count: places that `read_counter` and `write_counter` understand.

    Args:
        optimizers: Megatron's.
        mains: the main shards of this rank, in an order that is the same on all replicas.

    Returns:
        Owner and name of each number: step counters of groups and of shards, and of a dynamic loss
        scale the scale and its trackers.
    """
    places: list[tuple[Any, str]] = []
    for inner in optimizers:
        if (optimizer := inner.optimizer) is not None:
            places += [(group, "step") for group in optimizer.param_groups if "step" in group]
            states = [optimizer.state.get(main, {}) for main in mains]
            places += [(state, "step") for state in states if "step" in state]
        scaler = getattr(inner, "grad_scaler", None)
        if hasattr(scaler, "_growth_tracker"):
            places += [(vars(scaler), name) for name in _SCALER]
    return places


def read_counter(place: tuple[Any, str]) -> float:
    """The number at a place."""
    owner, name = place
    return float(owner[name])


def write_counter(place: tuple[Any, str], value: float) -> None:
    """Put the number at a place to `value`, in the type that it has there."""
    owner, name = place
    if isinstance(owner[name], Tensor):
        owner[name].fill_(value)
    else:
        owner[name] = type(owner[name])(value)
