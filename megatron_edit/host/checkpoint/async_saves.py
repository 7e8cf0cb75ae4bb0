"""Asynchronous saves: their errors, the worker that writes them, and requests that are merged.

Megatron's saves are collective. If a rank raised between two of their collectives, the others would
wait in the next one; so an error of one rank is recorded, and the rank continues. An error on any
rank fails the save on all (`committing.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from multiprocessing.queues import JoinableQueue
from pathlib import Path
from queue import Empty

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.errors import EditError
from megatron_edit.host.checkpoint.paths import without_retention
from megatron_edit.host.seams.megatron import (
    AsyncCaller,
    CheckpointFileWriter,
    Results,
    WriteFunctions,
)
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.observe.console import warn

# Reported by a rank whose own part is complete, where another rank of its replica failed.
ANOTHER_RANK_FAILED = "another rank of the replica failed"
_WORKER = "Worker failure: "  # Megatron's prefix to the writer's message

# Texts of the exceptions of Megatron's writer in this process, from any of its threads. Megatron
# passes on only the type of an exception, possibly from another process.
_RAISED: list[str] = []


@dataclass
class SaveRecord:
    """Errors of one save on this rank.

    Attributes:
        errors: one line each.
        num_results: of writers of this rank, not fetched yet.
    """

    errors: list[str] = field(default_factory=list)
    num_results: int = 0


class WriteErrors:
    """Records errors of Megatron's writers that would end only one rank."""

    def __init__(self) -> None:
        self._record: SaveRecord | None = None

    def attach(self, patcher: Patcher) -> None:
        """Wrap the functions with which Megatron writes a save. Imports Megatron."""
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import common, filesystem_async

        writer = filesystem_async.FileSystemWriterAsync
        patcher.wrap(writer, "get_save_function_and_args", self._with_queued_errors)
        patcher.wrap(writer, "write_preloaded_data", _with_recorded_exception)
        patcher.wrap(writer, "retrieve_write_results", self._counting_results)
        patcher.wrap(writer, "finish", self._recording_write)
        patcher.wrap(serialization, "save_config", self._recording_write)
        if hasattr(serialization, "save_integrity_manifest"):  # megatron-core 0.19
            patcher.wrap(serialization, "save_integrity_manifest", self._recording_write)
        if strategy := getattr(common, "TorchCommonSaveStrategy", None):  # megatron-core 0.16
            for name in ("save_common", "save_sharded_objects"):
                patcher.wrap(strategy, name, self._recording_write)

    @contextmanager
    def recording(self, record: SaveRecord) -> Iterator[None]:
        """Inside, errors of a save go to `record`.

        Of the exceptions that reach this block only `CheckpointException` is caught: Megatron
        raises it on all ranks of the replica.
        """
        outer, self._record = self._record, record
        try:
            yield
        except CheckpointException as error:
            record.errors.extend(_texts(error))
        finally:
            self._record = outer

    def guard_completion(self, request: AsyncRequest, record: SaveRecord) -> None:
        """Let the finalize functions of an asynchronous save record errors, and stop at the first.

        Mutates: the request's functions are merged into one.
        """
        functions = list(request.finalize_fns)
        request.finalize_fns[:] = [partial(self._complete, functions, record)]

    def _complete(self, functions: Sequence[Callable[[], None]], record: SaveRecord) -> None:
        with self.recording(record), without_retention():
            for function in functions:
                function()
        if record.errors:  # later parts of this save have left theirs
            drop_results(record.num_results)

    def _counting_results(self, retrieve: Callable[..., object]) -> Callable[..., object]:
        @wraps(retrieve)
        def counted(writer: CheckpointFileWriter) -> object:
            if self._record is not None:
                self._record.num_results -= 1
            return retrieve(writer)

        return counted

    def _recording_write[**P](self, write: Callable[P, None]) -> Callable[P, None]:
        """Wrap a write by a single rank, between two collectives."""

        @wraps(write)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # `torch.save` raises the latter
                if self._record is None:
                    raise
                self._record.errors.append(error_text(error))

        return recorded

    def _with_queued_errors(
        self, prepare: Callable[[CheckpointFileWriter], WriteFunctions]
    ) -> Callable[[CheckpointFileWriter], WriteFunctions]:
        """Wrap the preparation of a writer: an exception would end the writer process, and others
        would wait for it. It is put on the queue like an error that Megatron has caught."""

        @wraps(prepare)
        def prepared(writer: CheckpointFileWriter) -> WriteFunctions:
            write, preload, arguments = prepare(writer)
            if self._record is not None:
                self._record.num_results += write is not None
            return None if write is None else partial(_write, write), preload, arguments

        return prepared


