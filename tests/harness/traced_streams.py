"""The real engine on stubs of streams and process groups, in one process and without a GPU.

`TracedStreams` only report their operations to a listener. `InOrderGroup` is a process group like
NCCL's: each collective runs on a stream of the group, after the work of the current stream, and a
wait makes the current stream wait. The other ranks have the same tensors as this one. Tensors are
in host memory and change immediately; `races.py` derives the effects of the order of streams.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.streams import Span
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT, NONE, SECOND_MOMENT
from megatron_edit.engine import (
    EditEngine,
    EngineGroups,
    EngineSettings,
    ParamShard,
    UnitPlan,
    plan_units,
)
from tests.distributed.toy import Collector, ToyHost

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=30)
FRAMES = 7  # of callers in which the omitted call is searched


@dataclass
class OmittedCall:
    """A planted bug: a call to `Streams` or `Work.wait` that is omitted.

    Attributes:
        operation: method of `Streams`, or "work" for a collective that is not awaited.
        function: qualified name of a calling function.
        line: part of the calling line in it; empty matches any line.
        num_made: number of omitted calls.
    """

    operation: str
    function: str
    line: str = ""
    num_made: int = 0

    def applies(self, operation: str) -> bool:
        """Return whether to omit the current call."""
        if operation != self.operation:
            return False
        frame = sys._getframe(2)
        for _ in range(FRAMES):
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno)
            if code.co_qualname == self.function and self.line in text:
                self.num_made += 1
                return True
            if frame.f_back is None:
                return False
            frame = frame.f_back
        return False


class Listener(Protocol):
    """Receives the operations of streams and groups."""

    def on_new(self, stream: int) -> None:
        """Called when a stream is created."""

    def on_record(self, event: int, stream: int | None) -> None:
        """Called when an event is recorded on a stream; None: recording was omitted."""

    def on_wait(self, stream: int, event: int) -> None:
        """Called when a stream waits for an event."""

    def on_keep(self, tensor: Tensor, stream: int) -> None:
        """Called when a stream uses memory of another stream (`record_stream`)."""

    def on_synchronize(self, event: int) -> None:
        """Called when the host waits for an event."""

    def is_done(self, event: int) -> bool:
        """Return whether the host finds an event done."""

    def collective(self, group: InOrderGroup, nbytes: int) -> AbstractContextManager[Any]:
        """Return a context in which a collective changes this rank's tensors."""


@dataclass
class TracedStreams:
    """Streams that are numbers; 0 is the compute stream of the training.

    Attributes:
        listener: receives all operations.
        mistake: call to omit.
    """

    listener: Listener
    mistake: OmittedCall | None = None
    _stack: list[int] = field(default_factory=lambda: [0])
    _num_streams: int = 1
    _num_events: int = 0

    def current(self) -> int:
        """See `Streams`."""
        return self._stack[-1]

    def new(self) -> int:
        """See `Streams`."""
        stream, self._num_streams = self._num_streams, self._num_streams + 1
        self.listener.on_new(stream)
        return stream

    def use_device_in_thread(self) -> None:
        """See `Streams`."""

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """See `Streams`."""
        self._stack.append(stream)
        yield
        self._stack.pop()

    def record(self, stream: int) -> int:
        """See `Streams`."""
        self._num_events += 1
        is_skipped = self.is_omitted("record")
        self.listener.on_record(self._num_events, None if is_skipped else stream)
        return self._num_events

    def wait(self, stream: int, event: int) -> None:
        """See `Streams`."""
        if not self.is_omitted("wait"):
            self.listener.on_wait(stream, event)

    def await_collective(self, event: int) -> None:
        """Make the current stream wait for a collective."""
        if not self.is_omitted("work"):
            self.listener.on_wait(self.current(), event)

    def keep(self, tensor: Tensor, stream: int) -> None:
        """See `Streams`."""
        if not self.is_omitted("keep"):
            self.listener.on_keep(tensor, stream)

    def synchronize(self, event: int) -> None:
        """See `Streams`."""
        if not self.is_omitted("synchronize"):
            self.listener.on_synchronize(event)

    def is_done(self, event: int) -> bool:
        """See `Streams`."""
        return self.listener.is_done(event)

    def mark(self) -> float:
        """See `Streams`: the time of the host."""
        return time.monotonic()

    def seconds(self, span: Span) -> float:
        """See `Streams`."""
        return float(span[1] - span[0])

    def is_omitted(self, operation: str) -> bool:
        """Return whether to omit the current call."""
        return self.mistake is not None and self.mistake.applies(operation)


