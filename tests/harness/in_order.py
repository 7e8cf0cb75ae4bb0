"""A rank with streams, in one process and without a GPU: the real engine on stand-ins.

`TracedStreams` are streams that only write down what they are told, and `InOrderGroup` is a process
group like NCCL's: each collective runs on a stream of the group, behind what the current stream was
given, and who waits lets the current stream wait. The other ranks hold the same as this one.
Tensors lie in host memory and change at once; what an order of streams may do to them is worked out
by who listens (`races.py`, `hardware_queues.py`).
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT, NONE, SECOND_MOMENT
from megatron_edit.engine import (
    EditEngine,
    EngineGroups,
    ParamShard,
    UnitPlan,
    plan_units,
)
from megatron_edit.host.settings import engine_settings
from tests.distributed.toy import Collector, ToyHost

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=30)
FRAMES = 6  # of callers that a mistake is looked for in


@dataclass
class Mistake:
    """A call to streams or of `Work.wait` that is left out: a planted bug.

    Attributes:
        operation: of `Streams`, or "work" for a collective that is not waited for.
        function: qualified name of a function above it.
        line: part of the line there; empty is any.
        num_made: how often it was left out.
    """

    operation: str
    function: str
    line: str = ""
    num_made: int = 0

    def applies(self, operation: str) -> bool:
        """Whether the call that is being made is the one."""
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
    """Who is told what streams and groups are told."""

    def on_new(self, stream: int) -> None:
        """A stream was made."""

    def on_record(self, event: int, stream: int | None) -> None:
        """An event behind what a stream was given; None is an event that was never recorded."""

    def on_wait(self, stream: int, event: int) -> None:
        """A stream waits."""

    def on_keep(self, tensor: Tensor, stream: int) -> None:
        """A stream uses memory of another."""

    def on_synchronize(self, event: int) -> None:
        """The host waits."""

    def is_done(self, event: int) -> bool:
        """Whether the host may take an event for done."""

    def collective(self, group: InOrderGroup, nbytes: int) -> AbstractContextManager[Any]:
        """Inside, a collective of a group does to this rank's tensors what it does."""


@dataclass
class TracedStreams:
    """Streams that are numbers: 0 is the one that training computes on.

    Attributes:
        listener: is told everything.
        mistake: what is left out.
    """

    listener: Listener
    mistake: Mistake | None = None
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

    def serve_thread(self) -> None:
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
        is_left_out = self.makes_mistake("record")
        self.listener.on_record(self._num_events, None if is_left_out else stream)
        return self._num_events

    def wait(self, stream: int, event: int) -> None:
        """See `Streams`."""
        if not self.makes_mistake("wait"):
            self.listener.on_wait(stream, event)

    def keep(self, tensor: Tensor, stream: int) -> None:
        """See `Streams`."""
        if not self.makes_mistake("keep"):
            self.listener.on_keep(tensor, stream)

    def synchronize(self, event: int) -> None:
        """See `Streams`."""
        if not self.makes_mistake("synchronize"):
            self.listener.on_synchronize(event)

    def is_done(self, event: int) -> bool:
        """See `Streams`."""
        return self.listener.is_done(event)

    def makes_mistake(self, operation: str) -> bool:
        """Whether the call that is being made is left out."""
        return self.mistake is not None and self.mistake.applies(operation)


@dataclass
class InOrderWork:
    """A collective that was started. Like NCCL's it keeps its tensors until it is waited for."""

    streams: TracedStreams
    event: int
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Let the current stream wait."""
        if not self.streams.makes_mistake("work"):
            self.streams.listener.on_wait(self.streams.current(), self.event)
        self.tensors = ()

    def is_completed(self) -> bool:
        """Whether the host may take it for done."""
        return self.streams.is_done(self.event)


@dataclass
class InOrderGroup:
    """A process group whose collectives run one after another.

    Attributes:
        streams: of this rank.
        name_: what it is called.
        rank: of this rank.
        size: number of ranks.
        num_launched: collectives so far.
    """

    streams: TracedStreams
    name_: str
    rank: int
    size: int
    num_launched: int = 0

    def __post_init__(self) -> None:
        self.stream = self.streams.new()

    def name(self) -> str:
        """As NCCL's has it."""
        return "nccl"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Nobody is late here."""

    def shutdown(self) -> None:
        """Nothing is left to be freed."""

    def allreduce(self, tensors: list[Tensor], _: Any) -> InOrderWork:
        """Sum of equal addends."""
        return self.launch(tensors, lambda: [tensor.mul_(self.size) for tensor in tensors])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], _: Any) -> InOrderWork:
        """Rank 0 reads, the others write."""
        (tensor,) = tensors
        return self.launch(tensors, lambda: tensor.mul_(1) if self.rank else tensor.sum())

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> InOrderWork:
        """Everybody's is this one's. A list is gathered in one tensor and copied part by part."""
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
        """Everybody sends what this rank would send to itself."""
        return self.launch([rows, output], lambda: output.copy_(rows[self.rank]))

    def launch(
        self,
        tensors: Sequence[Tensor],
        move: Callable[[], Any],
        follow: Callable[[], Any] = lambda: None,
    ) -> InOrderWork:
        """Any collective.

        Args:
            tensors: that it reads or writes.
            move: what it does to them.
            follow: kernels that are launched behind it, on its stream.
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


