"""Errors of writing a checkpoint, recorded until all ranks have made the same collectives.

Megatron's saves are collective. If a rank raised between two of their collectives, the others would
wait in the next one; so an error of one rank is recorded, and the rank continues. An error on any
rank fails the save on all (`committing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps

from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.errors import EditError
from megatron_edit.host.checkpoint.paths import without_retention
from megatron_edit.host.checkpoint.worker import drop_results
from megatron_edit.host.seams.megatron import (
    AsyncRequest,
    CheckpointFileWriter,
    Results,
    WriteFunctions,
)
from megatron_edit.host.seams.patching import Patcher

# Reported by a rank whose own part is complete, where another rank of its replica failed.
ANOTHER_RANK_FAILED = "another rank of the replica failed"
_WORKER = "Worker failure: "  # Megatron's prefix to the writer's message

# Texts of the exceptions of Megatron's writer in this process, from any of its threads. Megatron
# passes on only the type of an exception, possibly from another process.
_RAISED: list[str] = []


@dataclass
class SaveRecord:
    """Errors and size of one save on this rank.

    Attributes:
        errors: one line each.
        num_bytes: to be written by this rank, as far as Megatron's writer reports it.
        num_results: of writers of this rank, not fetched yet.
    """

    errors: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_results: int = 0


class WriteErrors:
    """Records errors of Megatron's writers that would end only one rank."""

    def __init__(self) -> None:
        self._record: SaveRecord | None = None

    def attach(self, patcher: Patcher) -> None:
        """Wrap the functions with which Megatron writes a save. Imports Megatron.

        Args:
            patcher: undoes it.
        """
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
                self._record.num_bytes += _size_of(writer)
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


def _size_of(writer: CheckpointFileWriter) -> int:
    """Return the number of bytes that a writer was given."""
    return sum(
        sum(data.getbuffer().nbytes for _, data in streams)
        + sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        for _, _, (streams, tensors) in writer.write_buckets or ()
    )


@dataclass(frozen=True)
class _Queue:
    """A wrapper of Megatron's queue that inspects or replaces the values put on it.

    Attributes:
        results: the queue.
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
