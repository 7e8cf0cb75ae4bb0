"""Scripts and loops that replace a function of Megatron after the plugin has wrapped it."""

from __future__ import annotations

import os
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


def finalize_gradients_as_before_0_19() -> None:
    """Let the loop set the model's `finalize_model_grads_func`, as that of 0.16 to 0.18 does, and
    record losses and gradient norms."""
    import megatron.training.training as training
    from megatron.core.utils import get_model_config

    from tests.host.spy import record

    train = training.train

    @wraps(train)
    def setting(step: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
        get_model_config(model[0]).finalize_model_grads_func = training.finalize_model_grads
        return train(step, model, *rest, **kwargs)

    training.train = setting
    record()


def turn_an_update() -> None:
    """Let rank 1 apply its first update with the opposite sign."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def turn(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.neg_()
        handle.remove()

    if os.environ["RANK"] == "1":
        handle = register_optimizer_step_pre_hook(turn)
