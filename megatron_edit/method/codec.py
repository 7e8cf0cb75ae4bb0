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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

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
_MANTISSA = (1 << 23) - 1  # of fp32 bits
_SMALLEST_SCALE = 2.0**-120  # far from subnormals, which some devices flush; less becomes 0


class Codec(Protocol):
    """Encodes fp32 numbers to bytes and decodes them.

    Scratch: 4 bytes for each of at most 262144 values on the CPU, of 2^24 elsewhere; up to 16 bytes
    for codecs of 2 bits per value and less.
    """

    @property
    def name(self) -> str:
        """Name in settings and messages."""

    @property
    def has_residual(self) -> bool:
        """Whether it is so coarse that it needs error feedback."""

    @property
    def encodes_sums(self) -> bool:
        """Whether sums of decoded values are encoded, too; else every rank gets all addends."""

    @property
    def block_numel(self) -> int:
        """Values that share a scale; a split inside a block needs one more scale."""

    def encoded_bytes(self, numel: int) -> int:
        """Size of `numel` encoded values in bytes, a multiple of 4."""

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Encode values, with error feedback where a residual is given.

        Mutates: `out`; and `residual`, which becomes residual + values - decoded values. (TOP64
        first multiplies it by its `residual_decay`.)

        Args:
            values: fp32 [n], contiguous.
            residual: fp32 [n] on the same device, added to the values before they are encoded.
            out: uint8 [encoded_bytes(n)] at a multiple of 4 bytes; None allocates one.

        Returns:
            `out`.
        """

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode to fp32, the inverse of `encode` up to its rounding.

        Mutates: `out`.

        Args:
            data: uint8 [encoded_bytes(n)] at a multiple of 4 bytes.
            out: fp32 [n], contiguous.
        """

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        """Add the decoded values to `total`, with the rounding of the sum only.

        Mutates: `total`.
        """


@dataclass(frozen=True)
class _BFloat16:
    """The upper half of the fp32 bits, rounded to even; beyond 3.39e38 it is infinity."""

    name: str = constants.BF16
    has_residual: bool = False
    encodes_sums: bool = True
    block_numel: int = 1

    def encoded_bytes(self, numel: int) -> int:
        return aligned(2 * numel)

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        data = target(self, values, out)
        numel = values.numel()
        halves = data[: 2 * numel].view(torch.bfloat16)
        if residual is None:
            halves.copy_(values)
        else:
            scratch = _scratch(values)
            for where in slabs(0, numel, slab_numel(values)):
                rest, sent = residual[where].add_(values[where]), halves[where]
                rest.sub_(scratch[: sent.numel()].copy_(sent.copy_(rest)))
        return padded(data, 2 * numel)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data[: 2 * out.numel()].view(torch.bfloat16))

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        halves, scratch = data[: 2 * total.numel()].view(torch.bfloat16), _scratch(total)
        for where in slabs(0, total.numel(), slab_numel(total)):
            part = halves[where]
            total[where].add_(scratch[: part.numel()].copy_(part))