@dataclass
class InOrderWork:
    """A started collective; like NCCL's, it keeps its tensors until it is awaited."""

    streams: TracedStreams
    event: int
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Make the current stream wait."""
        self.streams.await_collective(self.event)
        self.tensors = ()

    def is_completed(self) -> bool:
        """Return whether the host finds it done."""
        return self.streams.is_done(self.event)


@dataclass
class InOrderGroup:
    """A process group whose collectives run one after another.

    Attributes:
        streams: streams of this rank.
        name_: name of the group.
        rank: this rank's number in the group.
        size: number of ranks.
        num_launched: number of collectives so far.
    """

    streams: TracedStreams
    name_: str
    rank: int
    size: int
    num_launched: int = 0

    def __post_init__(self) -> None:
        self.stream = self.streams.new()

    def name(self) -> str:
        """Return the name of NCCL's backend."""
        return "nccl"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Ignore the time-out: there is no waiting."""

    def shutdown(self) -> None:
        """Do nothing: there are no resources."""

    def allreduce(self, tensors: list[Tensor], _: Any) -> InOrderWork:
        """Sum equal addends."""
        return self.launch(tensors, lambda: [tensor.mul_(self.size) for tensor in tensors])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], _: Any) -> InOrderWork:
        """Read on rank 0, write on the others."""
        (tensor,) = tensors
        return self.launch(tensors, lambda: tensor.mul_(1) if self.rank else tensor.sum())

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> InOrderWork:
        """Gather copies of this rank's tensor; the parts are copied on the group's stream."""
        (mine,) = tensors
        return self.launch(
            [mine, *parts[0]],
            lambda: mine.sum(),
            lambda: [part.copy_(mine) for part in parts[0]],
        )

    def _allgather_base(self, output: Tensor, mine: Tensor, _: Any) -> InOrderWork:
        return self.launch([mine, output], lambda: output.view(self.size, -1).copy_(mine.view(-1)))

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], _: Any
    ) -> InOrderWork:
        """Receive from every rank what this rank would send to itself."""
        return self.launch([rows, output], lambda: output.copy_(rows[self.rank]))

    def launch(
        self,
        tensors: Sequence[Tensor],
        move: Callable[[], Any],
        follow: Callable[[], Any] = lambda: None,
    ) -> InOrderWork:
        """Launch a collective.

        Args:
            tensors: tensors that it reads or writes.
            move: performs its effect on them.
            follow: launches kernels after it, on the group's stream.
        """
        streams, listener = self.streams, self.streams.listener
        listener.on_wait(self.stream, streams.record(streams.current()))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with streams.use(self.stream), listener.collective(self, nbytes):
            move()
        with streams.use(self.stream):
            follow()
        self.num_launched += 1
        return InOrderWork(streams, streams.record(self.stream), tuple(tensors))


class CompletedWork:
    """A collective on host memory, complete when it is started."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


@dataclass
class HostGroup:
    """A process group on host memory."""

    size: int

    def name(self) -> str:
        """Return the name of gloo's backend."""
        return "gloo"

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> CompletedWork:
        """Gather copies of this rank's tensor."""
        for part in parts[0]:
            part.copy_(tensors[0])
        return CompletedWork()

    def broadcast(self, tensors: list[Tensor], _: Any) -> CompletedWork:
        """Do nothing: all ranks have the same tensor."""
        return CompletedWork()

    def allreduce(self, tensors: list[Tensor], _: Any) -> CompletedWork:
        """Sum equal addends."""
        tensors[0].mul_(self.size)
        return CompletedWork()


