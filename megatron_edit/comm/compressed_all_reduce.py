"""A sum over a group in two phases of encoded chunks.

    (a) chunk j of every addend, encoded, goes to rank j, which decodes and adds them in rank
        order in fp32;
    (b) rank j encodes the sum of its chunk and sends it to all ranks, which decode it.

Note: the order of phases. Exchanges begin in the same order on all ranks: for those of syncs the
note on the order of syncs says why (`engine/sync/manager.py`). Phase (b) begins when (a) is over,
which is at another moment on each rank. It has connections of its own, so that it may fall between
any other collectives, and a backlog in which it waits until the phases (b) of all earlier exchanges
have begun. Hence all ranks issue the collectives of a phase in the same order, however often each
of them advances its exchanges.
Where collectives run in order (NCCL) both phases share one connection, and a phase (b) begins
before the phase (a) of any later exchange: again the same order on all ranks, whoever begins it
when. It begins where (a) is found to be over, or another exchange begins, or its sum is waited for,
and not at once: its first kernel waits for (a), and on a device with one hardware queue it would
block all that is launched behind it. Encoding runs on a stream beside compute, and the host waits
for nothing. For the same reason sums that begin together are one exchange: launched one behind the
other, each would block the queue until the one before is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.method.codec import Codec


@dataclass(frozen=True)
class Chunks:
    """Elements cut into one chunk for each rank: equal ones, but for the last that have any.

    Attributes:
        total: elements in all.
        numel: elements of a whole chunk; whole blocks of the codec, or less than one.
    """

    total: int
    numel: int

    @classmethod
    def cut(cls, total: int, size: int, codec: Codec) -> Chunks:
        """Chunks of `total` elements for `size` ranks."""
        numel, block = -(-total // size), codec.block_numel
        return cls(total, numel if numel <= block else -(-numel // block) * block)

    def of(self, rank: int) -> slice:
        """The elements of a rank's chunk; empty where there are none left."""
        return slice(*(min(edge * self.numel, self.total) for edge in (rank, rank + 1)))


@dataclass
class Residual:
    """What encoding has lost so far and the next exchange makes good; exact zeros at first.

    Attributes:
        sent: fp32 [n], of this replica's addends.
        summed: fp32 [owner_numel], of the sums of the chunk that this rank encodes.
    """

    sent: Tensor
    summed: Tensor


@dataclass(frozen=True)
class Addend:
    """What a rank gives to a sum; see `wire.start_exchange`.

    Attributes:
        values: fp32 [n] on the group's device, contiguous: this rank's addend, later the sum.
        residual: what was lost before; None loses it for good. None for fp32.
        is_left_out: this rank adds exact zeros, whatever `values` holds, and what it has lost
            before stays as it is.
        codec: how the sum travels; None is as fp32. The same on all ranks.
    """

    values: Tensor
    residual: Residual | None
    is_left_out: bool
    codec: Codec | None


@dataclass(frozen=True)
class CodedPart:
    """One of the sums of an exchange.

    Attributes:
        rank: of this rank.
        codec: what encodes.
        addend: this rank's.
        chunks: which rank adds up what.
        outgoing: uint8 [size, bytes]: this rank's chunks; then, in all rows, the sum of its own.
        incoming: uint8 [size, bytes]: everybody's chunk of this rank; then the sums of all.
    """

    rank: int
    codec: Codec
    addend: Addend
    chunks: Chunks
    outgoing: Tensor
    incoming: Tensor

    def encode_addend(self) -> None:
        """Into `outgoing`, a row for the owner of each chunk."""
        values, residual = self.addend.values, self.addend.residual
        sent = None if residual is None else residual.sent
        if self.addend.is_left_out:
            self.outgoing.zero_()  # zero bytes are exact zeros in every codec
        else:
            for rank, row in enumerate(self.outgoing):
                self._encode(values, sent, self.chunks.of(rank), row)

    def encode_sum(self) -> None:
        """Add up this rank's chunk of `incoming`; its encoded sum fills all rows of `outgoing`."""
        where = self.chunks.of(self.rank)
        own = slice(0, where.stop - where.start)
        total = torch.zeros(own.stop, dtype=torch.float32, device=self.incoming.device)
        used = self.codec.encoded_bytes(own.stop)
        for row in self.incoming:
            self.codec.add_decoded(row[:used], total)
        residual = self.addend.residual
        summed = None if residual is None else residual.summed
        self._encode(total, summed, own, self.outgoing[0])
        self.outgoing[1:] = self.outgoing[0]  # a row for each receiver

    def decode(self) -> None:
        """Everybody's sums, into the addend's values."""
        for rank, row in enumerate(self.incoming):
            where = self.chunks.of(rank)
            used = self.codec.encoded_bytes(where.stop - where.start)
            self.codec.decode(row[:used], self.addend.values[where])

    def _encode(self, values: Tensor, rest: Tensor | None, where: slice, row: Tensor) -> None:
        used = self.codec.encoded_bytes(where.stop - where.start)
        kept = None if rest is None else rest[where]
        self.codec.encode(values[where], residual=kept, out=row[:used])
        if used < row.numel():
            row[used:].zero_()  # nobody reads it, but nothing else should leave this machine


