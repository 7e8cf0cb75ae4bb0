"""Scripts that replace a function of Megatron after the plugin has wrapped it."""

from __future__ import annotations

from functools import wraps
from typing import Any


def replace_optimizer_step() -> None:
    """Replace `optimizer.step` by Megatron's own when training begins."""
    import megatron.training.training as training

    train = training.train

    @wraps(train)
    def replacing(step: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        own = type(optimizer).step
        optimizer.step = lambda: own(optimizer)
        return train(step, model, optimizer, *rest, **kwargs)

    training.train = replacing


def replace_training_log() -> None:
    """Replace `training_log` by Megatron's own when training begins."""
    import megatron.training.training as training

    train, log = training.train, training.training_log

    @wraps(train)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        training.training_log = log
        return train(*args, **kwargs)

    training.train = replacing
