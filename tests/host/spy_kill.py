"""Hooks that kill ranks while a checkpoint is saved, and one that delays a rank before a load.

Settings besides `SPY_DIR`: `SPY_SAVE` is the number of the save in this run, from 1 on, and
`SPY_VICTIMS` lists the ranks that are killed, separated by commas. `SPY_DIR` keeps over several
runs how long the last complete save took, and of which iterations a save began.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import wraps
from typing import Any

from tests.host.spy import out_dir


def kill_in_save() -> None:
    """Kill after `SPY_FRACTION` of the time of the last complete save; without it, never."""
    _watch_saves(None)
    is_killer = os.environ["RANK"] == os.environ.get("SPY_VICTIMS", "").split(",")[0]
    if is_killer and "SPY_FRACTION" in os.environ:
        _watch_saves(int(os.environ["SPY_SAVE"]))


def kill_in_async_save() -> None:
    """Do the same for `--async-save`, with Megatron's worker, which requires CUDA, on a CPU.

    On a CPU Megatron does not copy tensors to the host first. The hook does, as otherwise the
    worker would write values that training has changed since.
    """
    import megatron.training.initialize as initialize
    import torch
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    prepare = FileSystemWriterAsync.get_save_function_and_args

    def copied(self: Any) -> Any:
        self.write_buckets = [
            (name, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for name, key, (data, tensors) in self.write_buckets or []
        ]
        return prepare(self)

    FileSystemWriterAsync.get_save_function_and_args = copied
    start = initialize.init_persistent_async_worker
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    # Forked, the worker inherits the two lines above.
    initialize.init_persistent_async_worker = lambda rank, mode: start(rank, "fork")
    kill_in_save()


def delay_rank_1() -> None:
    """Delay rank 1 after the process groups are built; ranks that refuse exit soon."""
    import megatron.training.initialize as initialize

    from tests.host.spy import shorten_grace

    shorten_grace()
    build = initialize._compile_dependencies

    def late() -> None:
        time.sleep(2)
        build()

    if os.environ["RANK"] == "1":
        initialize._compile_dependencies = late


def _watch_saves(number: int | None) -> None:
    """Record saves and their duration; when save `number` begins, start the timer that kills."""
    import megatron.training.training as training

    from megatron_edit.checkpoint.folder import CheckpointFolder

    save, commit = training.save_checkpoint_and_time, CheckpointFolder.commit
    saves: list[float] = []
    _note_pid()

    @wraps(save)
    def noted(iteration: int, *args: Any, **kwargs: Any) -> Any:
        saves.append(time.monotonic())
        if number is None:
            with (out_dir() / "begun").open("a") as file:
                file.write(f"{iteration}\n")
        elif len(saves) == number:
            threading.Thread(target=_kill_after_delay, args=(saves[-1],), daemon=True).start()
        return save(iteration, *args, **kwargs)

    @wraps(commit)
    def timed(*args: Any) -> Any:
        result = commit(*args)
        new = out_dir() / ".duration"
        new.write_text(str(time.monotonic() - saves[-1]))
        new.replace(out_dir() / "duration")
        return result

    training.save_checkpoint_and_time = noted
    if number is None:
        CheckpointFolder.commit = timed  # type: ignore[method-assign, assignment]


def _kill_after_delay(begin: float) -> None:
    duration = float((out_dir() / "duration").read_text())
    delay = float(os.environ["SPY_FRACTION"]) * duration
    time.sleep(max(0.0, begin + delay - time.monotonic()))
    _kill()


def _note_pid() -> None:
    (out_dir() / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


def _kill() -> None:
    """Kill the victims; this process, if it is one of them, last."""
    victims = os.environ["SPY_VICTIMS"].split(",")
    others = [int((out_dir() / f"pid-{rank}").read_text()) for rank in victims]
    for pid in sorted(others, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)
