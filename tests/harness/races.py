"""A detector of races between streams, for ranks that run on stand-ins (`in_order.py`).

torch's own sanitizer of CUDA streams does the bookkeeping (`torch.cuda._sanitizer.EventHandler`):
who waits for whom, and which accesses are not ordered by that. It needs no GPU: a dispatch mode
tells it what each operation reads and writes. Added here are

* ranges of bytes instead of addresses, as views overlap;
* memory that is freed while another stream uses it: it would be given out again too early;
* the host as one more stream: it reads and writes pinned memory, must have waited before it does,
  and whatever it launches comes after what it did.
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

from tests.harness.in_order import InOrderGroup, TracedStreams

HOST = -1
COMPUTE = 0
NUM_FRAMES = 12  # of the callers of an operation that are remembered
COPIES = ("aten::copy_", "aten::_to_copy")


class Frame(NamedTuple):
    """Where an access was made, as `traceback.FrameSummary` has it."""

    filename: str
    lineno: int
    name: str


class _ShortTraces:
    """Stands for `traceback` in the sanitizer: whole stacks take most of its time."""

    walk_stack = staticmethod(lambda frame: frame)
    StackSummary: type[_ShortTraces]

    @staticmethod
    def extract(frame: FrameType | None, lookup_lines: bool) -> list[Frame]:
        """The innermost frames, innermost first."""
        found: list[Frame] = []
        while frame is not None and len(found) < NUM_FRAMES:
            found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found


_ShortTraces.StackSummary = _ShortTraces


@dataclass
class Memory:
    """A storage: its ranges of bytes, each under a key of its own.

    Attributes:
        ref: tells when it is freed.
        owner: the stream to whose pool it goes back; `HOST` is host memory.
        kept: streams that it is kept for.
        edges: first bytes of the ranges, ascending, with their keys.
        end: its size.
    """

    ref: StorageWeakRef
    owner: int
    end: int
    edges: dict[int, int]
    kept: set[int] = field(default_factory=set)


class RaceDetector(TorchDispatchMode):  # type: ignore[misc]
    """Finds accesses that no order of events has put one after the other.

    Args:
        is_fast: whether the host finds every collective done when it asks; else none before it has
            waited.

    Attributes:
        findings: races, one line each.
        streams: for the rank that is looked at.
        num_accesses: tensors read or written so far.
        num_host_accesses: of them, pinned ones by the host.
        peak_blocks: most tensors at a time whose memory came from the pool of a stream, by stream.
            Memory that was kept for other streams counts until the host has found them done.
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

    # ---- what streams are told

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
        """See `Listener`: what it does to the tensors is seen as it is."""
        return nullcontext()

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """These are host memory, and nobody uses them at the moment."""
        for tensor in tensors:
            memory = self._memory_of(tensor)
            memory.owner = HOST
            for key in memory.edges.values():
                self._infos[key] = TensorInfo(None)

    def fetch(self, tensor: Tensor) -> Tensor:
        """`Tensor.cpu` as it is for a tensor of a device: the host waits for the copy."""
        room = torch.empty_like(tensor)
        self.pin([room])
        return room.copy_(tensor)

    # ---- what operations do

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what an operation reads and writes."""
        self._sweep()
        schema, kwargs = func._schema, kwargs or {}
        reads, writes = _inputs(schema, args, kwargs)
        known = {self._memory_of(t).ref.cdata for t in (*reads, *writes)}
        known |= {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_data(t)}
        is_host_only = any(self._is_host(t) for t in (*reads, *writes))
        is_host_only = is_host_only and not self._crosses(schema.name, reads, writes)
        stream = HOST if is_host_only else self.streams.current()
        if is_host_only:  # then all of it lies on the host, and was made there
            self.pin(t for t in (*reads, *writes) if not self._is_host(t))
        result = func(*args, **kwargs)
        for tensor in filter(_is_data, tree_leaves(result)):
            if tensor.untyped_storage()._cdata not in known:
                self._allocate(tensor, stream)
                if not schema.name.startswith(("aten::empty", "aten::new_empty")):
                    writes.append(tensor)
        self._access(str(func), reads, writes, stream)
        if stream != HOST and _lets_host_wait(func, args, kwargs, self._is_host):
            self._handler._handle_stream_synchronization(stream)
        return result

    def _is_host(self, tensor: Tensor) -> bool:
        return self._memory_of(tensor).owner == HOST

    def _crosses(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> bool:
        """Whether it copies between host and device: then it runs on the stream."""
        return name in COPIES and not all(self._is_host(t) for t in (*reads, *writes))

    def _access(self, name: str, reads: list[Tensor], writes: list[Tensor], stream: int) -> None:
        syncs = self._handler.syncs
        if stream == HOST:
            self.num_host_accesses += 1
            syncs._state_wait_for_other(syncs.current_sync_states[HOST], syncs.host_sync_state)
        else:  # what the host launches comes after what it did
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
            self.findings.append(f"{_said(mine)} is not ordered after: {_said(other)}")

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
        """Of the ranges that a tensor covers, cut so that it covers each as a whole."""
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
        """Look for memory that was freed: its own stream may be given it again at once."""
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
                    f"memory of stream {memory.owner} is freed while in use: {_said(access)}"
                    for access in accesses
                    if not self._is_over(access, memory)
                ]

    def _is_over(self, access: Access, memory: Memory) -> bool:
        if memory.owner == HOST or access.stream in (memory.owner, HOST, *memory.kept):
            return True
        syncs = self._handler.syncs
        return bool(syncs.is_ordered_after(memory.owner, access.seq_num, access.stream))


def _inputs(schema: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation reads, and what it writes; a view of something does neither."""
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


def _lets_host_wait(
    func: Any, args: Any, kwargs: dict[str, Any], is_host: Callable[[Tensor], bool]
) -> bool:
    """Whether it reads a number of the device, or copies between host and device and blocks."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return True
    is_copy = func is torch.ops.aten.copy_.default and any(map(is_host, args[:2]))
    return is_copy and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _said(access: Access) -> str:
    """An access and where in the package, or else in the tests, it was made."""
    where = [frame for frame in access.stack_trace if "/torch/" not in frame.filename]
    ours = [f for f in where if "megatron_edit/" in f.filename and "/tests/" not in f.filename]
    frame = (ours or where)[-1]
    stream = "the host" if access.stream == HOST else f"stream {access.stream}"
    kind = access.type.name.lower()
    return f"{kind} on {stream} by {access.operator} in {frame.name} ({frame.lineno})"
