"""Hooks that kill ranks while a checkpoint is saved, at a point in time or at a file operation.

And one, without settings, that delays a rank before a load.

Settings besides `SPY_DIR`: `SPY_SAVE` is the number of the save in this run, from 1 on, and
`SPY_VICTIMS` lists the ranks that are killed, separated by commas. `SPY_DIR` keeps over several
runs how long the last complete save took, and of which iterations a save began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.host.spy import out_dir

_THREAD = "edit-commit"
_CALLS = {"open", "write", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir"}


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


def kill_at_call() -> None:
    """Kill the victims at a file operation of rank 0, in the thread that completes the checkpoint.

    `SPY_CALL` is a name and a number: "rename 2" is the second rename after the checksums are
    computed. With "none", the calls are listed in `calls.json` and no rank is killed. A call that
    writes gets as far as one character.
    """
    if os.environ["RANK"] == "0":
        threading.setprofile(_Watcher().begin)
    _note_pid()


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


class _Watcher:
    """Counts calls in one thread with Python's profiling hook."""

    def __init__(self) -> None:
        from megatron_edit.checkpoint.manifest import Manifest
        from megatron_edit.observe.console import DroppingFile

        self.no_file = (str, DroppingFile)  # str.replace, and what the console writes
        self.manifest: CodeType = Manifest.text.__code__
        name, _, number = os.environ["SPY_CALL"].partition(" ")
        self.name, self.number = name, int(number or 0)
        self.save = int(os.environ["SPY_SAVE"])
        self.threads = 0
        self.calls: list[str] = []
        self.is_counting = False

    def begin(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handle the first event of any thread."""
        self.threads += threading.current_thread().name == _THREAD
        is_watched = threading.current_thread().name == _THREAD and self.threads == self.save
        sys.setprofile(self.watch if is_watched else None)

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handle every later event of the thread that completes the checkpoint."""
        self.is_counting |= event == "call" and frame.f_code is self.manifest
        if not self.is_counting or event != "c_call" or arg.__name__ not in _CALLS:
            return
        if isinstance(arg.__self__, self.no_file) or arg.__self__ is sys.stdout:
            return
        self.calls.append(arg.__name__)
        if self.name == "none":
            (out_dir() / "calls.json").write_text(json.dumps(self.calls))
        elif self.calls.count(self.name) == self.number and arg.__name__ == self.name:
            if self.name == "write":
                arg.__self__.write("{")
                arg.__self__.flush()
            _kill()


def moments_of(folder: Path) -> Iterator[str]:
    """Yield the calls in `calls.json` for `SPY_CALL`; of consecutive removals only some."""
    calls = json.loads((folder / "calls.json").read_text())
    removals = [place for place, name in enumerate(calls) if name in ("unlink", "rmdir")]
    for place, name in enumerate(calls):
        is_removal = place - 1 in removals or place in removals
        if is_removal and place + 1 in [*removals, len(calls)] and place % 5:
            continue
        yield f"{name} {calls[: place + 1].count(name)}"
