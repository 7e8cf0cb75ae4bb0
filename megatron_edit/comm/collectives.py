"""Communication groups. All collectives are issued here, except in `staging.py` below it.

A `Group` wraps a `torch.distributed.ProcessGroup`: a stand-alone group between replicas, or one of
Megatron's groups inside a replica. It counts the payload it sends, and converts the error of a
failed or timed-out collective to a `ReplicaLostError`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from megatron_edit.comm.polling import UNLIMITED, wait_polling
from megatron_edit.comm.streams import Stream, Streams, streams_of
from megatron_edit.errors import ReplicaLostError


@dataclass
class Work:
    """Handle of a collective that was started.

    Attributes:
        works: the transport's handles; empty if there was nothing to send.
    """

    name: str
    works: tuple[Any, ...] = ()
    _is_over: bool = False  # cached: a delayed sync is polled at each bucket

    def advance(self) -> bool:
        """Return whether it is done and the result may be used, without blocking.

        Raises:
            ReplicaLostError: it failed or timed out.
        """
        if not self._is_over and self.is_completed:
            self.wait()
        return self._is_over

    def wait(self) -> None:
        """Wait for the result: blocks the host on CPU tensors, the current stream on CUDA.

        Raises:
            ReplicaLostError: it failed or timed out.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _lost(self.name, error) from error
        self._is_over = True

    @property
    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        if self._is_over:
            return True
        try:
            # Poll all, not only up to the first unfinished one: a collective of `staging.py` begins
            # when it is polled.
            return all([work.is_completed() for work in self.works])
        except RuntimeError as error:
            raise _lost(self.name, error) from error

    @property
    def on_wire(self) -> Work | None:
        """Itself, until it is known to be done."""
        return None if self._is_over else self


@dataclass(frozen=True)
class Duplex:
    """Transports of a phase of exchanges over gloo: separate connections for each direction.

    On a single connection two ranks that send to each other do so one after the other, unless they
    begin at the same time: the later rank sends its data at once, and its notice that it is ready
    to receive is queued behind that data. Here only such notices run against the data: each
    direction is an all-to-all whose rows of the other direction are empty.

    Attributes:
        up: to ranks of higher numbers.
        down: to ranks of lower numbers.
    """

    up: Any
    down: Any


@dataclass(frozen=True)
class Places:
    """Where the ranks of a group are: on sites, or on hosts, between which links are slower.

    For each chunk of a sum one rank of every place is its agent there: it sends the place's sum to
    the rank that owns the chunk, and receives the sum of all.

    Attributes:
        of: place of each rank of the group, numbered from 0.
        up, down: groups of the ranks of this rank's place, in the order of their ranks; the first
            for sums, the second to share what agents have received.
    """

    of: tuple[int, ...]
    up: Group
    down: Group

    def agents(self, chunk: int) -> list[int]:
        """Rank of the agent of each place, for the chunk that rank `chunk` owns; ascending."""
        members: dict[int, list[int]] = {}
        for rank, place in enumerate(self.of):
            members.setdefault(place, []).append(rank)
        return sorted(ranks[chunk % len(ranks)] for ranks in members.values())


