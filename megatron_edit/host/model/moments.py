"""Inner moments: what Megatron's optimizers remember of each main shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_edit.host.seams.megatron import InnerOptimizer, ParamState


def zero_nonfinite(optimizers: Sequence[InnerOptimizer], main: Tensor | None) -> int:
    """Zero the moments of a main shard that are not finite; returns how many elements."""
    zeroed = 0
    for inner in optimizers:
        state = {} if inner.optimizer is None else inner.optimizer.state
        for moment in _moments(state.get(main, {})):
            broken = ~torch.isfinite(moment)
            zeroed += int(broken.sum())
            moment.masked_fill_(broken, 0.0)
    return zeroed


def reset(optimizers: Sequence[InnerOptimizer]) -> None:
    """Forget all moments, and how many steps were made."""
    for inner in optimizers:
        if inner.optimizer is not None:
            inner.optimizer.state.clear()
            for group in inner.optimizer.param_groups:
                group.pop("step", None)


def _moments(state: ParamState) -> Iterator[Tensor]:
    """Of one parameter: everything that has more than one element."""
    for value in state.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
            yield value
