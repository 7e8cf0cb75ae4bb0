"""How a sum over a group travels: as fp32, or encoded to fewer bytes in two phases.

    fp32              one all-reduce, in place
    bf16, int8, int4  encoded chunks to their owners, and their encoded sums back
                      (`compressed_all_reduce.py`)

Several sums may travel as one exchange, each in a form of its own: parameters of a unit beside
moments of the inner optimizer.

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
    Residual,
    on_exchange_stream,
    start_second_phases,
)
from megatron_edit.constants import FP32, FP32_BYTES, SYNC_DTYPES
from megatron_edit.method.codec import BF16, INT4, INT8, Codec
from megatron_edit.method.moments import MomentRule

NUM_PHASES = 2  # of an exchange of encoded sums
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


@dataclass(frozen=True)
class ExchangeSet:
    """Several exchanges that began together and are over when all are."""

    exchanges: tuple[Exchange, ...]

    def advance(self) -> bool:
        """Do what can be done of all without waiting; whether all sums are there."""
        return all([exchange.advance() for exchange in self.exchanges])

    def wait(self) -> None:
        """Finish all."""
        for exchange in self.exchanges:
            exchange.wait()

    @property
    def is_completed(self) -> bool:
        """Whether nothing of any is on the wire any more."""
        return all(exchange.is_completed for exchange in self.exchanges)

    @property
    def on_wire(self) -> Work | None:
        """What must be over before `advance` can do more; None where all sums are there."""
        works = (exchange.on_wire for exchange in self.exchanges)
        return next((work for work in works if work is not None), None)


def start_exchange(group: Group, addends: Sequence[Addend]) -> Exchange:
    """Begin several sums over the group as one exchange, in place. Waits for nothing.

    Scratch of the encoded ones, until their sums are there: twice the encoded bytes, and while a
    sum is taken 4 numel / size bytes and a codec's own.
    Collective: all ranks of the group, the same numels and codecs. On gloo the group must have been
    made for `NUM_PHASES` phases, if anything is encoded.
    Mutates: values and residuals of the addends, when it is over.

    Args:
        group: who adds.
        addends: of this rank.
    """
    addends = [addend for addend in addends if addend.values.numel()]  # a shard may be empty
    plain = [addend for addend in addends if addend.codec is None]
    coded = [addend for addend in addends if addend.codec is not None]
    for addend in plain:
        assert addend.residual is None, "fp32 loses nothing"
        if addend.is_left_out:
            addend.values.zero_()
    # Second phases of earlier exchanges begin before anything of this one: see the note on their
    # order in `compressed_all_reduce.py`.
    progress_exchanges(group)
    exchanges: list[Exchange] = []
    if group.runs_in_order and len(plain) > 1:
        exchanges.append(group.start_all_reduce_together([addend.values for addend in plain]))
    else:
        exchanges += [group.start_all_reduce(addend.values) for addend in plain]
    if coded:
        exchanges.append(_start_coded(group, coded))
    if len(exchanges) == 1:
        return exchanges[0]
    return ExchangeSet(tuple(exchanges)) if exchanges else Work(group.name)


def _start_coded(group: Group, addends: Sequence[Addend]) -> Exchange:
    has_phases = group.runs_in_order or len(group.phases) == NUM_PHASES
    assert group.size == 1 or has_phases, f"{group.name}: not made for exchanges in phases"
    exchange = CodedExchange.prepare(group, addends)
    with on_exchange_stream(group):
        exchange.begin()
        group.backlog.append(exchange)
    return exchange


def progress_exchanges(group: Group) -> None:
    """Where collectives run in order: let the device go on with all exchanges that have begun,
    though it may have to wait for them. Waits for nothing."""
    if group.runs_in_order:
        start_second_phases(group, also_pending=True)


def payload_bytes_of(codec: Codec | None, numel: int, size: int) -> int:
    """Bytes that one rank sends of one sum; exactly what `Group` counts.

    Args:
        codec: how it travels; None is as fp32.
        numel: elements of the addend.
        size: ranks of the group.
    """
    if codec is None:
        return all_reduce_payload(FP32_BYTES * numel, size)
    chunks = Chunks.cut(numel, size, codec)
    return 2 * (size - 1) * codec.encoded_bytes(chunks.numel)


def moment_bytes(rule: MomentRule, numel: int, size: int) -> int:
    """Payload that one rank sends of the moments of the inner optimizer of a unit.

    Args:
        rule: which, and how they travel.
        numel: elements of its shard of the unit.
        size: N.
    """
    return sum(payload_bytes_of(rule.codec_of(kind), numel, size) for kind in rule.kinds)


@dataclass(frozen=True)
class Wire:
    """How sums travel.

    Attributes:
        name: how settings call it, one of `constants.SYNC_DTYPES`.
        codec: what encodes; None for fp32.
    """

    name: str
    codec: Codec | None

    @classmethod
    def of(cls, name: str) -> Wire:
        """The wire of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in _CODECS:
            raise ValueError(f"wire {name!r}: must be one of {', '.join(SYNC_DTYPES)}")
        return cls(name, _CODECS[name])

    @property
    def num_phases(self) -> int:
        """Of an exchange, in which sums are encoded by their owners; 0 is one whole collective."""
        return 0 if self.codec is None else NUM_PHASES

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
        return payload_bytes_of(self.codec, numel, size)

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
        """Begin to sum `values` over the group, in place; see `start_exchange` and `Addend`.

        Collective: all ranks of the group, same numel and wire.
        Mutates: `values`, when it is over; `residual`, until then.
        """
        return start_exchange(group, [Addend(values, residual, is_left_out, self.codec)])
