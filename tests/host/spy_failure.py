"""A hook that raises an error in the training step of one replica."""

from __future__ import annotations

import os
from typing import Any


def fail() -> None:
    """A `before` hook: the rank of replica 1 of two raises in its step 6."""
    from megatron.training import training

    train_step, steps = training.train_step, 0
    is_bad = os.environ["RANK"] == "1"

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if is_bad and steps == 6:
            raise ValueError("a broken\nbatch")
        return train_step(*args, **kwargs)

    training.train_step = failing


def lack_memory() -> None:
    """A `before` hook: the rank of replica 1 of two cannot allocate anchor and momentum."""
    import torch

    from megatron_edit.engine.sync.outer_state import OuterState

    def allocate(*_: Any, **__: Any) -> OuterState:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if os.environ["RANK"] == "1":
        OuterState.allocate = allocate  # type: ignore[method-assign]