def error_text(error: BaseException) -> str:
    """Return an error on one line; the operating system's error if it is among the causes."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    shown = error if behind is None else behind
    first = (str(shown).strip().splitlines() or [type(shown).__name__])[0]
    return first if isinstance(shown, OSError | EditError) else f"{type(shown).__name__}: {first}"


def _texts(error: CheckpointException) -> list[str]:
    """Return a line for each failed rank; only rank 0 of the replica knows which ones failed."""
    return [
        f"rank {rank}: {str(cause).removeprefix(_WORKER)}"
        for rank, (cause, _) in sorted(error.failures.items())
    ] or [ANOTHER_RANK_FAILED]


@dataclass(frozen=True)
class _Queue:
    """A wrapper of Megatron's queue that inspects or replaces the values put on it.

    Attributes:
        through: called with each value; its result is put on the queue.
    """

    results: Results
    through: Callable[[object], object]

    def put(self, value: object) -> None:
        """Put a result, or an exception, on the queue."""
        self.results.put(self.through(value))


def _with_recorded_cause(value: object) -> object:
    """Replace Megatron's generic exception by the recorded cause."""
    if isinstance(value, BaseException):
        return RuntimeError(_RAISED[0] if _RAISED else error_text(value))
    return value


def _write(write: Callable[..., None], rank: int, buckets: object, results: Results) -> None:
    """In the writer process: call Megatron's writer and put any exception on the queue."""
    _RAISED.clear()
    queue = _Queue(results, _with_recorded_cause)
    try:
        write(rank, buckets, queue)
    except Exception as error:
        queue.put(error)


def _record_exception(value: object) -> object:
    """Record the text of an exception that Megatron returns in a tuple with a number."""
    if isinstance(value, tuple) and isinstance(value[-1], BaseException):
        _RAISED.append(error_text(value[-1]))
    return value


def _with_recorded_exception(write: Callable[..., object]) -> object:
    """Wrap Megatron's function that writes one file; it returns an exception or puts it on a
    queue."""

    @wraps(write)
    def recorded(*args: object, results_queue: Results | None = None, **kwargs: object) -> object:
        queue = None if results_queue is None else _Queue(results_queue, _record_exception)
        return _record_exception(write(*args, results_queue=queue, **kwargs))

    return staticmethod(recorded)


# ---- Notices when a process that writes asynchronous saves ends, for which Megatron would wait
#
# A thread of each rank follows its worker (`--use-persistent-ckpt-worker`). When the worker has
# ended, or has been stopped for a while, the thread releases all that waits for it: saves that it
# had not finished fail on all ranks, as after an error of writing, and the next one gets a new
# worker.


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
    """Follows this rank's worker."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._followed: BaseProcess | None = None
        self._closed: BaseProcess | None = None
        self._lock = threading.Lock()  # held while the queues of a worker are released or replaced

    def attach(self, patcher: Patcher) -> None:
        """Wrap Megatron's use of the worker. Imports Megatron."""
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


# ---- Merging several asynchronous saves into one
#
# Megatron's writer process takes one request at a time, and scheduling a request waits until the
# process has taken it: the second of two would wait until the first is written to disk.


_Call = tuple[Callable[..., None], list[object], Mapping[str, object]]
_BUCKETS = 1  # index of the data to be written among a writer's arguments


def merge_async_requests(requests: Sequence[AsyncRequest]) -> list[AsyncRequest]:
    """Return the same saves in as few requests as possible, in their order.

    All tensors are copied to the host in one go; then they are written, and completed, one request
    after another. Requests of NVIDIA's resiliency extension are not merged: its writers keep state
    beyond their arguments.

    Args:
        requests: not scheduled yet, with all their finalize functions.
    """
    if len(requests) < 2 or any(type(request) is not AsyncRequest for request in requests):
        return list(requests)
    finalize = [function for request in requests for function in request.finalize_fns]
    writing = [request for request in requests if request.async_fn is not None]
    if not writing:
        return [requests[-1]._replace(finalize_fns=finalize)]
    calls = [
        (write, _arguments_of(each), each.async_fn_kwargs)
        for each in writing
        if (write := each.async_fn) is not None
    ]
    return [
        AsyncRequest(
            async_fn=partial(_write_together, calls),
            async_fn_args=("", None),
            finalize_fns=finalize,
            preload_fn=partial(_fetch, [_fetcher(each) for each in writing]),
        )
    ]


def _arguments_of(request: AsyncRequest) -> list[object]:
    """Return its arguments without the data that its preload function returns."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[_BUCKETS] = None
    return arguments


def _fetcher(request: AsyncRequest) -> Callable[[], object]:
    return request.preload_fn or partial(request.async_fn_args.__getitem__, _BUCKETS)


def _fetch(fetchers: list[Callable[[], object]]) -> list[object]:
    """In the writer process: copy the tensors of all requests to the host."""
    return [fetch() for fetch in fetchers]


def _write_together(calls: list[_Call], _: str, fetched: list[object]) -> None:
    """In the writer process: write each request's data in turn."""
    for (write, arguments, named), buckets in zip(calls, fetched, strict=True):
        arguments[_BUCKETS] = buckets
        write(*arguments, **named)
