"""The wire: sums over a group in fp32, or encoded to fewer bytes.

    fp32        one all-reduce, in place
    the others  encoded chunks to their owners, and their encoded sums back: two phases
    top64       encoded addends to all ranks: one phase

Several sums may form one exchange, each with its own encoding: parameters of a unit and moments of
the inner optimizer. Encoded sums: `compressed_all_reduce.py`.

All ranks decode the same bytes, so that all end with the same bits. A group of one rank encodes and
decodes, too, so that the effect of the codec on training is visible.
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
    GatheredExchange,
    Residual,
    on_exchange_stream,
)
from megatron_edit.constants import FP32, FP32_BYTES, WIRE_TYPES
from megatron_edit.method.coarse_codecs import INT2, SIGN, TERNARY
from megatron_edit.method.codec import BF16, INT4, INT8, Codec
from megatron_edit.method.moments import MomentRule, MomentSchedule
from megatron_edit.method.settings import Settings
from megatron_edit.method.sparse_codec import TOP64

NUM_PHASES = 2  # of an exchange whose sums are encoded, too
_CODECS: dict[str, Codec | None] = {
    FP32: None,
    **{codec.name: codec for codec in (BF16, INT8, INT4, INT2, TERNARY, SIGN, TOP64)},
}


class Exchange(Protocol):
    """Handle of a sum over a group; its tensor must not be accessed until it is done."""

    def advance(self) -> bool:
        """Advance without blocking; return whether the sum is available.

        Raises:
            ReplicaLostError: it failed or timed out.
        """

    def wait(self) -> None:
        """Finish it: blocks the host on CPU tensors, the current stream on CUDA.

        Raises:
            ReplicaLostError: it failed or timed out.
        """

    @property
    def is_completed(self) -> bool:
        """Whether all its collectives are done. Does not advance it."""

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for; None if the sum is available."""


@dataclass(frozen=True)
class ExchangeSet:
    """Several exchanges that began together, as one."""

    exchanges: tuple[Exchange, ...]

    def advance(self) -> bool:
        """Advance all without blocking; return whether all sums are available."""
        return all([exchange.advance() for exchange in self.exchanges])

    def wait(self) -> None:
        """Finish all."""
        for exchange in self.exchanges:
            exchange.wait()

    @property
    def is_completed(self) -> bool:
        """Whether all collectives of all exchanges are done."""
        return all(exchange.is_completed for exchange in self.exchanges)

    @property
    def on_wire(self) -> Work | None:
        """The collective that `advance` waits for; None if all sums are available."""
        works = (exchange.on_wire for exchange in self.exchanges)
        return next((work for work in works if work is not None), None)


def start_exchange(group: Group, addends: Sequence[Addend]) -> Exchange:
    """Begin several sums over the group as one exchange, in place, without blocking.

    Scratch of the encoded ones, until their sums are available: twice the encoded bytes (without a
    second phase, twice those of all ranks), and during summation 4 numel / size bytes and the
    scratch of the codec.
    Collective: all ranks of the group, the same numels and codecs. On gloo the group must have been
    created for the phases of its encoded sums (`Wire.num_phases`).
    Mutates: values and residuals of the addends, until it is done.

    Args:
        group: the ranks that sum.
    """
    addends = [addend for addend in addends if addend.values.numel()]  # a shard may be empty
    plain = [addend for addend in addends if addend.codec is None]
    coded = [addend for addend in addends if addend.codec and addend.codec.encodes_sums]
    gathered = [addend for addend in addends if addend.codec and not addend.codec.encodes_sums]
    for addend in plain:
        assert addend.residual is None, "fp32 loses nothing"
        if addend.is_excluded:
            addend.values.zero_()
    # Second phases of earlier exchanges begin before this one: see the note on their order in
    # `compressed_all_reduce.py`.
    progress_exchanges(group)
    exchanges: list[Exchange] = []
    if group.runs_in_order and len(plain) > 1:
        exchanges.append(group.start_all_reduce_together([addend.values for addend in plain]))
    else:
        exchanges += [group.start_all_reduce(addend.values) for addend in plain]
    if coded:
        exchanges.append(_start(group, CodedExchange, coded, NUM_PHASES))
    if gathered:
        exchanges.append(_start(group, GatheredExchange, gathered, 1))
    if len(exchanges) == 1:
        return exchanges[0]
    return ExchangeSet(tuple(exchanges)) if exchanges else Work(group.name)


def _start(
    group: Group,
    kind: type[CodedExchange | GatheredExchange],
    addends: Sequence[Addend],
    num_phases: int,
) -> Exchange:
    has_phases = group.runs_in_order or len(group.phases) >= num_phases
    assert group.size == 1 or has_phases, f"{group.name}: not made for exchanges in phases"
    exchange = kind.prepare(group, addends)
    with on_exchange_stream(group):
        exchange.begin()
    return exchange


def progress_exchanges(group: Group) -> None:
    """Where collectives run in order, queue the remaining steps of all exchanges on the device,
    which then waits for those before them. Does not block the host."""
    while group.runs_in_order and group.backlog:
        group.backlog[0].begin_next()


def payload_bytes_of(codec: Codec | None, numel: int, size: int) -> int:
    """Bytes that one rank sends for one sum; exactly what `Group` counts.

    Args:
        codec: encoding of the sum; None is fp32.
        numel: elements of the addend.
    """
    if codec is None:
        return all_reduce_payload(FP32_BYTES * numel, size)
    if not codec.encodes_sums:
        return (size - 1) * codec.encoded_bytes(numel)
    chunks = Chunks.split(numel, size, codec)
    return 2 * (size - 1) * codec.encoded_bytes(chunks.numel)


