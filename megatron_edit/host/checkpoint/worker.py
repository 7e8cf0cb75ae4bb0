"""Notices when a process that writes asynchronous saves ends, for which Megatron would wait.

A thread of each rank follows its worker (`--use-persistent-ckpt-worker`). When the worker has
ended, or has been stopped for a while, the thread releases all that waits for it: saves that it had
not finished fail on all ranks, as after an error of writing, and the next one gets a new worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from multiprocessing.queues import JoinableQueue
from pathlib import Path
from queue import Empty

from megatron_edit.host.seams.megatron import AsyncCaller, Results
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.observe.console import warn

_CHECK_SECONDS = 0.25
_STOPPED_SECONDS = 10.0  # a stopped worker is killed after these
_GONE = (OSError, EOFError)  # of a proxy whose process has ended


@dataclass
class _Completions:
    """Replaces the queue on which workers report that a save is done.

    Attributes:
        queues: of the workers so far, in this order; some items may not be read yet.
        num_failed: saves of an ended worker that are not reported yet.
    """

    queues: list[Results]
    num_failed: int = 0

    def get_nowait(self) -> object:
        """Return the number of some save."""
        if self.num_failed:
            self.num_failed -= 1
            return -1
        for queue in self.queues:
            with suppress(Empty):
                return queue.get_nowait()
        raise Empty


class WorkerWatch:
    """Follows this rank's worker.

    Args:
        rank: how messages name this rank.
    """

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._followed: BaseProcess | None = None
        self._closed: BaseProcess | None = None
        self._lock = threading.Lock()  # held while the queues of a worker are released or replaced

    def attach(self, patcher: Patcher) -> None:
        """Wrap Megatron's use of the worker. Imports Megatron.

        Args:
            patcher: undoes it.
        """
        from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

        caller = async_utils.PersistentAsyncCaller
        patcher.wrap(caller, "schedule_async_call", self._with_live_worker)
        patcher.wrap(caller, "close", self._closing)
        patcher.wrap(
            filesystem_async.FileSystemWriterAsync, "retrieve_write_results", _with_lost_results
        )

    def _with_live_worker[T](
        self, schedule: Callable[[AsyncCaller, T], None]
    ) -> Callable[[AsyncCaller, T], None]:
        @wraps(schedule)
        def scheduled(caller: AsyncCaller, request: T) -> None:
            process, earlier = _process_of(caller), None
            owner, prefix = _place_of(caller)
            if process is not None and not process.is_alive():
                with self._lock:
                    _release(caller, f"the process that writes checkpoints ({process.pid}) ended")
                    earlier = getattr(owner, f"{prefix}comp_q")
                    if prefix:  # else the constructor makes the queues
                        setattr(owner, f"{prefix}process", None)
                    done = caller.cur_item  # a save that is not done yet on other ranks
                    type(caller).__init__(caller)
                    caller.cur_item = done
                process = None
            if process is None or process is not self._followed:
                threading.Thread(
                    target=self._follow, args=(caller,), name="edit-worker", daemon=True
                ).start()
            schedule(caller, request)
            if earlier is not None:  # reported before those of the new worker
                earlier.queues.append(getattr(owner, f"{prefix}comp_q"))
                setattr(owner, f"{prefix}comp_q", earlier)

        return scheduled

    def _closing(self, close: Callable[..., None]) -> Callable[..., None]:
        @wraps(close)
        def closed(caller: AsyncCaller, abort: bool = False) -> None:
            process = _process_of(caller)
            if abort:
                self._closed = process
            close(caller, abort=abort or (process is not None and not process.is_alive()))

        return closed

    def _follow(self, caller: AsyncCaller) -> None:
        """In a thread: wait until the worker ends, and release what waits for it."""
        while (process := _process_of(caller)) is None:
            time.sleep(_CHECK_SECONDS)
        self._followed = process
        stopped, how = 0.0, ""
        while process.is_alive():
            time.sleep(_CHECK_SECONDS)
            stopped = stopped + _CHECK_SECONDS if _is_stopped(process) else 0.0
            if stopped >= _STOPPED_SECONDS:
                how = f"was stopped for {stopped:g} s and has been killed"
                process.kill()
        code = process.exitcode or 0
        if code == 0 or process is self._closed:
            return
        how = how or (
            f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        )
        text = f"the process that writes checkpoints (pid {process.pid}) {how}"
        warn(f"{self._rank}: {text}; the next save starts a new one")
        while True:  # a save may be scheduled meanwhile
            with self._lock:
                if _process_of(caller) is not process:
                    return
                _release(caller, text)
            time.sleep(_CHECK_SECONDS)


def _place_of(caller: AsyncCaller) -> tuple[object, str]:
    """Return what holds the worker's queues, and the prefix of their names."""
    if hasattr(caller, "_persistent_queue"):
        return type(caller), "_persistent_"
    return caller, ""  # megatron-core 0.16


def _process_of(caller: AsyncCaller) -> BaseProcess | None:
    owner, prefix = _place_of(caller)
    return caller.process or getattr(owner, f"{prefix}process")


def _release(caller: AsyncCaller, text: str) -> None:
    """Let saves that an ended worker had not finished fail, and no rank wait for them."""
    owner, prefix = _place_of(caller)
    requests, staged = getattr(owner, f"{prefix}queue"), getattr(owner, f"{prefix}preload_q")
    unfinished = _finish_all(requests)
    _finish_all(staged)
    completions = getattr(owner, f"{prefix}comp_q")
    if not isinstance(completions, _Completions):
        completions = _Completions([completions])
    if (results := _results()) is not None:
        with suppress(*_GONE):
            for _ in range(unfinished):
                results.put(RuntimeError(text))
    completions.num_failed += unfinished
    setattr(owner, f"{prefix}comp_q", completions)


def _finish_all(queue: JoinableQueue[object]) -> int:
    """Mark all items of a queue that nobody reads as done; return their number."""
    queue.cancel_join_thread()
    finished = 0
    with suppress(ValueError):  # no more items
        while True:
            queue.task_done()
            finished += 1
    return finished


def drop_results(num_results: int) -> None:
    """Remove the results of writing that a failed save will not fetch."""
    if (results := _results()) is not None:
        with suppress(Empty, *_GONE):
            for _ in range(num_results):
                results.get_nowait()


def _results() -> Results | None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async._results_queue


def _with_lost_results(retrieve: Callable[..., object]) -> Callable[..., object]:
    """Let a save fail on all ranks where the process that holds the results has ended."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    @wraps(retrieve)
    def retrieved(writer: object) -> object:
        try:
            return retrieve(writer)
        except _GONE:
            filesystem_async._results_queue = None  # the next save makes a new one
            error = RuntimeError("the process that passes on the results of writing has ended")
            return filesystem_async._wrap_exception(error)

    return retrieved


def _is_stopped(process: BaseProcess) -> bool:
    with suppress(OSError):
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False
