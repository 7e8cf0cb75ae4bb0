"""Codecs: fp32 numbers in fewer bytes. Pure functions of tensors, without host reads.

    BF16    2 bytes per value
    INT8    1 byte per value, an fp32 scale for every 256
    INT4    half a byte per value, a bf16 scale for every 128
    LOG8    1 byte per value, sign and base-2 logarithm, an exponent for every 256
    ULOG8   the same for non-negative values, over twice the range

Those of fewer bits are in `coarse_codecs.py` and `sparse_codec.py`.

A block has the scale largest / 127 (largest / 7), truncated to so few bits that code x scale is
exact in fp32, but not so few that a code could exceed 127 (7). Hence no value saturates; the same
bytes decode to the same bits on every machine, with and without fused multiply-add; value =
decoded + residual holds exactly; and decoded values encode to themselves. Values below 1e-34 are
zeros.

The two logarithmic codecs are for moments of the inner optimizer, whose error must be small
relative to each value and not to the largest one of a block; see `_LogBlocks`.

Non-finite input: all values of a block with a NaN or an infinity decode to NaN or infinities, and
their residual is not finite either. They never decode to a wrong finite number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_edit import constants

# On the CPU a slab stays in the caches during its passes, and is so large that calls of operators
# cost little beside them; on a GPU large slabs keep the number of launches small.
_SLAB_NUMEL = {"cpu": 1 << 18}
_SLAB_NUMEL_ELSEWHERE = 1 << 24
_ALIGNMENT = 4  # so that scales in concatenated encodings can be viewed in place
_CODES_PER_OCTAVE = 8  # of the logarithmic codecs
_SIGN = 128  # in a code with a sign
_MANTISSA_BITS = 23  # of fp32
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_PART_BITS = 15  # of a mantissa that tell apart what is in one of 256 parts of an octave
_BAG = 256  # values; on the CPU each width costs 600 KiB of code that is generated for it
_SMALLEST_SCALE = 2.0**-120  # far from subnormals, which some devices flush; less becomes 0


class Codec(ABC):
    """Encodes fp32 numbers to bytes and decodes them.

    All rows of a call are encoded in the same launches (large ones apart, in about as many), each
    as if it were alone. Rows may have a stride, of encoded ones a multiple of 4 bytes; the elements
    of a row are contiguous.

    Scratch: 4 bytes for each of at most 262144 values on the CPU, of 2^24 elsewhere, or of a unit
    of each row if that is more; up to 16 bytes for codecs of 2 bits per value and less. A sum of
    rows takes up to 8 bytes more.

    Attributes:
        name: in settings and messages.
        has_residual: whether it is so coarse that it needs error feedback.
        encodes_sums: whether sums of decoded values are encoded, too; else every rank gets all
            addends.
        block_numel: values that share a scale; a split inside a block needs one more scale.
    """

    name: str
    has_residual: bool
    encodes_sums: bool
    block_numel: int

    def encoded_bytes(self, numel: int) -> int:
        """Size of `numel` encoded values in bytes, a multiple of 4."""
        return aligned(self.used_bytes(numel))

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Encode values, with error feedback where a residual is given.

        Mutates: `out`; and `residual`, which becomes residual + values - decoded values. (TOP64
        first multiplies it by its `residual_decay`.)

        Args:
            values: fp32 [n] or [rows, n].
            residual: like `values`, on the same device, added to them before they are encoded.
            out: uint8 [encoded_bytes(n)] or [rows, encoded_bytes(n)] at a multiple of 4 bytes; None
                allocates one.

        Returns:
            `out`.
        """
        data = self._target(values, out)
        rest = None if residual is None else torch.atleast_2d(residual)
        for rows in self._together(torch.atleast_2d(values)):
            self._encode_rows(
                torch.atleast_2d(values)[rows],
                None if rest is None else rest[rows],
                torch.atleast_2d(data)[rows],
            )
        return data

    def _encode_rows(self, rows: Tensor, rest: Tensor | None, coded: Tensor) -> None:
        numel = rows.shape[1]
        parts = self._parts(coded, numel)
        scratch = self.scratch(coded, parts, decodes=False)
        for where in parts:
            part = rows[:, where] if rest is None else rest[:, where].add_(rows[:, where])
            self.encode_part(part, coded, numel, where, scratch, has_residual=rest is not None)
        if self.used_bytes(numel) < coded.shape[1]:
            coded[:, self.used_bytes(numel) :].zero_()  # so that equal values have equal bytes

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode to fp32, the inverse of `encode` up to its rounding.

        Mutates: `out`.

        Args:
            data: uint8 [encoded_bytes(n)] or [rows, encoded_bytes(n)] at a multiple of 4 bytes.
            out: fp32 [n] or [rows, n].
        """
        for rows in self._together(torch.atleast_2d(out)):
            coded, decoded = torch.atleast_2d(data)[rows], torch.atleast_2d(out)[rows]
            numel = decoded.shape[1]
            parts = self._parts(coded, numel)
            scratch = self.scratch(coded, parts, decodes=True)
            for where in parts:
                self.decode_part(coded, numel, where, decoded[:, where], scratch, adds=False)

    def decode_sum(self, data: Tensor, out: Tensor) -> None:
        """Decode rows and add them in fp32, the first one to zeros, then each to the sum so far.

        Mutates: `out`.

        Args:
            data: uint8 [rows, encoded_bytes(n)] at a multiple of 4 bytes.
            out: fp32 [n].
        """
        if len(out) >= self.slab_numel(out):
            self._add_rows(data, out.zero_())
            return
        parts = self._parts(data, len(out))
        scratch = self.scratch(data, parts, decodes=True)
        rows = torch.empty(len(data) * _bagged(longest(parts)), device=out.device)
        for where in parts:
            numel = where.stop - where.start
            decoded = rows[: len(data) * _bagged(numel)].view(len(data), -1)
            self.decode_part(data, len(out), where, decoded[:, :numel], scratch, adds=False)
            out[where] = _sum_of_rows(decoded)[:numel]

    def _add_rows(self, data: Tensor, total: Tensor) -> None:
        """Add decoded rows one after another, of which each fills slabs."""
        parts = self._parts(data[:1], len(total))
        scratch = self.scratch(data[:1], parts, decodes=False)
        for where in parts:
            out = total[where].unsqueeze(0)
            for row in data.split(1):
                self.decode_part(row, len(total), where, out, scratch, adds=True)

    @property
    def unit(self) -> int:
        """Values of a row that are encoded or decoded together at least: a block, or several."""
        return self.block_numel

    def slab_numel(self, data: Tensor) -> int:
        """Values of all rows that are encoded or decoded together on the device of `data`."""
        return _SLAB_NUMEL.get(data.device.type, _SLAB_NUMEL_ELSEWHERE)

    def _together(self, rows: Tensor) -> list[slice]:
        """Which rows [rows, n] are encoded or decoded in the same launches: all, or if each fills
        slabs, as the launches are as few, each alone."""
        step = 1 if rows.shape[1] >= self.slab_numel(rows) else len(rows)
        return slabs(0, len(rows), step)

    def _parts(self, data: Tensor, numel: int) -> list[slice]:
        """Slabs of whole units of `numel` values, of all rows of `data`; then the short last unit
        if there is one."""
        unit = self.unit
        whole = numel // unit * unit
        step = max(self.slab_numel(data) // len(data) // unit, 1) * unit
        return [*slabs(0, whole, step), *slabs(whole, numel, unit)]

    def scratch(self, data: Tensor, parts: list[slice], *, decodes: bool) -> list[Tensor]:
        """fp32 buffers that every part uses, each for the longest part of all rows of `data`; empty
        ones where they are only needed to encode or to add."""
        numel = 0 if decodes else len(data) * longest(parts)
        return [torch.empty(numel, dtype=torch.float32, device=data.device)]

    def _target(self, values: Tensor, out: Tensor | None) -> Tensor:
        """Return the output of `encode`, after checking the arguments."""
        assert values.dtype == torch.float32, values.dtype
        shape = (*values.shape[:-1], self.encoded_bytes(values.shape[-1]))
        if out is None:
            return torch.empty(shape, dtype=torch.uint8, device=values.device)
        assert out.shape == shape, f"{self.name}: {tuple(out.shape)} bytes for {shape}"
        return out

    @abstractmethod
    def used_bytes(self, numel: int) -> int:
        """Size of `numel` encoded values in bytes, without zeros at the end."""

    @abstractmethod
    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        """Encode some values of each row.

        Mutates: `data`; `scratch`; and with a residual `part`, which becomes the encoding error.

        Args:
            part: fp32 [rows, values], of `_parts`.
            data: uint8 [rows, bytes].
            numel: values of a whole row.
            where: which of them `part` is.
            scratch: of `scratch`.
            has_residual: whether to leave the encoding error in `part`.
        """

    @abstractmethod
    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        """Inverse of `encode_part`: write to `out`, fp32 [rows, values], or add to it. Mutates it,
        and `scratch`."""


@dataclass(frozen=True)
class _BFloat16(Codec):
    """The upper half of the fp32 bits, rounded to even; beyond 3.39e38 it is infinity."""

    name: str = constants.BF16
    has_residual: bool = False
    encodes_sums: bool = True
    block_numel: int = 1

    def used_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        sent = self._halves(data, numel, where).copy_(part)
        if has_residual:
            part.sub_(scratch[0][: part.numel()].view(part.shape).copy_(sent))

    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        halves = self._halves(data, numel, where)
        if adds:
            out.add_(scratch[0][: out.numel()].view(out.shape).copy_(halves))
        else:
            out.copy_(halves)

    def _halves(self, data: Tensor, numel: int, where: slice) -> Tensor:
        return data[:, : 2 * numel].view(torch.bfloat16)[:, where]


@dataclass(frozen=True)
class _Blocks(Codec):
    """Symmetric integers -top..top, in blocks that share a scale.

    Bytes: the scales of all blocks, then the codes of all blocks, then zeros up to a multiple of 4.
    The last block may be short. Where two values share a byte, they are value i of the first half
    of a block and value i of its second half: byte = first + 16 second, as a signed number.

    Attributes:
        block_numel: values that share a scale.
        spare_bits: last bits of an fp32 scale that are 0, so that code x scale is exact.
        values_per_byte: 1 or 2.
    """

    name: str
    block_numel: int
    top: int
    scale_dtype: torch.dtype
    spare_bits: int
    values_per_byte: int
    has_residual: bool = True
    encodes_sums: bool = True

    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        scales, codes = self._sections(data, numel, where)
        blocks = part.view(len(part), scales.shape[1], -1)
        work = scratch[0][: part.numel()].view(blocks.shape)
        scale = self._scale(torch.abs(blocks, out=work).amax(dim=2, keepdim=True))
        scales.copy_(scale)
        inverse = scale.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)  # zeros stay zeros
        rounded = torch.mul(blocks, inverse, out=work).round_()
        if has_residual:
            blocks.addcmul_(rounded, scale, value=-1.0)
        self._pack(rounded, codes)

    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        scales, codes = self._sections(data, numel, where)
        blocks = out.view(len(out), scales.shape[1], -1)
        if adds:
            work = scratch[0][: out.numel()].view(blocks.shape)
            self._unpack(codes, work)
            blocks.addcmul_(work, scales.float())
        else:
            self._unpack(codes, blocks)
            blocks.mul_(scales.float())

    def used_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + self._code_bytes(numel)

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel) * int(self.scale_dtype.itemsize)

    def _code_bytes(self, numel: int) -> int:
        """Bytes of codes; the last block begins at a byte boundary."""
        full, rest = divmod(numel, self.block_numel)
        return full * (self.block_numel // self.values_per_byte) + -(-rest // self.values_per_byte)

    def _sections(self, data: Tensor, numel: int, where: slice) -> tuple[Tensor, Tensor]:
        """Scales [rows, blocks, 1], stored, and codes, int8 [rows, blocks, bytes], of a part."""
        first, stop = where.start // self.block_numel, -(-where.stop // self.block_numel)
        scales = data[:, : self._scale_bytes(numel)].view(self.scale_dtype)[:, first:stop]
        codes = data[:, self._scale_bytes(numel) :].view(torch.int8)
        held = codes[:, self._code_bytes(where.start) : self._code_bytes(where.stop)]
        return scales.unsqueeze(2), held.view(len(data), stop - first, -1)

    def _scale(self, largest: Tensor) -> Tensor:
        """fp32 scales: 0 for a block of zeros, not finite for a block that is not finite.

        Args:
            largest: fp32 [rows, blocks, 1], largest magnitude of each block.
        """
        scale = largest / self.top
        scale.view(torch.int32).bitwise_and_(-1 << self.spare_bits)
        return torch.nn.functional.threshold_(scale, _SMALLEST_SCALE, 0.0)

    def _pack(self, rounded: Tensor, codes: Tensor) -> None:
        """Pack integers, fp32 [rows, blocks, values], into int8 [rows, blocks, bytes]. Mutates
        both."""
        if self.values_per_byte == 2:
            half = codes.shape[2]
            second = rounded[..., half:]
            rounded[..., : second.shape[2]].add_(second, alpha=16.0)
            rounded = rounded[..., :half]
        codes.copy_(rounded)

    def _unpack(self, codes: Tensor, out: Tensor) -> None:
        """Inverse of `_pack`. Mutates `out`."""
        if self.values_per_byte == 1:
            out.copy_(codes)
            return
        half = codes.shape[2]
        seconds = (codes + 8) >> 4  # the first value is -7..7: it never carries
        first, second = out[..., :half], out[..., half:]
        second.copy_(seconds[..., : second.shape[2]])
        first.copy_(codes - (seconds << 4))


@dataclass(frozen=True)
class _LogBlocks(Codec):
    """Base-2 logarithms in eighths of an octave, in blocks that share an exponent.

    A block has the exponent e of its largest magnitude. Code c > 0 stands for the magnitudes from
    2^(e + (c - top + 7) / 8) up to the next code's, and decodes to the geometric middle of both:
    the relative error is at most 2^(1/16) - 1 = 4.5 %, for the largest value and the smallest.
    Code 0 is zero. Decoded values encode to themselves, and the sum of decoded values is never
    negative if the values are not.

    Below the smallest code a signed value is zero. An unsigned one, which is a second moment and so
    a divisor, takes the smallest code: zero would make the update of that element unbounded.

    Decoding is exact: a product of a power of two, and of fp32 numbers that correctly rounded
    square roots give on every machine. No decoded number is subnormal.

    Bytes: the exponents of all blocks, biased as in fp32, then the codes of all values, then zeros
    up to a multiple of 4. The last block may be short. Exponent 255 is a block that is not finite.

    Attributes:
        top: the largest code; 8 codes are an octave.
        is_signed: whether the upper bit of a code is the sign.
        block_numel: values that share an exponent.
        has_residual: False: the error is small relative to each value.
    """

    name: str
    top: int
    is_signed: bool
    block_numel: int = 256
    has_residual: bool = False
    encodes_sums: bool = True

    def used_bytes(self, numel: int) -> int:
        return self._exponent_bytes(numel) + numel

    def scratch(self, data: Tensor, parts: list[slice], *, decodes: bool) -> list[Tensor]:
        return []

    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        assert not has_residual, f"{self.name} has no error feedback"
        exponents, codes = self._sections(data, numel, where)
        blocks = part.view(len(part), exponents.shape[1], -1)
        bits = blocks.abs().view(torch.int32)  # they order as the magnitudes do
        largest = bits.amax(dim=2, keepdim=True)
        exponent = (largest >> _MANTISSA_BITS).clamp_(min=self._least_exponent)
        exponents.copy_(exponent * (largest > 0))
        if not self.is_signed:
            bits.masked_fill_(blocks < 0, 0)
        code = (bits >> _MANTISSA_BITS).sub_(exponent).mul_(_CODES_PER_OCTAVE)
        code += _codes_below(bits & _MANTISSA)
        code += self.top - _CODES_PER_OCTAVE + 1
        code.clamp_(min=0 if self.is_signed else 1, max=self.top)
        if self.is_signed:
            code += ((blocks < 0) & (code > 0)) * _SIGN
        else:
            code.masked_fill_(bits == 0, 0)
        codes.copy_(code)

    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        exponents, codes = self._sections(data, numel, where)
        blocks = out.view(len(out), exponents.shape[1], -1)
        decoded = self._unscaled(codes).mul_(power_of_two(exponents))
        blocks.add_(decoded) if adds else blocks.copy_(decoded)

    def _exponent_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel)

    @property
    def _least_exponent(self) -> int:
        """Smallest biased exponent at which code 1 is a normal number, which no device flushes."""
        return 1 + -(-self.top // _CODES_PER_OCTAVE)

    def _sections(self, data: Tensor, numel: int, where: slice) -> tuple[Tensor, Tensor]:
        """Exponents [rows, blocks, 1], stored, and codes, uint8 [rows, blocks, values], of a
        part."""
        first, stop = where.start // self.block_numel, -(-where.stop // self.block_numel)
        codes = data[:, self._exponent_bytes(numel) :][:, where]
        return data[:, first:stop].unsqueeze(2), codes.view(len(data), stop - first, -1)

    def _unscaled(self, codes: Tensor) -> Tensor:
        """fp32 like `codes`: decoded codes, divided by 2^e of their block."""
        table = _log_table(self.top, self.is_signed).to(codes.device)
        return table.index_select(0, codes.int().flatten()).view(codes.shape)


def _codes_below(mantissas: Tensor) -> Tensor:
    """int32 like `mantissas`, which are those of fp32: the code inside the octave, from 0.

    By a table of 256 parts of the octave: on a CPU `torch.bucketize` takes several times as long.
    """
    parts = (mantissas >> _PART_BITS).flatten()
    found = _octave().to(mantissas.device).index_select(0, parts).view(mantissas.shape)
    return found.add_(mantissas).bitwise_right_shift_(_MANTISSA_BITS)


@cache
def _octave() -> Tensor:
    """int32 [256]: what is added to the mantissas in a part of an octave for their code to be above
    the mantissa's bits. At most one code begins in a part."""
    one, steps = 1 << _MANTISSA_BITS, range(1, _CODES_PER_OCTAVE)
    bounds = [math.ceil(one * (_sixteenths(2 * step) - 1)) for step in steps]
    first = [sum(bound <= start for bound in bounds) for start in range(0, one, 1 << _PART_BITS)]
    added = [code * one + one - [*bounds, one][code] for code in first]
    return torch.tensor(added, dtype=torch.int32)


