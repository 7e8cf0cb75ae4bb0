"""Hooks that take the room from the disk of the checkpoints while ranks train."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from tests.harness.disk import fill_disk
from tests.host.spy import out_dir
from tests.host.spy_resume import record_all


def full_at() -> None:
    """No room on SPY_DISK in the saves whose numbers SPY_FULL lists, from 1; a file takes it.

    Rank 0 of all fills the disk when the save before is over, and the other ranks wait for it.
    """
    import megatron.training.training as training

    record_all()
    disk, save = Path(os.environ["SPY_DISK"]), training.save_checkpoint_and_time
    full = [int(number) for number in os.environ["SPY_FULL"].split(",")]
    is_first, saves = os.environ["RANK"] == "0", 0

    @wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        nonlocal saves
        saves += 1
        is_ready = out_dir() / f"ready-{saves}"
        if is_first:
            _wait_until(lambda: not any(disk.glob("**/.iter_*")))
            (disk / "filler").unlink(missing_ok=True)
            if saves in full:
                fill_disk(disk)
            is_ready.touch()
        _wait_until(is_ready.exists)
        return save(*args, **kwargs)

    training.save_checkpoint_and_time = saving


def _wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
