"""A hook that fills the disk of the checkpoints while ranks train."""

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


def fill_before_saves() -> None:
    """Keep SPY_DISK full, by a filler file, in the saves whose numbers, from 1, SPY_FULL lists.

    The first rank of all fills the disk when the previous save is over; the others wait for it.
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


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
