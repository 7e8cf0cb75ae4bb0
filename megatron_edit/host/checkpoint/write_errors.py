"""Errors of writing a checkpoint, kept until all ranks have made the same collectives.

Megatron's saves are collective. A rank that raised between two of their collectives would leave the
others waiting in the next one, so an error of one rank alone is recorded, and the rank goes on.
What failed on any rank fails the save on all (`committing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Protocol

from torch.distributed.checkpoint.api import CheckpointException

from megatron_edit.errors import EditError
from megatron_edit.host.checkpoint.paths import without_retention
from megatron_edit.host.seams.megatron import AsyncRequest, CheckpointFileWriter, WriteFunctions
from megatron_edit.host.seams.patching import Patcher

# Of a rank whose own part is whole, where another rank of its replica has failed.
ANOTHER_RANK_FAILED = "another rank of the replica failed"
_WORKER = "Worker failure: "  # Megatron's words before those of the writer

# What Megatron's writer raised in this process, in whichever of its threads. Megatron hands over
# the type of an exception alone, and from a process that may not be ours.
_RAISED: list[str] = []


class _Results(Protocol):
    """A queue on which a writer hands over what it wrote, or an exception."""

    def put(self, value: object) -> None:
        """Hand it over."""


@dataclass
class SaveRecord:
    """How one save went on this rank.

    Attributes:
        errors: what failed, a line each; empty where nothing did.
        num_bytes: that this rank was to write, as far as Megatron's writer tells.
    """

    errors: list[str] = field(default_factory=list)
    num_bytes: int = 0


class WriteErrors:
    """Records errors of Megatron's writers where they would end one rank alone."""

    def __init__(self) -> None:
        self._record: SaveRecord | None = None

    def attach(self, patcher: Patcher) -> None:
        """Wrap what Megatron writes with in a save. Imports Megatron.

        Args:
            patcher: undoes it.
        """
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import common, filesystem_async

        writer = filesystem_async.FileSystemWriterAsync
        patcher.wrap(writer, "get_save_function_and_args", self._with_handed_over_errors)
        patcher.wrap(writer, "write_preloaded_data", _with_recorded_exception)
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

        Of what reaches this block only a failed write is caught: Megatron raises it on all ranks
        of the replica alike.
        """
        outer, self._record = self._record, record
        try:
            yield
        except CheckpointException as error:
            record.errors.extend(_texts(error))
        finally:
            self._record = outer

    def guard_completion(self, request: AsyncRequest, record: SaveRecord) -> None:
        """Let what completes an asynchronous save record its errors, and stop at the first.

        Mutates: the request's functions become one.
        """
        functions = list(request.finalize_fns)
        request.finalize_fns[:] = [partial(self._complete, functions, record)]

    def _complete(self, functions: Sequence[Callable[[], None]], record: SaveRecord) -> None:
        with self.recording(record), without_retention():
            for function in functions:
                function()

    def _recording_write[**P](self, write: Callable[P, None]) -> Callable[P, None]:
        """A write by one rank alone, between two collectives."""

        @wraps(write)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # `torch.save` raises the latter
                if self._record is None:
                    raise
                self._record.errors.append(text_of(error))

        return recorded

    def _with_handed_over_errors(
        self, prepare: Callable[[CheckpointFileWriter], WriteFunctions]
    ) -> Callable[[CheckpointFileWriter], WriteFunctions]:
        """What Megatron raises in the process that writes ends that process: the others would wait
        for it. It is handed over like an error that Megatron has caught."""

        @wraps(prepare)
        def prepared(writer: CheckpointFileWriter) -> WriteFunctions:
            write, preload, arguments = prepare(writer)
            if self._record is not None:
                self._record.num_bytes += _size_of(writer)
            return None if write is None else partial(_write, write), preload, arguments

        return prepared


def text_of(error: BaseException) -> str:
    """An error on one line; where the operating system's lies behind it, that one."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    shown = error if behind is None else behind
    first = (str(shown).strip().splitlines() or [type(shown).__name__])[0]
    return first if isinstance(shown, OSError | EditError) else f"{type(shown).__name__}: {first}"


def _texts(error: CheckpointException) -> list[str]:
    """By rank; only the first rank of the replica is told which ones failed."""
    return [
        f"rank {rank}: {str(cause).removeprefix(_WORKER)}"
        for rank, (cause, _) in sorted(error.failures.items())
    ] or [ANOTHER_RANK_FAILED]


def _size_of(writer: CheckpointFileWriter) -> int:
    """Bytes that a writer was given."""
    return sum(
        sum(data.getbuffer().nbytes for _, data in streams)
        + sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        for _, _, (streams, tensors) in writer.write_buckets or ()
    )


@dataclass(frozen=True)
class _Queue:
    """A queue of Megatron's whose values are looked at, or replaced, on their way.

    Attributes:
        results: the queue.
        through: called with each value; what it returns is handed over.
    """

    results: _Results
    through: Callable[[object], object]

    def put(self, value: object) -> None:
        """Hand over what was written, or an exception."""
        self.results.put(self.through(value))


def _with_recorded_cause(value: object) -> object:
    """What really failed, in place of Megatron's word that something did."""
    if isinstance(value, BaseException):
        return RuntimeError(_RAISED[0] if _RAISED else text_of(value))
    return value


def _write(write: Callable[..., None], rank: int, buckets: object, results: _Results) -> None:
    """In the process that writes: Megatron's writer, which hands over whatever goes wrong."""
    _RAISED.clear()
    queue = _Queue(results, _with_recorded_cause)
    try:
        write(rank, buckets, queue)
    except Exception as error:
        queue.put(error)


def _record_exception(value: object) -> object:
    """Keep the text of an exception that Megatron hands over together with a number."""
    if isinstance(value, tuple) and isinstance(value[-1], BaseException):
        _RAISED.append(text_of(value[-1]))
    return value


def _with_recorded_exception(write: Callable[..., object]) -> object:
    """Megatron's function that writes one file. It hands an exception over in a queue, or returns
    it."""

    @wraps(write)
    def recorded(*args: object, results_queue: _Results | None = None, **kwargs: object) -> object:
        queue = None if results_queue is None else _Queue(results_queue, _record_exception)
        return _record_exception(write(*args, results_queue=queue, **kwargs))

    return staticmethod(recorded)