class Done:
    """A collective of host memory, over when it begins."""

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True


@dataclass
class HostGroup:
    """A process group on the host's own memory."""

    size: int
    on_meeting: Callable[[], AbstractContextManager[Any]] = nullcontext

    def name(self) -> str:
        """As gloo's has it."""
        return "gloo"

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor], _: Any) -> Done:
        """Everybody's is this one's."""
        with self.on_meeting():
            for part in parts[0]:
                part.copy_(tensors[0])
        return Done()

    def broadcast(self, tensors: list[Tensor], _: Any) -> Done:
        """Rank 0 has the same."""
        return Done()


@dataclass
class StreamedHost(ToyHost):
    """Parameters that the model reads in a copy of its own, and the training around an engine.

    Attributes:
        streams: of this rank.
        gathers: over which parameters are gathered.
        is_overlapped: whether units land in the forward pass.
        on_outer_state: told the anchors and momenta.
        has_deferred_gather: whether the last step left out its gather.
    """

    streams: TracedStreams = field(kw_only=True)
    gathers: InOrderGroup = field(kw_only=True)
    is_overlapped: bool = field(kw_only=True)
    on_outer_state: Callable[[Iterable[Tensor]], None] = field(kw_only=True)
    has_deferred_gather: bool = False

    @classmethod
    def of(cls, plan: UnitPlan, **rest: Any) -> StreamedHost:
        """With these parameters."""
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
        """One unit, before it is computed with."""
        targets = [p.target for p in self.plan.shards[place].params if p.target is not None]
        if targets:
            self.gathers.launch(targets, lambda: [t.mul_(1) for t in targets]).wait()


def plan_of(
    units: Mapping[str, Sequence[int]], names: Sequence[str] = (), *, is_copy: bool = False
) -> UnitPlan:
    """Units of parameters of some sizes; the first of the embedding is tied.

    Args:
        units: sizes of the parameters, by unit.
        names: of all units of the replica; none are these alone.
        is_copy: whether another stage counts the embedding.
    """
    params = [
        ParamShard(
            f"{unit}.{number}",
            unit,
            torch.full((size,), 1.0),
            not (is_copy and unit == "embedding"),
            "tied-embedding" if unit == "embedding" and number == 0 else None,
            target=torch.zeros(size),
        )
        for unit, sizes in units.items()
        for number, size in enumerate(sizes)
    ]
    return plan_units(params, list(names or units), list(units))


@dataclass
class Rank:
    """One rank: engine, host, groups.

    Attributes:
        engine: the real one.
        host: around it.
        groups: it communicates over.
        streams: it uses.
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
        stages: int = 1,
        tie: tuple[int, int] | None = None,
        on_outer_state: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
        on_meeting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sync: Group | None = None,
    ) -> Rank:
        """A rank of the first replica, the training of which has not begun.

        Args:
            streams: it uses.
            config: of the run.
            plan: its parameters.
            is_overlapped: whether units land in the forward pass.
            ranks: of its pipeline stage.
            stages: of the pipeline.
            tie: its rank in the group of stages with a copy of the embedding, and their number.
            on_outer_state: told the anchors and momenta.
        has_deferred_gather: whether the last step left out its gather.
            on_meeting: around each exchange of records.
            sync: over which averages travel; None is one like NCCL's.
        """
        assert config.num_replicas is not None

        def group(process_group: Any, rank: int, size: int, name: str) -> Group:
            return Group(
                process_group, rank, size, CPU, TIMEOUT, name, make_streams=lambda device: streams
            )

        def in_order(name: str, rank: int, size: int) -> Group:
            return group(InOrderGroup(streams, name, rank, size), rank, size, name)

        sync = sync or in_order("sync", 0, config.num_replicas)
        meeting = group(HostGroup(sync.size, on_meeting), 0, sync.size, "meeting")
        groups = EngineGroups(
            sync, meeting, in_order("replica", 0, ranks * stages), in_order("stage", 0, ranks),
            group(HostGroup(ranks * stages), 0, ranks * stages, "control"),
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
        placement = Placement(sync.size, 0, ranks * stages, 0, True)
        store = dist.HashStore()
        world = ReplicaWorld(placement, store, store, TIMEOUT)
        mode = "overlap" if is_overlapped else "blocking"
        settings = engine_settings(config, mode, 0, 0)
        engine = EditEngine(settings, host, groups, world, Collector())
        return cls(engine, host, groups, streams)