@cache
def _log_table(top: int, is_signed: bool) -> Tensor:
    """fp32 [256] or less: decoded value of each code of `_LogBlocks`, divided by 2^e."""
    magnitudes = [0.0]
    for code in range(1, top + 1):
        octave, step = divmod(code - top + _CODES_PER_OCTAVE - 1, _CODES_PER_OCTAVE)
        magnitudes.append(math.ldexp(_sixteenths(2 * step + 1), octave))
    negative = [-magnitude for magnitude in magnitudes] if is_signed else []
    return torch.tensor(magnitudes + negative, dtype=torch.float32)


def _sixteenths(count: int) -> float:
    """2^(count / 16), by roots and products that all machines round equally, unlike `pow`."""
    root, power = math.sqrt(math.sqrt(math.sqrt(math.sqrt(2.0)))), 1.0
    for _ in range(count):
        power *= root
    return power


def power_of_two(exponents: Tensor) -> Tensor:
    """fp32 powers of two of biased exponents: 0 for 0, infinity for 255."""
    return (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def aligned(nbytes: int) -> int:
    """Round up to a size at which other encodings may follow."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slabs(start: int, stop: int, step: int) -> list[slice]:
    """Split a range into slices of `step`; the last one may be shorter."""
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def longest(parts: list[slice]) -> int:
    """The most values of a slab; 0 if there are none."""
    return max((part.stop - part.start for part in parts), default=0)


def _bagged(numel: int) -> int:
    return -(-numel // _BAG) * _BAG


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Sum fp32 [rows, n] to [n], row after row from zeros, in a number of launches that does not
    depend on the rows.

    Args:
        rows: contiguous; n is a multiple of `_BAG`.
    """
    # No reduction has this order on all devices. On a GPU a thread of `embedding_bag` adds the
    # entries of a bag in a loop, and so does a CPU.
    num_rows, num_bags = len(rows), rows.shape[1] // _BAG
    entries = torch.arange(num_rows * num_bags, device=rows.device).view(num_rows, num_bags)
    bags = rows.view(-1, _BAG)
    return torch.nn.functional.embedding_bag(entries.t(), bags, mode="sum").flatten()


BF16: Codec = _BFloat16()
INT8: Codec = _Blocks(constants.INT8, 256, 127, torch.float32, spare_bits=8, values_per_byte=1)
INT4: Codec = _Blocks(constants.INT4, 128, 7, torch.bfloat16, spare_bits=16, values_per_byte=2)
LOG8: Codec = _LogBlocks("log8", top=127, is_signed=True)
ULOG8: Codec = _LogBlocks("ulog8", top=255, is_signed=False)
