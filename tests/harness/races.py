"""A detector of races between streams, for ranks that run on stubs (`traced_streams.py`).

torch's sanitizer of CUDA streams (`torch.cuda._sanitizer.EventHandler`) keeps track of waits and
of accesses that they do not order. It needs no GPU: a dispatch mode passes to it what each
operation reads and writes. Added here are

* ranges of bytes instead of addresses, as views overlap;
* memory that is freed while another stream uses it and would be reused too early;
* the host as one more stream: it reads and writes pinned memory, for which it must have waited,
  and its launches come after its own accesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import Access, EventHandler, TensorInfo, zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.traced_streams import InOrderGroup, TracedStreams

HOST = -1
COMPUTE = 0
NUM_FRAMES = 12  # of the callers of an operation that are kept
COPIES = ("aten::copy_", "aten::_to_copy")


class Frame(NamedTuple):
    """Location of an access, like `traceback.FrameSummary`."""

    filename: str
    lineno: int
    name: str


class _ShortTraces:
    """Replaces `traceback` in the sanitizer, where complete stacks take most of the time."""

    walk_stack = staticmethod(lambda frame: frame)
    StackSummary: type[_ShortTraces]

    @staticmethod
    def extract(frame: FrameType | None, lookup_lines: bool) -> list[Frame]:
        """Return the innermost frames, innermost first."""
        found: list[Frame] = []
        while frame is not None and len(found) < NUM_FRAMES:
            found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found


_ShortTraces.StackSummary = _ShortTraces


@dataclass
class Memory:
    """A storage, divided into byte ranges with a key each.

    Attributes:
        ref: weak reference, which shows when the storage is freed.
        owner: stream of the memory pool that it belongs to; `HOST` is host memory.
        kept: streams for which it was kept with `keep`.
        edges: first byte of each range with its key.
        end: size in bytes.
    """

    ref: StorageWeakRef
    owner: int
    end: int
    edges: dict[int, int]
    kept: set[int] = field(default_factory=set)


class RaceDetector(TorchDispatchMode):  # type: ignore[misc]
    """Finds accesses that are not ordered by events.

    Args:
        is_fast: whether the host finds every collective done when it polls; otherwise none is done
            before a wait.

    Attributes:
        findings: races, one line each.
        streams: streams for the observed rank.
        num_accesses: number of tensors read or written so far.
        num_host_accesses: number of operations on host memory so far.
        peak_blocks: largest number of live tensors from the memory pool of a stream, by stream.
            Memory kept for other streams counts until the host has found them done.
    """

    def __init__(self, *, is_fast: bool = False) -> None:
        super().__init__()
        self.findings: list[str] = []
        self.streams = TracedStreams(self)
        self.num_accesses = self.num_host_accesses = 0
        self.peak_blocks: dict[int, int] = defaultdict(int)
        self._late: list[tuple[int, dict[int, int]]] = []
        self._is_fast = is_fast
        self._handler = EventHandler()
        self._handler._handle_stream_creation(HOST)
        self._memory: dict[int, Memory] = {}
        self._num_keys = 0

    # ---- operations of streams

    def on_new(self, stream: int) -> None:
        """See `Listener`."""
        self._handler._handle_stream_creation(stream)

    def on_record(self, event: int, stream: int | None) -> None:
        """See `Listener`."""
        self._handler._handle_event_creation(event)
        if stream is not None:
            self._handler._handle_event_record(event, stream)

    def on_wait(self, stream: int, event: int) -> None:
        """See `Listener`."""
        self._sweep()
        self._handler._handle_event_wait(event, stream)

    def on_keep(self, tensor: Tensor, stream: int) -> None:
        """See `Listener`."""
        self._memory_of(tensor).kept.add(stream)

    def on_synchronize(self, event: int) -> None:
        """See `Listener`."""
        self._sweep()
        self._handler._handle_event_synchronization(event)

    def is_done(self, event: int) -> bool:
        """See `Listener`."""
        self._sweep()
        if self._is_fast:
            self._handler._handle_event_synchronization(event)
            return True
        host = self._handler.syncs.host_sync_state
        recorded = self._handler.syncs.recorded_sync_states[event]
        return all(host.get(stream, -1) >= number for stream, number in recorded.items())

    def collective(self, group: InOrderGroup, nbytes: int) -> AbstractContextManager[Any]:
        """See `Listener`: its accesses are recorded like those of other operations."""
        return nullcontext()

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as host memory that is not in use."""
        for tensor in tensors:
            memory = self._memory_of(tensor)
            memory.owner = HOST
            for key in memory.edges.values():
                self._infos[key] = TensorInfo(None)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Do what `Tensor.cpu` does for a device tensor: copy, and make the host wait."""
        target = torch.empty_like(tensor)
        self.pin([target])
        return target.copy_(tensor)

    # ---- accesses of operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what an operation reads and writes."""
        self._sweep()
        schema, kwargs = func._schema, kwargs or {}
        reads, writes = _inputs(schema, args, kwargs)
        known = {self._memory_of(t).ref.cdata for t in (*reads, *writes)}
        known |= {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_data(t)}
        is_host_only = any(self._is_host(t) for t in (*reads, *writes))
        is_host_only = is_host_only and not self._crosses(schema.name, reads, writes)
        stream = HOST if is_host_only else self.streams.current()
        if is_host_only:  # then all its tensors are host memory
            self.pin(t for t in (*reads, *writes) if not self._is_host(t))
        result = func(*args, **kwargs)
        for tensor in filter(_is_data, tree_leaves(result)):
            if tensor.untyped_storage()._cdata not in known:
                self._allocate(tensor, stream)
                if not schema.name.startswith(("aten::empty", "aten::new_empty")):
                    writes.append(tensor)
        self._access(str(func), reads, writes, stream)
        if stream != HOST and _blocks_host(func, args, kwargs, self._is_host):
            self._handler._handle_stream_synchronization(stream)
        return result

    def _is_host(self, tensor: Tensor) -> bool:
        return self._memory_of(tensor).owner == HOST

    def _crosses(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> bool:
        """Return whether it copies between host and device, and so runs on a stream."""
        return name in COPIES and not all(self._is_host(t) for t in (*reads, *writes))

    def _access(self, name: str, reads: list[Tensor], writes: list[Tensor], stream: int) -> None:
        syncs = self._handler.syncs
        if stream == HOST:
            self.num_host_accesses += 1
            syncs._state_wait_for_other(syncs.current_sync_states[HOST], syncs.host_sync_state)
        else:  # launches come after earlier accesses of the host
            done = syncs.current_sync_states[HOST].get(HOST, -1)
            syncs.current_sync_states[stream][HOST] = done
        written = {key for tensor in writes for key in self._keys(tensor)}
        read = {key for tensor in reads for key in self._keys(tensor)} - written
        self.num_accesses += len(reads) + len(writes)
        aliases: dict[int, list[str]] = defaultdict(list)
        with mock.patch.object(_sanitizer, "traceback", _ShortTraces):
            found = self._handler._handle_kernel_launch(stream, read, written, set(), name, aliases)
        for error in found:
            mine, other = error.current_access, error.previous_access
            self.findings.append(f"{_describe(mine)} is not ordered after: {_describe(other)}")

    # ---- memory

    @property
    def _infos(self) -> dict[int, TensorInfo]:
        infos: dict[int, TensorInfo] = self._handler.tensors_accessed.accesses
        return infos

    def _memory_of(self, tensor: Tensor, owner: int = COMPUTE) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            memory = Memory(StorageWeakRef(storage), owner, storage.nbytes(), {})
            memory.edges[0] = self._new_key(TensorInfo(None))
            self._memory[storage._cdata] = memory
        return self._memory[storage._cdata]

    def _allocate(self, tensor: Tensor, stream: int) -> None:
        self._memory_of(tensor, owner=stream)
        if stream in (COMPUTE, HOST):
            return
        host = self._handler.syncs.host_sync_state
        self._late = [
            (owner, users)
            for owner, users in self._late
            if any(host.get(user, -1) < number for user, number in users.items())
        ]
        owners = [memory.owner for memory in self._memory.values()]
        num_blocks = owners.count(stream) + [owner for owner, _ in self._late].count(stream)
        self.peak_blocks[stream] = max(self.peak_blocks[stream], num_blocks)

    def _new_key(self, info: TensorInfo) -> int:
        self._num_keys += 1
        self._infos[self._num_keys] = TensorInfo(None, list(info.reads), info.write)
        return self._num_keys

    def _keys(self, tensor: Tensor) -> Iterator[int]:
        """Yield keys of the ranges that a tensor covers, split at its first and last byte."""
        if tensor.numel() == 0:
            return
        memory, size = self._memory_of(tensor), tensor.element_size()
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((length - 1) * stride for length, stride in sides)
        start = tensor.storage_offset() * size
        stop = start + (reach + 1) * size
        for cut in (start, stop):
            if cut < memory.end and cut not in memory.edges:
                before = max(edge for edge in memory.edges if edge < cut)
                memory.edges[cut] = self._new_key(self._infos[memory.edges[before]])
        yield from (key for edge, key in memory.edges.items() if start <= edge < stop)

    def _sweep(self) -> None:
        """Check memory that was freed, as its own stream may reuse it at once."""
        is_freed = torch.UntypedStorage._expired
        for number in [n for n, memory in self._memory.items() if is_freed(memory.ref.cdata)]:
            memory, states = self._memory.pop(number), self._handler.syncs.current_sync_states
            if memory.kept:
                users = {user: states[user].get(user, -1) for user in memory.kept}
                self._late.append((memory.owner, users))
            for key in memory.edges.values():
                info = self._infos.pop(key)
                accesses = [*info.reads, *([] if info.write is None else [info.write])]
                self.findings += [
                    f"memory of stream {memory.owner} is freed while in use: {_describe(access)}"
                    for access in accesses
                    if not self._is_over(access, memory)
                ]

    def _is_over(self, access: Access, memory: Memory) -> bool:
        if memory.owner == HOST or access.stream in (memory.owner, HOST, *memory.kept):
            return True
        syncs = self._handler.syncs
        return bool(syncs.is_ordered_after(memory.owner, access.seq_num, access.stream))


def _inputs(schema: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads and writes; views do neither."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_factory = schema.name.endswith("_like") or schema.name.startswith("aten::new_")
    for argument, value in zip_arguments(schema, args, kwargs):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes += filter(_is_data, tree_leaves(value))
        elif alias is None and not is_factory:
            reads += filter(_is_data, tree_leaves(value))
    return reads, writes


def _is_data(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _blocks_host(
    func: Any, args: Any, kwargs: dict[str, Any], is_host: Callable[[Tensor], bool]
) -> bool:
    """Return whether it reads a device scalar, or is a blocking copy from or to the host."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return True
    is_copy = func is torch.ops.aten.copy_.default and any(map(is_host, args[:2]))
    return is_copy and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _describe(access: Access) -> str:
    """Describe an access and its location in the package, or else in the tests."""
    where = [frame for frame in access.stack_trace if "/torch/" not in frame.filename]
    ours = [f for f in where if "megatron_edit/" in f.filename and "/tests/" not in f.filename]
    frame = (ours or where)[-1]
    stream = "the host" if access.stream == HOST else f"stream {access.stream}"
    kind = access.type.name.lower()
    return f"{kind} on {stream} by {access.operator} in {frame.name} ({frame.lineno})"
