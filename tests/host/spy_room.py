"""Hooks that take the room from the disk of the checkpoints while ranks train."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.harness.disk import fill_disk
from tests.host.spy_resume import record_all


def _before_saves(happens: Callable[[int], None]) -> None:
    """Let something happen on rank 0 of all before each save, which counts from 1."""
    import megatron.training.training as training

    save = training.save_checkpoint_and_time
    is_first, saves = os.environ["RANK"] == "0", 0

    @wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        nonlocal saves
        saves += 1
        if is_first:
            happens(saves)
        return save(*args, **kwargs)

    training.save_checkpoint_and_time = saving


def full_at() -> None:
    """No room on SPY_DISK in the saves whose numbers SPY_FULL lists; a file takes it."""
    disk = Path(os.environ["SPY_DISK"])
    full = [int(number) for number in os.environ["SPY_FULL"].split(",")]

    def happens(save: int) -> None:
        _wait_until_quiet(disk)
        (disk / "filler").unlink(missing_ok=True)
        if save in full:
            fill_disk(disk)

    _before_saves(happens)
    record_all()


def _wait_until_quiet(disk: Path) -> None:
    """Wait until no save is under way: the one before may be completed in the background."""
    import time

    until = time.monotonic() + 60
    while any(disk.glob("**/.iter_*")) and time.monotonic() < until:
        time.sleep(0.05)
