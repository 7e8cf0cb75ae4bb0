"""Where collectives are issued: nowhere else, but for `staging.py`, a process group below it.

A `Group` wraps a `torch.distributed.ProcessGroup`: the stand-alone groups between replicas and
Megatron's groups inside one alike. It counts the payload it sends, and turns a collective that
failed or timed out into a `ReplicaLostError`.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """A collective that was started and not waited for.

    Attributes:
        name: of the group, for errors.
        works: the transport's handles; none where there was nothing to do.
    """

    name: str
    works: tuple[Any, ...] = ()
    _is_over: bool = False  # asked often: a delayed sync is polled at each bucket

    def advance(self) -> bool:
        """Whether it is over; then the result may be used. Waits for nothing.

        Raises:
            ReplicaLostError: it failed or timed out.
        """
        if not self._is_over and self.is_completed:
            self.wait()
        return self._is_over

    def wait(self) -> None:
        """Wait until the result may be used: the host on CPU tensors, the stream on CUDA.

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
        """Whether it is over, well or badly."""
        if self._is_over:
            return True
        try:
            # All are asked, not only up to one that is not over: a collective of `staging.py`
            # begins when it is asked.
            return all([work.is_completed() for work in self.works])
        except RuntimeError as error:
            raise _lost(self.name, error) from error

    @property
    def on_wire(self) -> Work | None:
        """Itself, until it is known to be over."""
        return None if self._is_over else self


@dataclass(frozen=True)
class Duplex:
    """Transports of a phase of exchanges over gloo: connections of its own for each direction.

    On one connection two ranks that send to each other do so one after the other, unless they
    begin at the same moment: who comes later sends at once, and that it is ready to receive comes
    after its data. Here nothing but such notices runs against the data: each way is an all-to-all
    whose other rows are empty.

    Attributes:
        up: to ranks of higher numbers.
        down: to ranks of lower numbers.
    """

    up: Any
    down: Any