@dataclass
class Group:
    """A group of ranks that communicate, with counters of this rank's messages.

    Attributes:
        process_group: the transport; None for a group of this rank alone.
        rank: this rank's position, from 0.
        device: where tensors on the wire must live.
        timeout: longest wait of one collective.
        name: of the group in error messages.
        payload_bytes: payload sent so far by this rank, counted as ring algorithms send it.
        num_started: collectives that this rank has begun on it.
        phases: transports of each phase of an exchange. A phase begins when the one before is done,
            which is at another time on each rank; empty where `runs_in_order`, or no exchange has
            phases.
        backlog: exchanges whose second phase has still to begin, oldest first; see the note on the
            order of phases (`compressed_all_reduce.py`).
        make_streams: creates `streams`; tests pass one that records the calls.
        is_own: whether this plugin created the transport and shuts it down, not Megatron.
        lazy_loops: a process group of this rank alone that ends the threads of gloo when it is
            released (`stop_loops`); None unless ranks connect only when they first communicate.
        places: where its ranks are, if encoded sums are to be formed in each place first; else
            None.
    """

    process_group: Any
    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    name: str
    payload_bytes: int = 0
    num_started: int = 0
    phases: tuple[Duplex, ...] = ()
    backlog: deque[Any] = field(default_factory=deque)
    make_streams: Callable[[torch.device], Streams] = streams_of
    is_own: bool = False
    lazy_loops: Any = None
    places: Places | None = None
    _unreaped: list[tuple[Work, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, process_group: Any, device: torch.device, timeout: timedelta, name: str) -> Group:
        """Wrap an existing process group, such as one of Megatron's."""
        return cls(process_group, process_group.rank(), process_group.size(), device, timeout, name)

    @cached_property
    def runs_in_order(self) -> bool:
        """Whether collectives run one after another, as on NCCL's stream, and not all at once."""
        return self.process_group is not None and str(self.process_group.name()) == "nccl"

    @cached_property
    def streams(self) -> Streams:
        """Streams of the device."""
        return self.make_streams(self.device)

    @cached_property
    def side_stream(self) -> Stream:
        """One stream for all exchanges of the group: each stream has its own memory pool."""
        return self.streams.new()

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum `tensor` over the group, in place; do not access it before `wait`.

        Collective: all ranks of the group, same numel and dtype.
        """
        if self.size == 1 or tensor.numel() == 0:
            return Work(self.name)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = self.timeout
        work = self._start(lambda: [self.process_group.allreduce([tensor], options)])
        self.payload_bytes += all_reduce_payload(tensor.nbytes, self.size)
        return work

    def start_all_reduce_together(self, tensors: Sequence[Tensor]) -> Work:
        """`start_all_reduce` of several tensors in one launch, where collectives run in order.

        Several launches would wait for each other in the device's queue, and block later kernels.

        Collective: all ranks of the group, same numels, one dtype.
        """
        assert self.size == 1 or self.runs_in_order, f"{self.name}: they run concurrently anyway"
        tensors = [tensor for tensor in tensors if tensor.numel()]
        if self.size == 1 or not tensors:
            return Work(self.name)
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = self.timeout
        work = self._start(lambda: [self.process_group.allreduce_coalesced(tensors, options)])
        self.payload_bytes += sum(all_reduce_payload(t.nbytes, self.size) for t in tensors)
        return work

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place. Blocks the host on CPU tensors.

        Collective: all ranks of the group, same numel and dtype.
        """
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast the tensor of rank 0 of the group to all ranks, in place.

        Collective: all ranks of the group, same numel and dtype.
        """
        self.start_broadcast(tensor).wait()

    def broadcast_nowait(self, tensor: Tensor) -> None:
        """Like `broadcast`, but rank 0 does not wait for the other ranks.

        They may join only after work that waits for rank 0 (a later pipeline stage). Rank 0 must
        not change `tensor` afterwards.
        """
        work = self.start_broadcast(tensor)
        if self.rank > 0:
            work.wait()
            return
        self.reap()
        self._unreaped.append((work, tensor))

    def reap(self) -> None:
        """Release the tensors of finished `broadcast_nowait` calls."""
        self._unreaped = [entry for entry in self._unreaped if not entry[0].is_completed]

    def start_broadcast(self, tensor: Tensor) -> Work:
        """Begin to broadcast the tensor of rank 0 of the group to all ranks, in place.

        Collective: all ranks of the group, same numel and dtype.
        """
        if self.size == 1 or tensor.numel() == 0:
            return Work(self.name)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self.timeout
        work = self._start(lambda: [self.process_group.broadcast([tensor], options)])
        self.payload_bytes += tensor.nbytes if self.rank == 0 else 0
        return work

    def start_all_to_all(
        self,
        output: Tensor,
        rows: Tensor,
        phase: int,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> Work:
        """Begin to send row j to rank j; row i of `output` becomes the row that rank i sent.

        Neither tensor may be accessed before `wait`.
        Collective: all ranks of the group, same shape and dtype, in the same order as other calls
        of the phase. Unless it `runs_in_order` each rank may begin at a time of its own, between
        other collectives.

        Args:
            output: [sources, n], contiguous, overwritten.
            rows: [targets, n], contiguous.
            phase: of an exchange, from 0.
            sources: ranks that send this one a row, ascending; None are all.
            targets: ranks that it sends one to, ascending; None are all.
        """
        if self.size == 1 or rows.shape[1] == 0:
            output.copy_(rows)
            return Work(self.name)
        ranks = range(self.size)
        ends = ranks if sources is None else sources, ranks if targets is None else targets
        work = self._start(lambda: self._all_to_all(output, rows, phase, *ends))
        num_sent = sum(rank != self.rank for rank in ends[1])
        self.payload_bytes += num_sent * rows.shape[1] * rows.itemsize
        return work

    def _all_to_all(
        self,
        output: Tensor,
        rows: Tensor,
        phase: int,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> Iterator[Any]:
        options = AllToAllOptions()
        options.timeout = self.timeout
        ranks, own = range(self.size), self.rank
        if self.runs_in_order:
            has_all = len(sources) == len(targets) == self.size
            received, sent = (
                [] if has_all else [int(r in chosen) for r in ranks]
                for chosen in (sources, targets)
            )
            yield self.process_group.alltoall_base(output, rows, received, sent, options)
            return
        if own in targets:
            output[sources.index(own)].copy_(rows[targets.index(own)])
        ways, (lower, higher) = self.phases[phase], (ranks[:own], ranks[own + 1 :])
        for way, senders, receivers in ((ways.up, lower, higher), (ways.down, higher, lower)):
            incoming = [r for r in sources if r in senders]
            outgoing = [r for r in targets if r in receivers]
            received, sent = ([int(r in chosen) for r in ranks] for chosen in (incoming, outgoing))
            yield way.alltoall_base(
                _rows_of(output, sources, incoming), _rows_of(rows, targets, outgoing),
                received, sent, options,
            )  # fmt: skip

    def all_gather(self, tensor: Tensor, poll: Callable[[], float] | None = None) -> Tensor:
        """Stack the tensors of all ranks in rank order: [size, *shape], on `tensor`'s device.

        Collective: all ranks of the group, same shape and dtype.

        Args:
            poll: called repeatedly while this rank waits, on the CPU; returns the seconds to the
                next call. There is no time-out then: `poll` raises instead.
        """
        timeout = self.timeout if poll is None else UNLIMITED
        work, rows = self.start_all_gather(tensor, timeout)
        if poll is not None and work.works:
            wait_polling(work, self.process_group, poll)
        work.wait()
        return rows.to(tensor.device)

    def start_all_gather(
        self, tensor: Tensor, timeout: timedelta | None = None, out: Tensor | None = None
    ) -> tuple[Work, Tensor]:
        """Begin to stack the tensors of all ranks; see `all_gather`.

        Collective: all ranks of the group, same shape and dtype.

        Args:
            timeout: longest wait; None is that of the group.
            out: contiguous, of the shape and on the device of the result; None allocates it.

        Returns:
            The work, and the tensor on the group's device that has the rows when it is done.
        """
        if self.size == 1:
            alone = tensor.unsqueeze(0)
            return Work(self.name), alone.clone() if out is None else out.copy_(alone)
        local, options = tensor.to(self.device).contiguous(), AllgatherOptions()
        shape = (self.size, *local.shape)
        rows = torch.empty(shape, dtype=local.dtype, device=self.device) if out is None else out
        options.timeout = timeout or self.timeout
        work = self._start(lambda: [self._all_gather(rows, local, options)])
        self.payload_bytes += (self.size - 1) * local.nbytes
        return work, rows

    def _all_gather(self, rows: Tensor, local: Tensor, options: AllgatherOptions) -> Any:
        if self.runs_in_order:  # one launch; a list would cost NCCL one more launch for each part
            return self.process_group._allgather_base(rows.flatten(), local.flatten(), options)
        return self.process_group.allgather([list(rows.unbind())], [local], options)

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Whether a value is true on any rank; the same result on all.

        Collective: all ranks of the group, on the CPU.
        """
        count = torch.tensor([int(value)])
        self.all_reduce(count)
        return int(count) > 0

    def all_gather_json(self, value: Any) -> list[Any]:
        """Gather the JSON values of all ranks in rank order; tuples arrive as lists. For set-up
        and for small values."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.all_gather(padded)
        return [json.loads(bytes(row[:n].numpy())) for row, n in zip(rows, sizes, strict=True)]

    def warm_up(self, *collectives: Callable[[Tensor], object]) -> None:
        """Use the group once, so that it is connected now: a group of gloo that connects lazily
        needs the store for that, in which the main thread may wait later; NCCL also allocates its
        buffers, which lie outside of torch's pool. Does nothing on other groups of gloo.

        Collective: all ranks of the group.

        Args:
            collectives: those of its methods that training will call.
        """
        if self.size == 1 or not (self.runs_in_order or self.lazy_loops):
            return
        counts = self.payload_bytes, self.num_started
        token = torch.zeros(self.size, 1, device=self.device)
        for collective in collectives:
            collective(token)
        self.payload_bytes, self.num_started = counts  # do not count these

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Exchange rows, [size, n], as `start_all_to_all` does; return those received.

        Collective: all ranks of the group, same shape and dtype.
        """
        received = torch.empty_like(rows)
        self.start_all_to_all(received, rows, 0).wait()
        return received

    def stop_loops(self) -> None:
        """End the threads that serve the connections of a group that connects lazily. Nothing can
        be sent on it from then on; all of its ranks come here before one of them calls `close`.

        Else a rank could abort in `close`: gloo ends such a thread before it closes connections,
        and a thread that is about to end may be woken again and again by a connection that the
        other rank has closed, if a child process of this one (of a data loader) holds its socket.

        Collective: all ranks of the group.
        Blocks: the host, until the collectives in flight are done: `close` would wait for them, and
        without these threads until the time-out. A barrier of gloo waits for all that began before.
        """
        if self.lazy_loops is None:
            return
        options = dist.BarrierOptions()
        options.timeout = self.timeout
        with suppress(ReplicaLostError):  # a rank that has failed at its end
            self._start(lambda: [self.process_group.barrier(options)]).wait()
        self.lazy_loops = None

    def close(self) -> None:
        """Release the transport; no message may be in flight. Threads of gloo are joined here, and
        NCCL communicators are freed where `is_own`."""
        if self.places is not None:
            for group in (self.places.up, self.places.down):
                group.close()
        if self.runs_in_order:
            if self.is_own and self.process_group is not None:
                own, self.process_group = self.process_group, None
                own.shutdown()
            return
        self.process_group, self.phases, self.places = None, (), None
        self._unreaped.clear()
        self.backlog.clear()

    def _start(self, start: Callable[[], Iterable[Any]]) -> Work:
        self.num_started += 1
        try:
            return Work(self.name, tuple(start()))
        except RuntimeError as error:
            raise _lost(self.name, error) from error


def _rows_of(rows: Tensor, ranks: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """The rows of consecutive `chosen` among `ranks`, of which there is a row for each."""
    first = ranks.index(chosen[0]) if chosen else 0
    return rows[first : first + len(chosen)]


def _lost(name: str, error: RuntimeError) -> ReplicaLostError:
    """Convert the `RuntimeError` that gloo and NCCL raise for a dead or late peer."""
    return ReplicaLostError(f"{name}: a collective failed: {error}")


def all_reduce_payload(nbytes: int, size: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of `nbytes` over `size` ranks."""
    return 2 * (size - 1) * nbytes // size
