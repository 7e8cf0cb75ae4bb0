"""Processes of `multiprocessing` end with the one that started them, however that ends.

Megatron writes checkpoints in processes of their own, forked or spawned. Killed by a signal, a rank
cannot end them: they would keep its memory and its ports.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing import popen_spawn_posix, util
from multiprocessing.process import BaseProcess

from megatron_edit.host.seams.patching import Patcher

_LOOK_SECONDS = 2.0


class ForkWatch:
    """While it exists, what `multiprocessing` forks looks for its parent, and ends without it."""

    def __init__(self) -> None:
        util.register_after_fork(self, _watch_parent)  # for as long as this object lives


def watch_spawned(patcher: Patcher) -> None:
    """Let what `multiprocessing` spawns end with this process, too, with what it forks itself.

    Args:
        patcher: that undoes it.
    """
    patcher.wrap(popen_spawn_posix.Popen, "_launch", _with_watch)


class _SpawnWatch:
    """An attribute of a process that is spawned: unpickled there, it begins to watch."""

    def __reduce__(self) -> tuple[Callable[[int], ForkWatch], tuple[int]]:
        return _begin_in_spawned, (os.getpid(),)


def _with_watch(launch: Callable[..., None]) -> Callable[..., None]:
    @wraps(launch)
    def launch_watched(popen: object, process: BaseProcess) -> None:
        vars(process)["_edit_watch"] = _SpawnWatch()
        try:
            launch(popen, process)
        finally:
            vars(process).pop("_edit_watch", None)

    return launch_watched


def _begin_in_spawned(parent: int) -> ForkWatch:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return ForkWatch()


def _watch_parent(_: ForkWatch) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)  # nobody is left to be told
