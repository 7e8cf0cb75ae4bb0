"""Hooks that harm a run: bad data, errors, a full disk, lost ranks, lost writers of saves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tests.harness.disk import fill_disk
from tests.host.spy import _replica, out_dir, overflow_one_replica, record
from tests.host.spy_state import record_all


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


# ---- in an exchange or a save


def end_in_exchange() -> None:
    """Send itself the signal whose number is in the file `signal`, with all units on their way."""
    from megatron_edit.engine.sync.manager import SyncManager

    start = SyncManager.start

    def spied(self: SyncManager, sync: Any) -> None:
        start(self, sync)
        wanted = out_dir() / "signal"
        if wanted.exists():
            number = int(wanted.read_text())
            wanted.unlink()
            os.kill(os.getpid(), number)

    SyncManager.start = spied  # type: ignore[method-assign]


def flip_in_exchange() -> None:
    """Flip a bit of what rank 1 sends, once the file `flip` is there: as all replicas add it, all
    get the same wrong average. Also record what `spy.record` records."""
    from megatron_edit.engine.sync.manager import SyncManager

    record()
    start = SyncManager.start

    def spied(self: SyncManager, sync: Any) -> None:
        wanted = out_dir() / "flip"
        if os.environ["RANK"] == "1" and wanted.exists():
            wanted.rename(out_dir() / "flipped")
            unit = sync.inflight_units[-1]
            assert not unit.is_excluded
            unit.average.view(torch.int32)[-1] ^= 1 << 30
        start(self, sync)

    SyncManager.start = spied  # type: ignore[method-assign]


def stop_at_meeting() -> None:
    """Ask itself to stop at a meeting, in the step after which a round is exchanged, once the file
    `stop` is there."""
    from megatron_edit.engine.rounds.elastic import ElasticRounds

    meet = ElasticRounds.meet

    def stopped(self: ElasticRounds, meeting: Any) -> bool:
        goes_on = meet(self, meeting)
        if (wanted := out_dir() / "stop").exists():
            wanted.rename(out_dir() / "stopped")
            os.kill(os.getpid(), signal.SIGTERM)
        return goes_on

    ElasticRounds.meet = stopped  # type: ignore[method-assign]


def end_in_save() -> None:
    """Send itself a signal in the completion of a checkpoint, before the tracker names it.

    The file `save` has the number of the signal, and text that the path of the checkpoint contains;
    it is renamed to `saving` before.
    """
    from megatron_edit.checkpoint import folder

    sync = folder._sync_folder

    def synced(path: Path) -> None:
        sync(path)
        if (wanted := out_dir() / "save").exists():
            number, _, text = wanted.read_text().partition(" ")
            if text in str(path):
                wanted.rename(out_dir() / "saving")
                os.kill(os.getpid(), int(number))

    folder._sync_folder = synced


SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


# ---- errors


def fail() -> None:
    """A `before` hook: the rank of replica 1 of two raises in its step 6."""
    from megatron.training import training

    train_step, steps = training.train_step, 0
    is_bad = os.environ["RANK"] == "1"

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if is_bad and steps == 6:
            raise ValueError("a broken\nbatch")
        return train_step(*args, **kwargs)

    training.train_step = failing


def lack_memory() -> None:
    """A `before` hook: the rank of replica 1 of two cannot allocate anchor and momentum."""
    import torch

    from megatron_edit.engine.sync.outer_state import OuterState

    def allocate(*_: Any, **__: Any) -> OuterState:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if os.environ["RANK"] == "1":
        OuterState.allocate = allocate  # type: ignore[method-assign]


# ---- a full disk


def fill_before_saves() -> None:
    """Keep SPY_DISK full, by a filler file, in the saves whose numbers, from 1, SPY_FULL lists.

    The first rank of all fills the disk when the previous save is over; the others wait for it.
    """
    from megatron.training import training

    record_all()
    disk, save = Path(os.environ["SPY_DISK"]), training.save_checkpoint_and_time
    full = [int(number) for number in os.environ["SPY_FULL"].split(",")]
    is_first, saves = os.environ["RANK"] == "0", 0

    @wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        nonlocal saves
        saves += 1
        is_ready = out_dir() / f"ready-{saves}"
        training.maybe_finalize_async_save(blocking=True)
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


# ---- overflow


def overflow_and_record() -> None:
    """Call `overflow_one_replica` and `record`."""
    overflow_one_replica()
    record()


# ---- writers of asynchronous saves


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