@dataclass(frozen=True)
class _Blocks:
    """Symmetric integers -top..top, in blocks that share a scale.

    Bytes: the scales of all blocks, then the codes of all blocks, then zeros up to a multiple of 4.
    The last block may be short. Where two values share a byte, they are value i of the first half
    of a block and value i of its second half: byte = first + 16 second, as a signed number.

    Attributes:
        name: in settings.
        block_numel: values that share a scale.
        top: largest code.
        scale_dtype: how scales are stored.
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

    def encoded_bytes(self, numel: int) -> int:
        return aligned(self._scale_bytes(numel) + self._code_bytes(numel))

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        data = target(self, values, out)
        numel, scratch = values.numel(), _scratch(values)
        for where, scales, codes in self._parts(data, values):
            part = values[where] if residual is None else residual[where].add_(values[where])
            rows = part.view(len(scales), -1)
            work = scratch[: part.numel()].view_as(rows)
            scale = self._scale(torch.abs(rows, out=work).amax(dim=1, keepdim=True))
            scales.copy_(scale)
            inverse = scale.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)  # zeros stay zeros
            rounded = torch.mul(rows, inverse, out=work).round_()
            if residual is not None:
                rows.addcmul_(rounded, scale, value=-1.0)
            self._pack(rounded, codes)
        return padded(data, self._scale_bytes(numel) + self._code_bytes(numel))

    def decode(self, data: Tensor, out: Tensor) -> None:
        for where, scales, codes in self._parts(data, out):
            rows = out[where].view(len(scales), -1)
            self._unpack(codes, rows)
            rows.mul_(scales.float())

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        scratch = _scratch(total)
        for where, scales, codes in self._parts(data, total):
            rows = total[where].view(len(scales), -1)
            work = scratch[: rows.numel()].view_as(rows)
            self._unpack(codes, work)
            rows.addcmul_(work, scales.float())

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel) * int(self.scale_dtype.itemsize)

    def _code_bytes(self, numel: int) -> int:
        """Bytes of codes; the last block begins at a byte boundary."""
        full, rest = divmod(numel, self.block_numel)
        return full * (self.block_numel // self.values_per_byte) + -(-rest // self.values_per_byte)

    def _parts(self, data: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slabs of whole blocks, then the short last block if there is one.

        Yields:
            Which values; their scales [rows, 1], stored; their codes, int8 [rows, bytes].
        """
        numel, block = values.numel(), self.block_numel
        whole = numel // block * block
        scales = data[: self._scale_bytes(numel)].view(self.scale_dtype)
        codes = data[self._scale_bytes(numel) :].view(torch.int8)
        last = [slice(whole, numel)] if whole < numel else []
        for where in (*slabs(0, whole, slab_numel(values)), *last):
            rows = scales[where.start // block : -(-where.stop // block)].unsqueeze(1)
            held = codes[self._code_bytes(where.start) : self._code_bytes(where.stop)]
            yield where, rows, held.view(len(rows), -1)

    def _scale(self, largest: Tensor) -> Tensor:
        """fp32 scales: 0 for a block of zeros, not finite for a block that is not finite.

        Args:
            largest: fp32 [rows, 1], largest magnitude of each block.
        """
        scale = largest / self.top
        scale.view(torch.int32).bitwise_and_(-1 << self.spare_bits)
        return torch.nn.functional.threshold_(scale, _SMALLEST_SCALE, 0.0)

    def _pack(self, rounded: Tensor, codes: Tensor) -> None:
        """Pack integers, fp32 [rows, values], into int8 [rows, bytes]. Mutates both."""
        if self.values_per_byte == 2:
            half = codes.shape[1]
            second = rounded[:, half:]
            rounded[:, : second.shape[1]].add_(second, alpha=16.0)
            rounded = rounded[:, :half]
        codes.copy_(rounded)

    def _unpack(self, codes: Tensor, out: Tensor) -> None:
        """Inverse of `_pack`. Mutates `out`."""
        if self.values_per_byte == 1:
            out.copy_(codes)
            return
        half = codes.shape[1]
        seconds = (codes + 8) >> 4  # the first value is -7..7: it never carries
        first, second = out[:, :half], out[:, half:]
        second.copy_(seconds[:, : second.shape[1]])
        first.copy_(codes - (seconds << 4))


@dataclass(frozen=True)
class _LogBlocks:
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
        name: in messages.
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

    def encoded_bytes(self, numel: int) -> int:
        return aligned(self._exponent_bytes(numel) + numel)

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert residual is None, f"{self.name} has no error feedback"
        data = target(self, values, out)
        bounds = _bounds().to(values.device)
        for where, exponents, codes in self._parts(data, values):
            rows = values[where].view(len(exponents), -1)
            bits = rows.abs().view(torch.int32)  # they order as the magnitudes do
            largest = bits.amax(dim=1, keepdim=True)
            exponent = (largest >> 23).clamp_(min=self._least_exponent)
            exponents.copy_(exponent * (largest > 0))
            if not self.is_signed:
                bits.masked_fill_(rows < 0, 0)
            code = (bits >> 23).sub_(exponent).mul_(_CODES_PER_OCTAVE)
            code += torch.bucketize(bits & _MANTISSA, bounds, out_int32=True, right=True)
            code += self.top - _CODES_PER_OCTAVE + 1
            code.clamp_(min=0 if self.is_signed else 1, max=self.top)
            if self.is_signed:
                code += ((rows < 0) & (code > 0)) * _SIGN
            else:
                code.masked_fill_(bits == 0, 0)
            codes.copy_(code)
        return padded(data, self._exponent_bytes(values.numel()) + values.numel())

    def decode(self, data: Tensor, out: Tensor) -> None:
        for where, exponents, codes in self._parts(data, out):
            rows = out[where].view(len(exponents), -1)
            rows.copy_(self._unscaled(codes)).mul_(_power_of_two(exponents))

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        for where, exponents, codes in self._parts(data, total):
            rows = total[where].view(len(exponents), -1)
            rows.add_(self._unscaled(codes).mul_(_power_of_two(exponents)))

    def _exponent_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel)

    @property
    def _least_exponent(self) -> int:
        """Smallest biased exponent at which code 1 is a normal number, which no device flushes."""
        return 1 + -(-self.top // _CODES_PER_OCTAVE)

    def _parts(self, data: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slabs of whole blocks, then the short last block if there is one.

        Yields:
            Which values; their exponents [rows, 1], stored; their codes, uint8 [rows, values].
        """
        numel, block = values.numel(), self.block_numel
        whole = numel // block * block
        codes = data[self._exponent_bytes(numel) :]
        last = [slice(whole, numel)] if whole < numel else []
        for where in (*slabs(0, whole, slab_numel(values)), *last):
            exponents = data[where.start // block : -(-where.stop // block)].unsqueeze(1)
            yield where, exponents, codes[where].view(len(exponents), -1)

    def _unscaled(self, codes: Tensor) -> Tensor:
        """fp32 [rows, values]: decoded codes, divided by 2^e of their block."""
        table = _log_table(self.top, self.is_signed).to(codes.device)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _bounds() -> Tensor:
    """int32 [7]: fp32 mantissas at which codes inside an octave begin; the first begins at 0."""
    steps = range(1, _CODES_PER_OCTAVE)
    return torch.tensor(
        [math.ceil(math.ldexp(_sixteenths(2 * step), 23)) - (1 << 23) for step in steps],
        dtype=torch.int32,
    )


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


def _power_of_two(exponents: Tensor) -> Tensor:
    """fp32 [rows, 1], 2 to the power of biased exponents: 0 for 0, infinity for 255."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def aligned(nbytes: int) -> int:
    """Round up to a size at which other encodings may follow."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def slab_numel(values: Tensor) -> int:
    """Values that are encoded or decoded together."""
    return _SLAB_NUMEL.get(values.device.type, _SLAB_NUMEL_ELSEWHERE)


def slabs(start: int, stop: int, step: int) -> list[slice]:
    """Split a range into slices of `step`; the last one may be shorter."""
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _scratch(values: Tensor) -> Tensor:
    numel = min(values.numel(), slab_numel(values))
    return torch.empty(numel, dtype=torch.float32, device=values.device)


def padded(data: Tensor, used: int) -> Tensor:
    """Zero the bytes after the codes, so that equal values have equal bytes."""
    if used < data.numel():
        data[used:].zero_()
    return data


def target(codec: Codec, values: Tensor, out: Tensor | None) -> Tensor:
    """Return the output of `encode`, after checking the arguments."""
    assert values.dtype == torch.float32 and values.dim() == 1, (values.dtype, values.shape)
    size = codec.encoded_bytes(values.numel())
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=values.device)
    assert out.shape == (size,), f"{codec.name}: {tuple(out.shape)} bytes for {size}"
    return out


BF16: Codec = _BFloat16()
INT8: Codec = _Blocks(constants.INT8, 256, 127, torch.float32, spare_bits=8, values_per_byte=1)
INT4: Codec = _Blocks(constants.INT4, 128, 7, torch.bfloat16, spare_bits=16, values_per_byte=2)
LOG8: Codec = _LogBlocks("log8", top=127, is_signed=True)
ULOG8: Codec = _LogBlocks("ulog8", top=255, is_signed=False)
