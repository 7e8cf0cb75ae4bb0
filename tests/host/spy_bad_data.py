"""A hook that runs inside the ranks: it feeds random tokens to one replica."""

from __future__ import annotations

import json
import os
from functools import wraps
from typing import Any

import torch

from tests.host.spy import _replica


def feed_random_tokens() -> None:
    """Replace tokens and labels of replica 1 in the steps first..last of `SPY_BURST` (JSON).

    A resumed run counts its steps from `SPY_FIRST_STEP`.
    """
    import megatron.training.training as training
    from megatron.core.models.gpt import GPTModel

    first, last = json.loads(os.environ["SPY_BURST"])
    counter = {"step": int(os.environ.get("SPY_FIRST_STEP", "1")) - 1}
    is_victim = _replica() == 1
    train_step, forward = training.train_step, GPTModel.forward

    @wraps(train_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counter["step"] += 1
        return train_step(*args, **kwargs)

    @wraps(forward)
    def spied(self: Any, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        step = counter["step"]
        if is_victim and first <= step <= last and labels is not None:
            generator = torch.Generator().manual_seed(step)
            labels = torch.randint(self.vocab_size, labels.shape, generator=generator)
            input_ids = labels.roll(1)
        return forward(self, input_ids, *args, labels=labels, **kwargs)

    training.train_step = counted
    GPTModel.forward = spied