@dataclass
class CodedExchange:
    """An exchange in two phases, of one sum or of several that travel together.

    Attributes:
        group: who adds.
        parts: the sums; their rows lie side by side. None are left when all is decoded.
        outgoing: uint8 [size, bytes of all parts].
        incoming: of the same shape.
        first: phase (a); None before it has begun.
        second: phase (b); None before it has begun.
        is_decoded: whether the sums are there.
    """

    group: Group
    parts: Sequence[CodedPart]
    outgoing: Tensor
    incoming: Tensor
    first: Work | None = None
    second: Work | None = None
    is_decoded: bool = False

    @classmethod
    def prepare(cls, group: Group, addends: Sequence[Addend]) -> CodedExchange:
        """Allocate, on the stream that will also wait for the end and so may free.

        Args:
            group: who adds.
            addends: of this rank; each has a codec, which may be another one than the others'.
        """
        codecs = [addend.codec for addend in addends if addend.codec is not None]
        chunks = [
            Chunks.cut(addend.values.numel(), group.size, codec)
            for addend, codec in zip(addends, codecs, strict=True)
        ]
        widths = [
            codec.encoded_bytes(chunk.numel) for codec, chunk in zip(codecs, chunks, strict=True)
        ]
        shape, device = (group.size, sum(widths)), addends[0].values.device
        outgoing, incoming = (
            torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(2)
        )
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
        """Add up this rank's chunks and begin phase (b); it must be the next in the backlog."""
        assert self.first is not None and self.group.backlog[0] is self
        with beside(self.group):
            self.first.wait()
            for part in self.parts:
                part.encode_sum()
            self.second = self.group.start_all_to_all(self.incoming, self.outgoing, 1)
        self.group.backlog.popleft()

    def advance(self) -> bool:
        """Do what can be done without waiting, for the exchanges before this one, too; whether the
        sum is there."""
        start_second_phases(self.group)
        if self.is_completed:
            self.wait()
        return self.is_decoded

    def wait(self) -> None:
        """Finish it; second phases before its own begin first. The host waits on CPU tensors, the
        current stream on CUDA."""
        while self.second is None:
            self.group.backlog[0].start_second_phase()
        if self.is_decoded:
            return
        self.second.wait()
        for part in self.parts:
            part.decode()
        self.is_decoded = True
        # Give the buffers back: the units keep this object until their outer steps.
        self.parts, self.outgoing = (), self.outgoing[:0].clone()
        self.incoming = self.outgoing

    @property
    def is_completed(self) -> bool:
        """Whether nothing of it is on the wire any more. Asking does nothing."""
        return self.second is not None and self.second.is_completed

    @property
    def on_wire(self) -> Work | None:
        """What must be over before `advance` can do more, also of an exchange before this one; None
        where the sum is there."""
        if self.is_decoded:
            return None
        return self.group.backlog[0].first if self.second is None else self.second


def start_second_phases(group: Group, *, also_pending: bool = False) -> None:
    """Begin second phases, oldest first, up to one whose first phase is not over.

    Args:
        group: who adds.
        also_pending: the device may wait for first phases: begin all.
    """
    while group.backlog and (also_pending or group.backlog[0].first.is_completed):
        group.backlog[0].start_second_phase()


def on_exchange_stream(group: Group) -> AbstractContextManager[Any]:
    """The stream of exchanges, behind what computes now; nothing where they run all at once."""
    if group.runs_in_order:
        streams = group.streams
        streams.wait(group.side_stream, streams.record(streams.current()))
    return beside(group)


def beside(group: Group) -> AbstractContextManager[Any]:
    """The stream of exchanges; nothing where they run all at once."""
    return group.streams.use(group.side_stream) if group.runs_in_order else nullcontext()