@dataclass
class StreamedHost(ToyHost):
    """A host whose model reads the parameters from copies that gathers fill.

    Attributes:
        streams: streams of this rank.
        gathers: group over which parameters are gathered.
        is_overlapped: whether units land in the forward pass.
        on_outer_state: called with the anchors and momenta.
        has_deferred_gather: whether the last step deferred its gather.
    """

    streams: TracedStreams = field(kw_only=True)
    gathers: InOrderGroup = field(kw_only=True)
    is_overlapped: bool = field(kw_only=True)
    on_outer_state: Callable[[Iterable[Tensor]], None] = field(kw_only=True)
    has_deferred_gather: bool = False

    @classmethod
    def of(cls, plan: UnitPlan, **rest: Any) -> StreamedHost:
        """Build a host for the parameters of a plan."""
        return cls({}, plan, {}, **rest)

    @property
    def lands_in_forward(self) -> bool:
        """See `Host`."""
        return self.is_overlapped

    @property
    def awaits_gather(self) -> bool:
        """See `Host`."""
        return self.has_deferred_gather and not self.is_overlapped

    def attach_outer_state(
        self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        """See `Host`."""
        self.on_outer_state([*anchors.values(), *momenta.values()])

    def zero_nonfinite_moments(self, shard: Any) -> int:
        """See `Host`."""
        return 0

    def gather_parameters(self) -> None:
        """See `Host`: all units."""
        self.has_deferred_gather = False
        for place in range(len(self.plan.shards)):
            self.gather(place)

    def gather(self, place: int) -> None:
        """Gather one unit before its compute."""
        targets = [p.target for p in self.plan.shards[place].params if p.target is not None]
        if targets:
            self.gathers.launch(targets, lambda: [t.mul_(1) for t in targets]).wait()


def plan_of(units: Mapping[str, Sequence[int]]) -> UnitPlan:
    """Plan units with parameters of given sizes; the first parameter of the embedding is tied."""
    params = [
        ParamShard(
            f"{unit}.{number}",
            unit,
            torch.full((size,), 1.0),
            True,
            "tied-embedding" if unit == "embedding" and number == 0 else None,
            target=torch.zeros(size),
        )
        for unit, sizes in units.items()
        for number, size in enumerate(sizes)
    ]
    return plan_units(params, list(units), list(units))


@dataclass
class Rank:
    """One rank: engine, host, groups.

    Attributes:
        engine: the real engine.
        host: host of the engine.
        groups: groups of the engine.
        streams: streams of the rank.
    """

    engine: EditEngine
    host: StreamedHost
    groups: EngineGroups
    streams: TracedStreams

    @classmethod
    def build(
        cls,
        streams: TracedStreams,
        config: EditConfig,
        plan: UnitPlan,
        *,
        is_overlapped: bool,
        ranks: int = 2,
        tie: tuple[int, int] | None = None,
        on_outer_state: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
        sync: Group | None = None,
        control: Group | None = None,
    ) -> Rank:
        """Build a rank of the first replica, before the start of training.

        Args:
            streams: streams of the rank.
            config: configuration of the run.
            plan: units and parameters of the rank.
            is_overlapped: whether units land in the forward pass.
            ranks: number of ranks of the replica.
            tie: rank and size in the group of stages with a copy of the embedding.
            on_outer_state: called with the anchors and momenta.
            sync: sync group for the exchanges; None: one like NCCL's.
            control: all ranks of the replica; None: all do the same as this one.
        """
        assert config.num_replicas is not None

        def group(process_group: Any, rank: int, size: int, name: str) -> Group:
            return Group(
                process_group, rank, size, CPU, TIMEOUT, name, make_streams=lambda device: streams
            )

        def in_order(name: str, rank: int, size: int) -> Group:
            return group(InOrderGroup(streams, name, rank, size), rank, size, name)

        sync = sync or in_order("sync", 0, config.num_replicas)
        meeting = group(HostGroup(sync.size), 0, sync.size, "meeting")
        groups = EngineGroups(
            sync, meeting, in_order("replica", 0, ranks), in_order("stage", 0, ranks),
            control or group(HostGroup(ranks), 0, ranks, "control"),
            {} if tie is None else {"tied-embedding": in_order("tied-embedding", *tie)},
        )  # fmt: skip
        host = StreamedHost.of(
            plan,
            streams=streams,
            gathers=InOrderGroup(streams, "gathers", 0, ranks),
            is_overlapped=is_overlapped,
            on_outer_state=on_outer_state,
        )
        if config.average_moments != NONE:
            host.moments = {
                kind: {shard.name: torch.ones(shard.numel) for shard in plan.shards}
                for kind in (FIRST_MOMENT, SECOND_MOMENT)
            }
        placement = Placement(sync.size, 0, ranks, 0, True)
        store = dist.HashStore()
        world = ReplicaWorld(placement, store, store, TIMEOUT)
        settings = EngineSettings(config, is_overlapped, 0, last_local_step=1000)
        engine = EditEngine(settings, host, groups, world, Collector())
        return cls(engine, host, groups, streams)
