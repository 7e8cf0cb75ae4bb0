"""How a sum over a group travels: as fp32, or encoded to fewer bytes in two phases.

    fp32              one all-reduce, in place
    bf16, int8, int4  encoded chunks to their owners, and their encoded sums back
                      (`compressed_all_reduce.py`)

Everybody decodes the same bytes, so that all ranks end with the same bits. A group of one rank
encodes and decodes twice, too: it shows what the codec does to training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work, all_reduce_payload
from megatron_edit.comm.compressed_all_reduce import (
    Addend,
    Chunks,
    CodedExchange,
    beside_compute,
    start_second_phases,
)
from megatron_edit.constants import FP32, SYNC_DTYPES
from megatron_edit.method.codec import BF16, INT4, INT8, Codec

_CODECS: dict[str, Codec | None] = {FP32: None, **{c.name: c for c in (BF16, INT8, INT4)}}


class Exchange(Protocol):
    """A sum over a group that is under way; its tensor must not be touched until it is over."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether all is over and the sum is there.

        Raises:
            ReplicaLostError: it failed or timed out.
        """

    def wait(self) -> None:
        """Finish it: the host waits on CPU tensors, the current stream on CUDA.

        Raises:
            ReplicaLostError: it failed or timed out.
        """

    @property
    def is_completed(self) -> bool:
        """Whether nothing of it is on the wire any more, or ever will be. Asking does nothing."""

    @property
    def on_wire(self) -> Work | None:
        """What must be over before `advance` can do more; None where the sum is there."""


@dataclass
class Residual:
    """What encoding has lost so far and the next exchange makes good; exact zeros at first.

    Attributes:
        sent: fp32 [n], of this replica's addends.
        summed: fp32 [owner_numel], of the sums of the chunk that this rank encodes.
    """

    sent: Tensor
    summed: Tensor


def addend_of(values: Tensor, residual: Residual | None, is_left_out: bool) -> Addend:
    """What a rank adds, with what it has lost before; see `Wire.start`."""
    sent, summed = (None, None) if residual is None else (residual.sent, residual.summed)
    return Addend(values, sent, summed, is_left_out)


@dataclass(frozen=True)
class Wire:
    """How sums travel.

    Attributes:
        name: how settings call it, one of `constants.SYNC_DTYPES`.
    """

    name: str

    @classmethod
    def of(cls, name: str) -> Wire:
        """The wire of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in _CODECS:
            raise ValueError(f"wire {name!r}: must be one of {', '.join(SYNC_DTYPES)}")
        return cls(name)

    @property
    def codec(self) -> Codec | None:
        """What encodes; None for fp32."""
        return _CODECS[self.name]

    @property
    def num_phases(self) -> int:
        """Of an exchange, in which sums are encoded by their owners; 0 is one whole collective."""
        return 0 if self.codec is None else 2

    @property
    def has_residual(self) -> bool:
        """Whether it is so coarse that it should be given a `Residual`."""
        return self.codec is not None and self.codec.has_residual

    def owner_numel(self, numel: int, size: int) -> int:
        """Elements of the chunk that a rank encodes a second time; on the last ones fewer count.

        Args:
            numel: elements of the addend.
            size: ranks of the group.
        """
        return 0 if self.codec is None else Chunks.cut(numel, size, self.codec).numel

    def owned(self, numel: int, size: int, rank: int) -> slice:
        """The elements whose sum a rank encodes."""
        return slice(0, 0) if self.codec is None else Chunks.cut(numel, size, self.codec).of(rank)

    def payload_bytes(self, numel: int, size: int) -> int:
        """Bytes that one rank sends in one exchange; exactly what `Group` counts."""
        if self.codec is None:
            return all_reduce_payload(4 * numel, size)
        chunks = Chunks.cut(numel, size, self.codec)
        return 2 * (size - 1) * self.codec.encoded_bytes(chunks.numel)

    def new_residual(self, numel: int, size: int, device: torch.device) -> Residual:
        """Zeros of the right sizes: 4 (1 + 1 / size) bytes an element."""
        owned = self.owner_numel(numel, size)
        return Residual(torch.zeros(numel, device=device), torch.zeros(owned, device=device))

    def start(
        self,
        group: Group,
        values: Tensor,
        residual: Residual | None = None,
        *,
        is_left_out: bool = False,
    ) -> Exchange:
        """Begin to sum `values` over the group, in place. Waits for nothing.

        Scratch, until the sum is there: twice the encoded bytes, and while the sum is taken
        4 numel / size bytes and a codec's own.
        Collective: all ranks of the group, same numel and wire. On gloo the group must have been
        made for as many phases as the wire has.
        Mutates: `values`, when it is over; `residual`, until then.

        Args:
            group: who adds.
            values: fp32 [n] on `group.device`, contiguous: this rank's addend.
            residual: what was lost before; None loses it for good. None for fp32.
            is_left_out: this rank adds exact zeros, whatever `values` holds, and what it has
                lost before stays as it is.
        """
        if self.codec is None:
            assert residual is None, f"wire {self.name} loses nothing"
            return group.start_all_reduce(values.zero_() if is_left_out else values)
        if values.numel() == 0:  # ZeRO cuts without regard to units: a shard may be empty
            return Work(group.name)
        return self._start_coded(group, self.codec, [addend_of(values, residual, is_left_out)])

    def start_together(self, group: Group, addends: Sequence[Addend]) -> Exchange:
        """Begin several exchanges as one, where collectives run in order; see `start`.

        Collective: all ranks of the group, same numels and wire.
        """
        addends = [addend for addend in addends if addend.values.numel()]
        if self.codec is None:
            for addend in addends:
                if addend.is_left_out:
                    addend.values.zero_()
            return group.start_all_reduce_together([addend.values for addend in addends])
        if not addends:
            return Work(group.name)
        return self._start_coded(group, self.codec, addends)

    def _start_coded(self, group: Group, codec: Codec, addends: Sequence[Addend]) -> Exchange:
        has_phases = group.runs_in_order or len(group.phases) == self.num_phases
        assert group.size == 1 or has_phases, f"{group.name}: not made for {self.name}"
        exchange = CodedExchange.prepare(group, codec, addends)
        with beside_compute(group):
            self.progress(group)
            exchange.begin()
            group.backlog.append(exchange)
        return exchange

    def progress(self, group: Group) -> None:
        """Where collectives run in order: let the device go on with all exchanges that have begun,
        though it may have to wait for them. Waits for nothing."""
        if group.runs_in_order:
            start_second_phases(group, also_pending=True)