@dataclass
class Group:
    """Ranks that communicate, and what this one has sent.

    Attributes:
        process_group: the transport; None is a group of this rank alone.
        rank: this rank's position, from 0.
        size: number of ranks.
        device: where tensors on the wire must live.
        timeout: longest wait of one collective.
        name: how error messages call the group.
        payload_bytes: payload sent so far by this rank, counted as ring algorithms send it.
        num_started: collectives that this rank has begun on it.
        phases: transports of each phase of an exchange. A phase begins whenever the one before is
            over, which is at another moment on each rank; none where `runs_in_order`, or nobody
            needs them.
        backlog: exchanges whose second phase has still to begin, oldest first; see the note on the
            order of phases (`compressed_all_reduce.py`).
        make_streams: makes `streams`; tests write down what these are told.
        is_own: whether the transport is ours to shut down, and not Megatron's.
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
    _unreaped: list[tuple[Work, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, process_group: Any, device: torch.device, timeout: timedelta, name: str) -> Group:
        """Wrap a group that exists already, such as one of Megatron's."""
        return cls(process_group, process_group.rank(), process_group.size(), device, timeout, name)

    @cached_property
    def runs_in_order(self) -> bool:
        """Whether collectives run one after another, as on NCCL's stream; on gloo, all at once."""
        return self.process_group is not None and str(self.process_group.name()) == "nccl"

    @cached_property
    def streams(self) -> Streams:
        """Of the device."""
        return self.make_streams(self.device)

    @cached_property
    def side_stream(self) -> Stream:
        """One for all exchanges of the group: each stream has a memory pool of its own."""
        return self.streams.new()

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum `tensor` over the group, in place; it must not be touched until waited for.

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

        Several launches would wait for each other in the device's queue, and block what is
        launched behind them.

        Collective: all ranks of the group, same numels, one dtype.
        """
        assert self.size == 1 or self.runs_in_order, f"{self.name}: they run at once anyway"
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
        """Give every rank the tensor of rank 0 of the group, in place.

        Collective: all ranks of the group, same numel and dtype.
        """
        self.start_broadcast(tensor).wait()

    def broadcast_nowait(self, tensor: Tensor) -> None:
        """Like `broadcast`, but rank 0 does not wait until the others have come for it.

        They may come only after work that waits for rank 0 (a later pipeline stage). Rank 0 must
        not change `tensor` afterwards.
        """
        work = self.start_broadcast(tensor)
        if self.rank > 0:
            work.wait()
            return
        self.reap()
        self._unreaped.append((work, tensor))

    def reap(self) -> None:
        """Keep no tensor alive that was given to the others and has reached them."""
        self._unreaped = [entry for entry in self._unreaped if not entry[0].is_completed]

    def start_broadcast(self, tensor: Tensor) -> Work:
        """Begin to give every rank the tensor of rank 0 of the group, in place.

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

    def start_all_to_all(self, output: Tensor, rows: Tensor, phase: int) -> Work:
        """Begin to send row j to rank j; row i of `output` becomes what rank i sent here.

        Neither tensor may be touched until waited for.
        Collective: all ranks of the group, same shape and dtype, in the same order as other calls
        of the phase. Unless it `runs_in_order` each rank may begin at a moment of its own,
        between other collectives.

        Args:
            output: [size, n], contiguous, overwritten.
            rows: [size, n], contiguous.
            phase: of an exchange, from 0.
        """
        if self.size == 1 or rows.numel() == 0:
            output.copy_(rows)
            return Work(self.name)
        work = self._start(lambda: self._all_to_all(output, rows, phase))
        self.payload_bytes += (self.size - 1) * rows[0].nbytes
        return work

    def _all_to_all(self, output: Tensor, rows: Tensor, phase: int) -> Iterator[Any]:
        options = AllToAllOptions()
        options.timeout = self.timeout
        if self.runs_in_order:
            yield self.process_group.alltoall_base(output, rows, [], [], options)
            return
        output[self.rank].copy_(rows[self.rank])
        ranks, ways = range(self.size), self.phases[phase]
        lower, higher = ranks[: self.rank], ranks[self.rank + 1 :]
        for way, sources, targets in ((ways.up, lower, higher), (ways.down, higher, lower)):
            incoming = output[sources.start : sources.stop]
            outgoing = rows[targets.start : targets.stop]
            received, sent = ([int(r in chosen) for r in ranks] for chosen in (sources, targets))
            yield way.alltoall_base(incoming, outgoing, received, sent, options)

    def all_gather(self, tensor: Tensor, poll: Callable[[], float] | None = None) -> Tensor:
        """Stack the tensors of all ranks in rank order: [size, *shape], on `tensor`'s device.

        Collective: all ranks of the group, same shape and dtype.

        Args:
            tensor: of this rank.
            poll: called again and again while this rank waits, on the CPU; tells after how many
                seconds. There is no time-out then: it raises when it is too late.
        """
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        local, options = tensor.to(self.device).contiguous(), AllgatherOptions()
        rows = torch.empty((self.size, *local.shape), dtype=local.dtype, device=self.device)
        options.timeout = self.timeout if poll is None else UNLIMITED
        work = self._start(lambda: [self._all_gather(rows, local, options)])
        if poll is not None:
            wait_polling(work, self.process_group, poll)
        work.wait()
        self.payload_bytes += (self.size - 1) * local.nbytes
        return rows.to(tensor.device)

    def _all_gather(self, rows: Tensor, local: Tensor, options: AllgatherOptions) -> Any:
        if self.runs_in_order:  # one launch; into a list NCCL would copy each part by a launch more
            return self.process_group._allgather_base(rows.flatten(), local.flatten(), options)
        return self.process_group.allgather([list(rows.unbind())], [local], options)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order. For set-up, not for the hot path."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.all_gather(padded)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def warm_up(self, *, has_exchanges: bool = False) -> None:
        """Use the group once, so that NCCL connects and allocates its buffers, which lie outside of
        torch's pool, now and not in the middle of training. On gloo nothing: it has connected.

        Collective: all ranks of the group.

        Args:
            has_exchanges: whether exchanges in phases will run on it.
        """
        if not self.runs_in_order or self.size == 1:
            return
        counts = self.payload_bytes, self.num_started
        token = torch.zeros(self.size, 1, device=self.device)
        self.all_reduce(token)
        self.broadcast(token)
        self.all_gather(token)
        if has_exchanges:
            self.start_all_to_all(torch.empty_like(token), token, 0).wait()
        self.payload_bytes, self.num_started = counts  # no sync has sent it

    def close(self) -> None:
        """Give up the transport; nothing may be on its way. Threads of gloo are joined here, and
        communicators of NCCL are freed where they are ours."""
        if self.runs_in_order:
            if self.is_own and self.process_group is not None:
                own, self.process_group = self.process_group, None
                (own.shutdown if hasattr(own, "shutdown") else own._shutdown)()  # torch 2.6
            return
        self.process_group, self.phases = None, ()
        self._unreaped.clear()
        self.backlog.clear()

    def _start(self, start: Callable[[], Iterable[Any]]) -> Work:
        self.num_started += 1
        try:
            return Work(self.name, tuple(start()))
        except RuntimeError as error:
            raise _lost(self.name, error) from error


def _lost(name: str, error: RuntimeError) -> ReplicaLostError:
    """Gloo and NCCL report a dead or late peer of a group as a `RuntimeError`."""
    return ReplicaLostError(f"{name}: a collective failed: {error}")


def all_reduce_payload(nbytes: int, size: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of `nbytes` over `size` ranks."""
    return 2 * (size - 1) * nbytes // size
