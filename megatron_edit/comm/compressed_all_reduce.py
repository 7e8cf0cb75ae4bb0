"""Compressed all-reduce: a sum over a group, of encoded addends.

In two phases, if the codec encodes sums, too:

    (a) chunk j of every addend, encoded, goes to rank j, which decodes and adds them in rank
        order in fp32;
    (b) rank j encodes the sum of its chunk and sends it to all ranks, which decode it.

Otherwise in one phase: every addend, encoded as a whole, goes to all ranks, each of which decodes
and adds them in rank order in fp32.

Note: the order of phases. Exchanges begin in the same order on all ranks (for those of syncs see
the note on their order in `engine/sync/manager.py`). Phase (b) begins when (a) is done, which is at
another time on each rank. It has connections of its own, so that it may fall between any other
collectives, and it waits in a backlog until the phases (b) of all earlier exchanges have begun.
Hence all ranks issue the collectives of a phase in the same order, however often each of them
advances its exchanges. An exchange in one phase has only (a), and never waits in the backlog.
Where collectives run in order (NCCL) both phases share one connection, and relative to all other
collectives, also those of the training framework, each of them must begin at the same place of the
program on all ranks of a replica: some devices run collectives of several communicators one after
the other, and two ranks that launch them in different orders would wait for each other. So
advancing an exchange never begins its phase (b). That happens when another exchange begins, when a
unit has landed, when the sum is waited for, and where all ranks of the replica have agreed that
their phases (a) are done (`SyncManager.agree_on_second_phases`); not immediately, since its first
kernel waits for (a), and on a device with one hardware queue it would block all later kernels.
Encoding runs on a stream that overlaps compute, and the host never blocks. For the same reason sums
that begin together are one exchange: launched one after the other, each would block the queue until
the one before is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
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
    """

    sent: Tensor
    summed: Tensor


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
        codec: of the sum.
        addend: of this rank.
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
        values, residual = self.addend.values, self.addend.residual
        sent = None if residual is None else residual.sent
        if self.addend.is_excluded:
            self.outgoing.zero_()  # zero bytes are exact zeros in every codec
            return
        for ranks, where in self.chunks.runs():
            self._encode(values, sent, where, self.outgoing[ranks])
        self.outgoing[self.chunks.num_filled :].zero_()

    def encode_sum(self) -> None:
        """Sum this rank's chunk of `incoming`, and write the encoded sum to all `outgoing` rows."""
        where = self.chunks.of(self.rank)
        own = slice(0, where.stop - where.start)
        total = torch.empty(own.stop, dtype=torch.float32, device=self.incoming.device)
        self.codec.decode_sum(self.incoming[:, : self.codec.encoded_bytes(own.stop)], total)
        residual = self.addend.residual
        summed = None if residual is None else residual.summed
        self._encode(total, summed, own, self.outgoing[:1])
        self.outgoing[1:] = self.outgoing[0]  # a row for each receiver

    def decode(self) -> None:
        """Decode the sums of all chunks into the addend's values."""
        for ranks, where in self.chunks.runs():
            values = self.addend.values[where].view(ranks.stop - ranks.start, -1)
            used = self.codec.encoded_bytes(values.shape[1])
            self.codec.decode(self.incoming[ranks, :used], values)

    def _encode(self, values: Tensor, rest: Tensor | None, where: slice, rows: Tensor) -> None:
        """Encode chunks of one length into as many rows of `outgoing`."""
        shape = (len(rows), (where.stop - where.start) // len(rows))
        used = self.codec.encoded_bytes(shape[1])
        kept = None if rest is None else rest[where].view(shape)
        self.codec.encode(values[where].view(shape), residual=kept, out=rows[:, :used])
        if used < rows.shape[1]:
            rows[:, used:].zero_()  # never read, but uninitialised memory must not be sent


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
            start_second_phases(self.group)
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
        first: phase (a); None before it has begun.
        second: phase (b); None before it has begun.
        is_decoded: whether the sums are available.
    """

    parts: Sequence[CodedPart]
    first: Work | None = None
    second: Work | None = None

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
        return cls(group, parts, outgoing, incoming)

    def begin(self) -> None:
        """Encode the addends and begin phase (a)."""
        for part in self.parts:
            part.encode_addend()
        self.first = self.group.start_all_to_all(self.incoming, self.outgoing, 0)

    def start_second_phase(self) -> None:
        """Sum this rank's chunks and begin phase (b); it must be the first in the backlog."""
        assert self.first is not None and self.group.backlog[0] is self
        with use_exchange_stream(self.group):
            self.first.wait()
            for part in self.parts:
                part.encode_sum()
            self.second = self.group.start_all_to_all(self.incoming, self.outgoing, 1)
        self.group.backlog.popleft()

    def wait(self) -> None:
        """Finish it, after beginning all earlier second phases. Blocks the host on CPU tensors, the
        current stream on CUDA."""
        while self.second is None:
            self.group.backlog[0].start_second_phase()
        if self.is_decoded:
            return
        self.second.wait()
        self._decode()

    @property
    def is_completed(self) -> bool:
        """Whether both phases are done. Does not advance it."""
        return self.second is not None and self.second.is_completed

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for, possibly of an earlier exchange; None if the sum
        is available."""
        if self.is_decoded:
            return None
        return self.group.backlog[0].first if self.second is None else self.second


@dataclass(frozen=True)
class GatheredPart:
    """One of the sums of an exchange in one phase.

    Attributes:
        codec: of the sum.
        addend: of this rank.
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


def start_second_phases(group: Group) -> None:
    """Begin second phases, oldest first, up to one whose first phase is not done."""
    while group.backlog and group.backlog[0].first.is_completed:
        group.backlog[0].start_second_phase()


def on_exchange_stream(group: Group) -> AbstractContextManager[Any]:
    """Use the exchange stream, ordered after work queued so far; no-op unless `runs_in_order`."""
    if group.runs_in_order:
        streams = group.streams
        streams.wait(group.side_stream, streams.record(streams.current()))
    return use_exchange_stream(group)


def use_exchange_stream(group: Group) -> AbstractContextManager[Any]:
    """Use the exchange stream; no-op unless the group `runs_in_order`."""
    return group.streams.use(group.side_stream) if group.runs_in_order else nullcontext()
