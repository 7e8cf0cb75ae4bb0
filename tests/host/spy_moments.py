"""Hook that records Adam's step count before the first step of a process."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from tests.host.spy import out_dir, record


def record_all() -> None:
    """Record the step count, and what `spy.record` does."""
    record()
    record_first_moments()


def record_first_moments() -> None:
    """Write the largest step count of the inner optimizer, before its first local step."""
    import megatron.training.training as training

    train_step = training.train_step

    @wraps(train_step)
    def spied(*args: Any, **kwargs: Any) -> Any:
        path = out_dir() / "first-counter.txt"
        if not path.exists():
            optimizer = args[3]
            inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            states = inner.state.values()
            counts = [float(state["step"]) for state in states if "step" in state]
            groups = [float(group["step"]) for group in inner.param_groups if "step" in group]
            whole = path.with_suffix(f".{os.getpid()}")  # a reader finds all of the file
            whole.write_text(str(max(counts + groups, default=0.0)))
            whole.rename(path)
        return train_step(*args, **kwargs)

    training.train_step = spied
