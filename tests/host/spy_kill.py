"""Hooks that kill ranks while a checkpoint is saved, at a moment of time or at a call.

And one, without settings, that lets a rank come late to a load.

Settings, beside `SPY_DIR`: `SPY_SAVE` is the number of the save in this run, from 1 on, and
`SPY_VICTIMS` lists the ranks that die, separated by commas. `SPY_DIR` keeps, over several runs,
how long the last whole save took, and which iterations were begun to be saved.
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
    """Kill after `SPY_FRACTION` of the time that the last whole save took; without it, never."""
    _watch_saves(None)
    is_killer = os.environ["RANK"] == os.environ.get("SPY_VICTIMS", "").split(",")[0]
    if is_killer and "SPY_FRACTION" in os.environ:
        _watch_saves(int(os.environ["SPY_SAVE"]))


def kill_in_async_save() -> None:
    """The same, for `--async-save`: lets Megatron's worker, which wants CUDA, run on a CPU.

    There, nothing is copied to the host first: the worker would write what training changes.
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
    """Kill rank 0 at a call on files, in the thread that completes the checkpoint.

    `SPY_CALL` is a name and a number: "rename 2" is the second renaming after the checksums are
    taken. With "none", the calls are listed in `calls.json` and nobody dies. A call that writes
    gets as far as one letter.
    """
    if os.environ["RANK"] == "0":
        threading.setprofile(_Watcher().begin)
    _note_pid()


def come_late() -> None:
    """Let rank 1 be late after the process groups are there; the ranks that refuse leave soon."""
    import megatron.training.initialize as initialize

    from tests.host.spy import hurry

    hurry()
    build = initialize._compile_dependencies

    def late() -> None:
        time.sleep(2)
        build()

    if os.environ["RANK"] == "1":
        initialize._compile_dependencies = late


def _watch_saves(number: int | None) -> None:
    """Note saves and their duration; start the clock of the bomb when `number` begins."""
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
            threading.Thread(target=_explode, args=(saves[-1],), daemon=True).start()
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


def _explode(begin: float) -> None:
    duration = float((out_dir() / "duration").read_text())
    delay = float(os.environ["SPY_FRACTION"]) * duration
    time.sleep(max(0.0, begin + delay - time.monotonic()))
    _kill()


def _note_pid() -> None:
    (out_dir() / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


def _kill() -> None:
    """Kill the victims at once; this process, if it is one, last."""
    victims = os.environ["SPY_VICTIMS"].split(",")
    others = [int((out_dir() / f"pid-{rank}").read_text()) for rank in victims]
    for pid in sorted(others, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


class _Watcher:
    """Counts calls in one thread, by Python's own profiling hook."""

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
        """The first event of any thread."""
        self.threads += threading.current_thread().name == _THREAD
        is_it = threading.current_thread().name == _THREAD and self.threads == self.save
        sys.setprofile(self.watch if is_it else None)

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """Every later event of the thread that completes the checkpoint."""
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
    """The calls in `calls.json`, for `SPY_CALL`; of many removals one after another only some."""
    calls = json.loads((folder / "calls.json").read_text())
    removals = [place for place, name in enumerate(calls) if name in ("unlink", "rmdir")]
    for place, name in enumerate(calls):
        is_removal = place - 1 in removals or place in removals
        if is_removal and place + 1 in [*removals, len(calls)] and place % 5:
            continue
        yield f"{name} {calls[: place + 1].count(name)}"
