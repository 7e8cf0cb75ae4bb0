"""Inner moments: what Megatron's optimizers remember of each main shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

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
