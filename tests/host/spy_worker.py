"""A hook that kills or stops the process that writes asynchronous saves."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import wraps
from typing import Any

from tests.host.spy_resume import record_all

SECONDS = 0.5


def disturb_worker() -> None:
    """On the rank SPY_RANK, in the third save, by SPY_CASE: `between` kills the worker before it
    gets the save, `idle` a second before, `during` while it has it, `stopped` stops it, `results`
    kills the process that holds the results."""
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    from megatron_edit.host.checkpoint import async_saves

    record_all()
    _finish_saves_first()
    if os.environ["RANK"] != os.environ["SPY_RANK"]:
        return
    async_saves._STOPPED_SECONDS = 1.0
    caller = async_utils.PersistentAsyncCaller
    case, schedule, saves = os.environ["SPY_CASE"], caller.schedule_async_call, 0

    @wraps(schedule)
    def scheduling(self: Any, request: Any) -> None:
        nonlocal saves
        saves += 1
        process = caller._persistent_process
        if saves == 3 and case == "results":
            process = filesystem_async._results_queue._manager._process
        if saves == 3 and process is not None:
            if case in ("during", "stopped"):
                os.kill(process.pid, signal.SIGSTOP)
            if case == "during":
                threading.Timer(SECONDS, os.kill, (process.pid, signal.SIGKILL)).start()
            if case in ("between", "results"):
                os.kill(process.pid, signal.SIGKILL)
        schedule(self, request)

    caller.schedule_async_call = scheduling


def _finish_saves_first() -> None:
    """Let a save begin when the one before is written: only the disturbed one may fail."""
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.training import training

    save, saves = training.save_checkpoint_and_time, 0
    is_idle = os.environ["SPY_CASE"] == "idle" and os.environ["RANK"] == os.environ["SPY_RANK"]

    @wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        nonlocal saves
        saves += 1
        training.maybe_finalize_async_save(blocking=True)
        if is_idle and saves == 3:
            os.kill(async_utils.PersistentAsyncCaller._persistent_process.pid, signal.SIGKILL)
            time.sleep(1)
        return save(*args, **kwargs)

    training.save_checkpoint_and_time = saving
