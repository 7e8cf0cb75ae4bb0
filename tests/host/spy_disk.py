"""Things that happen to the disk of the logs while ranks train."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.disk import fill_disk


def _before_step(happens: Callable[[int], None]) -> None:
    """Let something happen on rank 0 of all before each training step, which counts from 1."""
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


def fill_between() -> None:
    """A `before` hook: no room on SPY_DISK from step 3 to step 8."""
    disk = Path(os.environ["SPY_DISK"])

    def happens(step: int) -> None:
        if step == 3:
            fill_disk(disk)
        elif step == 9:
            (disk / "filler").unlink()

    _before_step(happens)


def fill_to_the_end() -> None:
    """A `before` hook: no room on SPY_DISK from step 3 on."""
    disk = Path(os.environ["SPY_DISK"])

    def happens(step: int) -> None:
        if step == 3:
            fill_disk(disk)

    _before_step(happens)


def remove() -> None:
    """A `before` hook: the folder SPY_DISK is removed before step 5."""

    def happens(step: int) -> None:
        if step == 5:
            shutil.rmtree(os.environ["SPY_DISK"])

    _before_step(happens)


def break_writers() -> None:
    """A `before` hook: TensorBoard's writer fails from its 30th value on, W&B from its 10th."""
    from torch.utils.tensorboard import SummaryWriter

    from tests.host import spy_wandb

    spy_wandb.stub()
    _fail_from(SummaryWriter, "add_scalar", 30)
    _fail_from(SummaryWriter, "flush", 1)
    _fail_from(spy_wandb.Wandb, "log", 10)
    _fail_from(spy_wandb.Wandb, "finish", 1)


def _fail_from(owner: type, name: str, first: int) -> None:
    """Let a method raise from its `first` call on."""
    method, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= first:
            raise ConnectionError("nobody listens")
        return method(*args, **kwargs)

    setattr(owner, name, failing)
