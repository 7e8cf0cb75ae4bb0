"""A sum over a group in two phases of encoded chunks.

    (a) chunk j of every addend, encoded, goes to rank j, which decodes and adds them in rank
        order in fp32;
    (b) rank j encodes the sum of its chunk and sends it to all ranks, which decode it.

Note: order. Phase (b) begins when (a) is over, which is at another moment on each rank. It has
connections of its own, so that it may fall between any other collectives, and a backlog in which
it waits until the phases (b) of all earlier exchanges have begun. Hence all ranks issue the
collectives of a phase in the same order, however often each of them advances its exchanges.
Where collectives run in order anyway (NCCL), both phases are queued at once, on a stream beside
compute, and the host waits for neither.
"""

from __future__ import annotations

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
class CodedExchange:
    """An exchange in two phases.

    Attributes:
        group: who adds.
        codec: what encodes.
        values: fp32 [n], this rank's addend, later the sum.
        sent: fp32 [n], residual of the addend; None loses it.
        summed: fp32 [chunks.numel], residual of the sum of this rank's chunk; None loses it.
        chunks: which rank adds up what.
        outgoing: uint8 [size, bytes]: this rank's chunks; then, in all rows, the sum of its own.
        incoming: uint8 [size, bytes]: everybody's chunk of this rank; then the sums of all.
        first: phase (a); None before it has begun.
        second: phase (b); None before it has begun.
        is_decoded: whether `values` is the sum.
    """

    group: Group
    codec: Codec
    values: Tensor
    sent: Tensor | None
    summed: Tensor | None
    chunks: Chunks
    outgoing: Tensor
    incoming: Tensor
    first: Work | None = None
    second: Work | None = None
    is_decoded: bool = False

    @classmethod
    def prepare(
        cls,
        group: Group,
        codec: Codec,
        values: Tensor,
        *,
        sent: Tensor | None,
        summed: Tensor | None,
    ) -> CodedExchange:
        """Allocate, on the stream that will also wait for the end and so may free."""
        chunks = Chunks.cut(values.numel(), group.size, codec)
        shape = (group.size, codec.encoded_bytes(chunks.numel))
        outgoing, incoming = (
            torch.empty(shape, dtype=torch.uint8, device=values.device) for _ in range(2)
        )
        return cls(group, codec, values, sent, summed, chunks, outgoing, incoming)

    def begin(self, *, is_left_out: bool) -> None:
        """Encode the addend and begin phase (a)."""
        if is_left_out:
            self.outgoing.zero_()  # zero bytes are exact zeros in every codec
        else:
            for rank in range(self.group.size):
                self._encode(self.values, self.sent, self.chunks.of(rank), self.outgoing[rank])
        self.first = self.group.start_all_to_all(self.incoming, self.outgoing, 0)

    def start_second_phase(self) -> None:
        """Add up this rank's chunk and begin phase (b); it must be the next in the backlog."""
        assert self.first is not None and self.group.backlog[0] is self
        self.first.wait()
        where = self.chunks.of(self.group.rank)
        own = slice(0, where.stop - where.start)
        total = torch.zeros(own.stop, dtype=torch.float32, device=self.values.device)
        used = self.codec.encoded_bytes(own.stop)
        for row in self.incoming:
            self.codec.add_decoded(row[:used], total)
        self._encode(total, self.summed, own, self.outgoing[0])
        self.outgoing[1:] = self.outgoing[0]  # a row for each receiver
        self.second = self.group.start_all_to_all(self.incoming, self.outgoing, 1)
        self.group.backlog.popleft()

    def advance(self) -> bool:
        """As `wire.Exchange` has it; advances the exchanges before this one, too."""
        backlog = self.group.backlog
        while backlog and backlog[0].first.is_completed:
            backlog[0].start_second_phase()
        if self.is_completed:
            self.wait()
        return self.is_decoded

    def wait(self) -> None:
        """As `wire.Exchange` has it."""
        while self.second is None:
            self.group.backlog[0].start_second_phase()
        if self.is_decoded:
            return
        self.second.wait()
        for rank, row in enumerate(self.incoming):
            where = self.chunks.of(rank)
            used = self.codec.encoded_bytes(where.stop - where.start)
            self.codec.decode(row[:used], self.values[where])
        self.is_decoded = True
        self.outgoing = self.incoming = self.outgoing[:0].clone()  # whoever keeps this keeps little

    @property
    def is_completed(self) -> bool:
        """As `wire.Exchange` has it."""
        return self.second is not None and self.second.is_completed

    @property
    def on_wire(self) -> Work | None:
        """As `wire.Exchange` has it; that may be of an exchange before this one."""
        if self.is_decoded:
            return None
        return self.group.backlog[0].first if self.second is None else self.second

    def _encode(self, values: Tensor, rest: Tensor | None, where: slice, row: Tensor) -> None:
        used = self.codec.encoded_bytes(where.stop - where.start)
        kept = None if rest is None else rest[where]
        self.codec.encode(values[where], residual=kept, out=row[:used])
        if used < row.numel():
            row[used:].zero_()  # nobody reads it, but nothing else should leave this machine


def beside_compute(group: Group) -> AbstractContextManager[Any]:
    """The stream of exchanges, behind what computes now; nothing where they run all at once."""
    if not group.runs_in_order:
        return nullcontext()
    streams, side = group.streams, group.side_stream
    streams.wait(side, streams.record(streams.current()))
    return streams.use(side)
