"""Makes child processes of `multiprocessing` exit when their parent has ended for any reason.

Megatron writes checkpoints in forked or spawned processes. A rank that is killed by a signal cannot
end them, and they would keep its memory and ports.
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

_PARENT_CHECK_SECONDS = 0.25  # they hold its sockets, too: others see its end only then


class ForkWatch:
    """While this object exists, processes forked by `multiprocessing` exit after their parent."""

    def __init__(self) -> None:
        util.register_after_fork(self, _watch_parent)  # for as long as this object lives


def watch_spawned(patcher: Patcher) -> None:
    """Make processes spawned by `multiprocessing`, and their own forks, exit after their parent.

    Args:
        patcher: undoes the change.
    """
    patcher.wrap(popen_spawn_posix.Popen, "_launch", _with_watch)


class _SpawnWatch:
    """An attribute of a spawned process that starts the watch when it is unpickled there."""

    def __reduce__(self) -> tuple[Callable[[int], ForkWatch], tuple[int]]:
        return _start_in_spawned, (os.getpid(),)


def _with_watch(launch: Callable[..., None]) -> Callable[..., None]:
    @wraps(launch)
    def launch_watched(popen: object, process: BaseProcess) -> None:
        vars(process)["_edit_watch"] = _SpawnWatch()
        try:
            launch(popen, process)
        finally:
            vars(process).pop("_edit_watch", None)

    return launch_watched


def _start_in_spawned(parent: int) -> ForkWatch:
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    return ForkWatch()


def _watch_parent(_: ForkWatch) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.pid,), daemon=True).start()


def _exit_with_parent(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)  # no process is left to read an exit code or message
