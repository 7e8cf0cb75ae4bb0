"""Compressed all-reduce: a sum over a group, of encoded addends.

In two phases, if the codec encodes sums, too:

    (a) chunk j of every addend, encoded, goes to rank j, which decodes and adds them in rank
        order in fp32;
    (b) rank j encodes the sum of its chunk and sends it to all ranks, which decode it.

Where ranks share a site or a host, and there are several of these, the addends of each place are
first summed there in fp32, and chunk j of this sum travels between the places once: see
`PlacedExchange`.

Otherwise in one phase: every addend, encoded as a whole, goes to all ranks, each of which decodes
and adds them in rank order in fp32.

Note: the order of phases. Exchanges begin in the same order on all ranks (for those of syncs see
the note on their order in `engine/sync/manager.py`). Phase (b) begins when (a) is done, which is at
another time on each rank. It has connections of its own, so that it may fall between any other
collectives, and it waits in a backlog until the phases (b) of all earlier exchanges have begun.
Hence all ranks issue the collectives of a phase in the same order, however often each of them
advances its exchanges. An exchange in one phase has only (a), and never waits in the backlog. One
of several places has more steps, each on connections of its own, for which the same holds.
Where collectives run in order (NCCL) both phases share one connection, and relative to all other
collectives, also those of the training framework, each of them must begin at the same place of the
program on all ranks of a replica: some devices run collectives of several communicators one after
the other, and two ranks that launch them in different orders would wait for each other. So
advancing an exchange never begins its phase (b). That happens when another exchange begins, when a
unit has landed, when the sum is waited for, and where all ranks of the replica have agreed that
their phases (a) are done (`SyncManager.agree_on_next_steps`); not immediately, since its first
kernel waits for (a), and on a device with one hardware queue it would block all later kernels.
Encoding runs on a stream that overlaps compute, and the host never blocks. For the same reason sums
that begin together are one exchange: launched one after the other, each would block the queue until
the one before is done.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Places, Work
from megatron_edit.method.codec import Codec


@dataclass(frozen=True)
class Chunks:
    """Elements split into one chunk per rank, all of the same size except the last non-empty one.

    Attributes:
        total: number of all elements.
        numel: elements of a full chunk: a multiple of the codec's block, or less than one block.
    """

    total: int
    numel: int

    @classmethod
    def split(cls, total: int, size: int, codec: Codec) -> Chunks:
        """Split `total` elements over `size` ranks."""
        numel, block = -(-total // size), codec.block_numel
        return cls(total, numel if numel <= block else -(-numel // block) * block)

    def of(self, rank: int) -> slice:
        """The elements of a rank's chunk; empty for ranks beyond the last element."""
        return slice(*(min(edge * self.numel, self.total) for edge in (rank, rank + 1)))

    @property
    def num_filled(self) -> int:
        """Ranks whose chunk is not empty."""
        return -(-self.total // self.numel)

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """The chunks that can be encoded together: the full ones; then the short one, if any.

        Yields:
            Their ranks; their elements.
        """
        full = self.total // self.numel
        if full:
            yield slice(0, full), slice(0, full * self.numel)
        if full < self.num_filled:
            yield slice(full, full + 1), self.of(full)


@dataclass
class Residual:
    """Error-feedback residual: encoding errors that the next exchange adds back; initially zero.

    Attributes:
        sent: fp32 [n], errors of this replica's addends.
        summed: fp32 [owner_numel], errors of the sums of the chunk that this rank encodes; empty if
            the codec does not encode sums.
        members: names of the replicas among which the sums are split, in an elastic run.
    """

    sent: Tensor
    summed: Tensor
    members: tuple[str, ...] = ()

    def kept_aside(self, members: tuple[str, ...], owner_numel: int) -> Residual:
        """A copy that an exchange may change, and that is dropped if the exchange is abandoned.

        Where the replicas are others than in the last exchange, each rank encodes another chunk:
        the errors of sums begin at zero.

        Args:
            members: of the exchange.
            owner_numel: elements of the chunk whose sum this rank encodes.
        """
        is_same = members == self.members
        summed = self.summed.clone() if is_same else self.summed.new_zeros(owner_numel)
        return Residual(self.sent.clone(), summed, members)

    def replace_by(self, other: Residual) -> None:
        """Take the errors that an exchange has left in a copy. Tensors are not copied."""
        self.sent, self.summed, self.members = other.sent, other.summed, other.members


@dataclass(frozen=True)
class Addend:
    """A rank's addend of a sum; see `wire.start_exchange`.

    Attributes:
        values: fp32 [n] on the group's device, contiguous: this rank's addend, later the sum.
        residual: error-feedback residual; None discards encoding errors. None for fp32.
        is_excluded: whether this rank contributes exact zeros, whatever `values` holds; its
            residual then does not change.
        codec: encoding of the sum; None is fp32. The same on all ranks.
    """

    values: Tensor
    residual: Residual | None
    is_excluded: bool
    codec: Codec | None


@dataclass(frozen=True)
class CodedPart:
    """One of the sums of an exchange.

    Attributes:
        rank: this rank's position in the group.
        chunks: the chunk that each rank sums.
        outgoing: uint8 [size, bytes]: this rank's addend by chunk; then the sum of its own chunk in
            all rows.
        incoming: uint8 [size, bytes]: the addends of all ranks to this rank's chunk; then the sums
            of all chunks.
    """

    rank: int
    codec: Codec
    addend: Addend
    chunks: Chunks
    outgoing: Tensor
    incoming: Tensor

    def encode_addend(self) -> None:
        """Encode the addend into `outgoing`, one row for the owner of each chunk."""
        if self.addend.is_excluded:
            self.outgoing.zero_()  # zero bytes are exact zeros in every codec
        else:
            self.encode_chunks(range(len(self.outgoing)))

    def encode_chunks(self, chosen: range) -> None:
        """Encode these chunks of the addend, ascending, into the first rows of `outgoing`."""
        values, residual = self.addend.values, self.addend.residual
        sent = None if residual is None else residual.sent
        num_filled = 0
        for ranks, where in self.chunks.runs():
            shape = (ranks.stop - ranks.start, -1)
            mine = [place for place, rank in enumerate(chosen) if ranks.start <= rank < ranks.stop]
            if not mine:
                continue
            every = slice(chosen[mine[0]] - ranks.start, None, chosen.step)
            rows = self.outgoing[mine[0] : mine[-1] + 1]
            part = values[where].view(shape)[every]
            kept = None if sent is None else sent[where].view(shape)[every]
            used = self.codec.encoded_bytes(part.shape[1])
            self.codec.encode(part, residual=kept, out=rows[:, :used])
            _zero(rows[:, used:])
            num_filled = mine[-1] + 1
        _zero(self.outgoing[num_filled : len(chosen)])

    def encode_sum(self, num_addends: int | None = None) -> None:
        """Sum this rank's chunk of the first rows of `incoming`, all if None, and write the encoded
        sum to as many rows of `outgoing`."""
        where = self.chunks.of(self.rank)
        own = slice(0, where.stop - where.start)
        total = torch.empty(own.stop, dtype=torch.float32, device=self.incoming.device)
        used = self.codec.encoded_bytes(own.stop)
        self.codec.decode_sum(self.incoming[:num_addends, :used], total)
        residual = self.addend.residual
        summed = None if residual is None else residual.summed
        self.codec.encode(total, residual=summed, out=self.outgoing[0, :used])
        _zero(self.outgoing[0, used:])
        self.outgoing[1:num_addends] = self.outgoing[0]  # a row for each receiver

    def decode(self) -> None:
        """Decode the sums of all chunks into the addend's values."""
        for ranks, where in self.chunks.runs():
            values = self.addend.values[where].view(ranks.stop - ranks.start, -1)
            used = self.codec.encoded_bytes(values.shape[1])
            self.codec.decode(self.incoming[ranks, :used], values)


def _zero(rest: Tensor) -> None:
    """Zero what is never read: uninitialised memory must not be sent."""
    if rest.numel():
        rest.zero_()


@dataclass
class _Exchange(ABC):
    """What exchanges in one and in two phases have in common."""

    group: Group
    parts: Sequence[CodedPart | GatheredPart]
    outgoing: Tensor
    incoming: Tensor
    is_decoded: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def is_completed(self) -> bool:
        """Whether all its collectives are done. Does not advance it."""

    @abstractmethod
    def wait(self) -> None:
        """Finish it."""

    def advance(self) -> bool:
        """Advance this and earlier exchanges without blocking; return whether the sum is
        available."""
        if not self.group.runs_in_order:
            advance_backlog(self.group)
        if self.is_completed:
            self.wait()
        return self.is_decoded

    def _decode(self) -> None:
        """Decode the sums, and free the buffers: the units keep this object until their outer
        steps."""
        for part in self.parts:
            part.decode()
        self.is_decoded = True
        self.parts, self.outgoing = (), self.outgoing[:0].clone()
        self.incoming = self.outgoing


@dataclass
class CodedExchange(_Exchange):
    """An exchange in two phases, of one sum or of several sums together.

    Attributes:
        group: the ranks that sum.
        parts: the sums; their rows are adjacent. Empty when all sums are decoded.
        outgoing: uint8 [size, bytes of all parts].
        incoming: of the same shape.
        num_begun: steps that have begun: the phases.
        work: the collective of the last one; None before the first.
        is_decoded: whether the sums are available.
    """

    parts: Sequence[CodedPart]
    num_begun: int = 0
    work: Work | None = None

    @classmethod
    def prepare(cls, group: Group, addends: Sequence[Addend]) -> CodedExchange:
        """Allocate the buffers, on the stream that will also wait for the end and free them.

        Args:
            group: the ranks that sum.
            addends: of this rank; each has a codec of its own.
        """
        codecs = _codecs(addends)
        chunks = [
            Chunks.split(addend.values.numel(), group.size, codec)
            for addend, codec in zip(addends, codecs, strict=True)
        ]
        widths = [
            codec.encoded_bytes(chunk.numel) for codec, chunk in zip(codecs, chunks, strict=True)
        ]
        outgoing, incoming = _buffers(group, sum(widths), addends[0].values.device)
        rows = (outgoing.split(widths, dim=1), incoming.split(widths, dim=1))
        each = zip(codecs, addends, chunks, *rows, strict=True)
        parts = [CodedPart(group.rank, *part) for part in each]
        if group.places is None:
            return cls(group, parts, outgoing, incoming)
        num = group.places.down.size
        shared = outgoing.new_empty(num, -(-group.size // num), sum(widths))
        return PlacedExchange(group, parts, outgoing, incoming, shared=shared)

    @property
    def steps(self) -> Sequence[Callable[[], Work]]:
        """What begins the collective of each step, when the one before is done."""
        return (self._send_addends, self._send_sums)

    def begin(self) -> None:
        """Begin the first step, and join the backlog."""
        self.work, self.num_begun = self.steps[0](), 1
        self.group.backlog.append(self)

    def begin_next(self) -> None:
        """Begin the next step, after the last one. Blocks the host on CPU tensors."""
        assert self.work is not None
        with use_exchange_stream(self.group):
            self.work.wait()
            self.work = self.steps[self.num_begun]()
        self.num_begun += 1
        if self.num_begun == len(self.steps):
            self.group.backlog.remove(self)

    def wait(self) -> None:
        """Finish it, after beginning all steps of earlier ones. Blocks the host on CPU tensors, the
        current stream on CUDA."""
        while self.num_begun < len(self.steps):
            self.group.backlog[0].begin_next()
        if self.is_decoded:
            return
        assert self.work is not None
        self.work.wait()
        self._decode()

    @property
    def is_ready(self) -> bool:
        """Whether the last step that has begun is done."""
        return self.work is not None and self.work.is_completed

    @property
    def is_completed(self) -> bool:
        """Whether all steps are done. Does not advance it."""
        return self.num_begun == len(self.steps) and self.is_ready

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for, possibly of an earlier exchange; None if the sum
        is available. It may be done by now: then `advance` goes on."""
        if self.is_decoded:
            return None
        has_begun = self.num_begun == len(self.steps)
        return self.work if has_begun else self.group.backlog[0].work

    def _send_addends(self) -> Work:
        """Begin phase (a)."""
        for part in self.parts:
            part.encode_addend()
        return self.group.start_all_to_all(self.incoming, self.outgoing, 0)

    def _send_sums(self) -> Work:
        """Begin phase (b)."""
        for part in self.parts:
            part.encode_sum()
        return self.group.start_all_to_all(self.incoming, self.outgoing, 1)


@dataclass
class PlacedExchange(CodedExchange):
    """An exchange whose ranks are at several places, between which links are slower.

        up    the ranks of a place sum their addends in fp32
        (a)   an agent of each place sends chunk j of its sum, encoded, to rank j, which adds them
        (b)   rank j encodes the sum of its chunk, and sends it to an agent of each place
        down  the ranks of a place get from each other what its agents have received

    Each rank is the agent of its place for as many chunks. A chunk crosses to another place once,
    not once for each rank of both. The error-feedback residual of an addend is that of the place's
    sum, in the chunks whose agent this rank is.

    Attributes:
        shared: uint8 [ranks of the place, chunks, bytes], what the agents have received.
    """

    shared: Tensor = field(kw_only=True)

    @property
    def steps(self) -> Sequence[Callable[[], Work]]:
        """What begins the collective of each step: up, (a), (b) and down."""
        return (self._sum_of_place, self._send_addends, self._send_sums, self._share)

    @property
    def _places(self) -> Places:
        assert self.group.places is not None
        return self.group.places

    @property
    def _own_chunks(self) -> range:
        """Chunks for which this rank is the agent of its place."""
        return range(self._places.up.rank, self.group.size, self._places.up.size)

    def _sum_of_place(self) -> Work:
        """Begin to sum the addends of the place."""
        sums = [part.addend.values for part in self.parts]
        for part in self.parts:
            if part.addend.is_excluded:
                part.addend.values.zero_()
        up = self._places.up
        if up.runs_in_order:
            return up.start_all_reduce_together(sums)
        works = [up.start_all_reduce(values).works for values in sums]
        return Work(up.name, tuple(work for each in works for work in each))

    def _send_addends(self) -> Work:
        chunks, agents = self._own_chunks, self._places.agents(self.group.rank)
        for part in self.parts:
            part.encode_chunks(chunks)
        rows = self.outgoing[: len(chunks)]
        return self.group.start_all_to_all(self.incoming[: len(agents)], rows, 0, agents, chunks)

    def _send_sums(self) -> Work:
        chunks, agents = self._own_chunks, self._places.agents(self.group.rank)
        for part in self.parts:
            part.encode_sum(len(agents))
        rows, received = self.outgoing[: len(agents)], self.incoming[: len(chunks)]
        return self.group.start_all_to_all(received, rows, 1, chunks, agents)

    def _share(self) -> Work:
        """Begin to gather what the agents of the place have received. The rows of agents of fewer
        chunks are filled up."""
        mine = self.incoming[: self.shared.shape[1]]
        mine[len(self._own_chunks) :].zero_()
        return self._places.down.start_all_gather(mine, out=self.shared)[0]

    def _decode(self) -> None:
        # Row i of agent k is that of chunk i x agents + k.
        self.incoming.copy_(self.shared.transpose(0, 1).flatten(0, 1)[: self.group.size])
        self.shared = self.shared[:0].clone()
        super()._decode()


@dataclass(frozen=True)
class GatheredPart:
    """One of the sums of an exchange in one phase.

    Attributes:
        outgoing: uint8 [size, bytes]: this rank's addend in all rows.
        incoming: uint8 [size, bytes]: the addends of all ranks.
    """

    codec: Codec
    addend: Addend
    outgoing: Tensor
    incoming: Tensor

    def encode_addend(self) -> None:
        """Encode the addend into `outgoing`, one row for each receiver."""
        values, residual = self.addend.values, self.addend.residual
        if self.addend.is_excluded:
            self.outgoing.zero_()  # zero bytes are exact zeros in every codec
            return
        sent = None if residual is None else residual.sent
        self.codec.encode(values, residual=sent, out=self.outgoing[0])
        self.outgoing[1:] = self.outgoing[0]

    def decode(self) -> None:
        """Decode the addends of all ranks, and add them in rank order into the addend's values."""
        self.codec.decode_sum(self.incoming, self.addend.values)


@dataclass
class GatheredExchange(_Exchange):
    """An exchange in one phase, of one sum or of several sums together.

    Attributes:
        group: the ranks that sum.
        parts: the sums; their rows are adjacent. Empty when all sums are decoded.
        outgoing: uint8 [size, bytes of all parts].
        incoming: of the same shape.
        sent: the collective; None before it has begun.
        is_decoded: whether the sums are available.
    """

    parts: Sequence[GatheredPart]
    sent: Work | None = None

    @classmethod
    def prepare(cls, group: Group, addends: Sequence[Addend]) -> GatheredExchange:
        """Allocate the buffers; see `CodedExchange.prepare`."""
        codecs = _codecs(addends)
        widths = [
            codec.encoded_bytes(addend.values.numel())
            for addend, codec in zip(addends, codecs, strict=True)
        ]
        outgoing, incoming = _buffers(group, sum(widths), addends[0].values.device)
        rows = (outgoing.split(widths, dim=1), incoming.split(widths, dim=1))
        each = zip(codecs, addends, *rows, strict=True)
        return cls(group, [GatheredPart(*part) for part in each], outgoing, incoming)

    def begin(self) -> None:
        """Encode the addends and begin to send them."""
        for part in self.parts:
            part.encode_addend()
        self.sent = self.group.start_all_to_all(self.incoming, self.outgoing, 0)

    def wait(self) -> None:
        """Finish it. Blocks the host on CPU tensors, the current stream on CUDA."""
        if self.is_decoded:
            return
        assert self.sent is not None
        self.sent.wait()
        self._decode()

    @property
    def is_completed(self) -> bool:
        """Whether the collective is done. Does not advance it."""
        return self.sent is not None and self.sent.is_completed

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for; None if the sum is available."""
        return None if self.is_decoded else self.sent


def _codecs(addends: Sequence[Addend]) -> list[Codec]:
    return [addend.codec for addend in addends if addend.codec is not None]


def _buffers(group: Group, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate what goes out and what comes in: uint8, a row of `width` bytes for each rank."""
    shape = (group.size, width)
    outgoing = torch.empty(shape, dtype=torch.uint8, device=device)
    return outgoing, torch.empty_like(outgoing)


def advance_backlog(group: Group) -> None:
    """Begin steps whose predecessors are done, of the oldest exchanges first. No exchange begins
    more steps than the one before it has begun."""
    limit = sys.maxsize
    for exchange in list(group.backlog):
        while exchange.num_begun < min(len(exchange.steps), limit) and exchange.is_ready:
            exchange.begin_next()
        limit = exchange.num_begun


def on_exchange_stream(group: Group) -> AbstractContextManager[Any]:
    """Use the exchange stream, ordered after work queued so far; no-op unless `runs_in_order`."""
    if group.runs_in_order:
        streams = group.streams
        streams.wait(group.side_stream, streams.record(streams.current()))
    return use_exchange_stream(group)


def use_exchange_stream(group: Group) -> AbstractContextManager[Any]:
    """Use the exchange stream; no-op unless the group `runs_in_order`."""
    return group.streams.use(group.side_stream) if group.runs_in_order else nullcontext()
