"""Hooks that make the logs fail while ranks train: full disk, failing writers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.disk import fill_disk


def _before_step(happens: Callable[[int], None]) -> None:
    """Call `happens(step)` on the first rank of all before each training step, counted from 1."""
    from megatron.training import training

    train_step = training.train_step
    steps = 0

    def stepping(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if os.environ["SPY_GLOBAL_RANK"] == "0":
            happens(steps)
        return train_step(*args, **kwargs)

    os.environ["SPY_GLOBAL_RANK"] = os.environ["RANK"]
    training.train_step = stepping


def fill_temporarily() -> None:
    """A `before` hook: SPY_DISK is full from step 3 to step 8."""
    disk = Path(os.environ["SPY_DISK"])

    def happens(step: int) -> None:
        if step == 3:
            fill_disk(disk)
        elif step == 9:
            (disk / "filler").unlink()

    _before_step(happens)


def fill_permanently() -> None:
    """A `before` hook: SPY_DISK is full from step 3 on."""
    disk = Path(os.environ["SPY_DISK"])

    def happens(step: int) -> None:
        if step == 3:
            fill_disk(disk)

    _before_step(happens)


def break_writers() -> None:
    """A `before` hook: TensorBoard fails from its 30th scalar on, W&B from its 10th call."""
    from torch.utils.tensorboard import SummaryWriter

    from tests.host.spy_wandb import Wandb, stub

    stub()
    _fail_from(SummaryWriter, "add_scalar", 30)
    _fail_from(SummaryWriter, "flush", 1)
    _fail_from(Wandb, "log", 10)
    _fail_from(Wandb, "finish", 1)


def _fail_from(owner: type, name: str, first: int) -> None:
    """Make a method raise from its call number `first` on."""
    method, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= first:
            raise ConnectionError("nobody listens")
        return method(*args, **kwargs)

    setattr(owner, name, failing)