def placed_bytes(codec: Codec, numel: int, of: Sequence[int], rank: int) -> int:
    """Bytes that a rank sends for one encoded sum over several places; exactly what `Group` counts.

    Args:
        numel: elements of the addend.
        of: place of each rank.
        rank: which.
    """
    near = [other for other, place in enumerate(of) if place == of[rank]]
    width = codec.encoded_bytes(Chunks.split(numel, len(of), codec).numel)
    chunks = [chunk for chunk in range(len(of)) if near[chunk % len(near)] == rank]
    num_agents = len(set(of)) - (near[rank % len(near)] == rank)
    rows = sum(chunk != rank for chunk in chunks) + num_agents
    shared = (len(near) - 1) * -(-len(of) // len(near))
    return all_reduce_payload(FP32_BYTES * numel, len(near)) + width * (rows + shared)


def sent_bytes(codec: Codec | None, numel: int, size: int, of: Sequence[int] = ()) -> int:
    """Bytes that rank 0 sends for one sum, with places or, if `of` is empty, without."""
    if of and codec is not None and codec.encodes_sums:
        return placed_bytes(codec, numel, of, 0)
    return payload_bytes_of(codec, numel, size)


def moment_bytes(rule: MomentRule, numel: int, size: int, of: Sequence[int] = ()) -> int:
    """Payload bytes that one rank sends for the inner optimizer's moments of a unit.

    Args:
        rule: which moments, and how they are encoded.
        numel: elements of its shard of the unit.
        size: N.
        of: places of the replicas, of which the first is meant; empty if there is one.
    """
    return sum(sent_bytes(rule.codec_of(kind), numel, size, of) for kind in rule.kinds)


def unit_bytes(numel: int, wire: str, moments: str, *, size: int) -> int:
    """Payload bytes that one rank sends for a unit of this type.

    Args:
        numel: elements of its shard of the unit.
        wire: a value of `--edit-sync-dtype`.
        moments: that are sent, too: a value of `--edit-average-moments`.
        size: N.
    """
    return Wire.of(wire).payload_bytes(numel, size) + moment_bytes(
        MomentRule.of(moments), numel, size
    )


@dataclass(frozen=True)
class Wire:
    """Type of sums on the wire.

    Attributes:
        name: in settings, one of `constants.WIRE_TYPES`.
        codec: the encoding; None for fp32.
    """

    name: str
    codec: Codec | None

    @classmethod
    def of(cls, name: str) -> Wire:
        """The wire of the given name.

        Raises:
            ValueError: there is no such wire.
        """
        if name not in _CODECS:
            raise ValueError(f"wire {name!r}: must be one of {', '.join(WIRE_TYPES)}")
        return cls(name, _CODECS[name])

    @property
    def num_phases(self) -> int:
        """Phases of an exchange; 0 for fp32, which is a single all-reduce."""
        if self.codec is None:
            return 0
        return NUM_PHASES if self.codec.encodes_sums else 1

    @property
    def has_residual(self) -> bool:
        """Whether it is so coarse that it needs a `Residual`."""
        return self.codec is not None and self.codec.has_residual

    @property
    def sum_codec(self) -> Codec | None:
        """The encoding of sums, each rank's of the chunk that it owns; None if there is none."""
        return self.codec if self.codec is not None and self.codec.encodes_sums else None

    def owner_numel(self, numel: int, size: int) -> int:
        """Elements of the chunk whose sum a rank encodes; the last chunks may have fewer. 0 if
        sums are not encoded.

        Args:
            numel: elements of the addend.
        """
        return 0 if self.sum_codec is None else Chunks.split(numel, size, self.sum_codec).numel

    def owned(self, numel: int, size: int, rank: int) -> slice:
        """Slice of the elements whose sum a rank encodes."""
        if self.sum_codec is None:
            return slice(0, 0)
        return Chunks.split(numel, size, self.sum_codec).of(rank)

    def payload_bytes(self, numel: int, size: int) -> int:
        """Bytes that one rank sends for one sum; exactly what `Group` counts."""
        return payload_bytes_of(self.codec, numel, size)

    def new_residual(self, numel: int, size: int, device: torch.device) -> Residual:
        """Create a zero residual: 4 (1 + 1 / size) bytes per element; 4 if sums are not encoded."""
        owned = self.owner_numel(numel, size)
        return Residual(torch.zeros(numel, device=device), torch.zeros(owned, device=device))

    def start(
        self,
        group: Group,
        values: Tensor,
        residual: Residual | None = None,
        *,
        is_excluded: bool = False,
    ) -> Exchange:
        """Begin to sum `values` over the group, in place; see `start_exchange` and `Addend`.

        Collective: all ranks of the group, same numel and wire.
        Mutates: `values` and `residual`, until it is done.
        """
        return start_exchange(group, [Addend(values, residual, is_excluded, self.codec)])


def num_phases_of(settings: Settings) -> int:
    """Phases that exchanges of a sync group may have in a run; 0 if none has any."""
    if settings.auto or MomentSchedule.of(settings).rule.has_phases:
        return NUM_PHASES
    return max(Wire.of(name).num_phases for name in (settings.sync_dtype, settings.warmup_dtype))
