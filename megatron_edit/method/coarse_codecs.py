"""Codecs of 2 bits per value and less: two to four levels, which are means of magnitudes.

    INT2     2 bits per value, two bf16 scales for every 256: levels -b, -a, a, b
    TERNARY  1.6 bits per value, a bf16 scale for every 256: levels -b, 0, b
    SIGN     1 bit per value, a bf16 scale for every 512: levels -b, b

INT2 and TERNARY: a value is large if its magnitude is at least the mean magnitude of its block. b
is the mean magnitude of the large values and a that of the others. SIGN: b is the mean magnitude of
all values. Equally spaced levels of so few bits would leave out most of a block with one large
value.

Means are taken of integers: magnitudes in units of 2^-24 x the values of a full block x the power
of two above the largest magnitude, rounded down. Their sums are below 2^24, thus exact in fp32
in any order: a block has the same bytes on every device, the sums of the largest fp32 values do not
overflow, and of equal magnitudes all are large. Scales are truncated to bf16, so that code x scale
is exact, and the same bytes decode to the same bits on every machine. Decoded values of TERNARY and
SIGN encode to themselves. Blocks without a magnitude of 2^-100 or more are zeros.

The residual is value - decoded, rounded once. It is exact for values that are sent as zero and for
magnitudes from half their scale on; for smaller ones the error is at most 2^-24 x the scale.

Non-finite input: as in `codec.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_edit import constants
from megatron_edit.method.codec import Codec, aligned, padded, slab_numel, slabs, target

_EXACT_BITS = 24  # fp32 holds all integers up to 2^24
_BIAS = 127  # of fp32 exponents
_MANTISSA_BITS = 23  # of fp32
_LEAST_EXPONENT = _BIAS - 100  # biased; blocks of smaller magnitudes are zeros
_NOT_FINITE = 255  # biased exponent of NaN and infinity
_BF16_BYTES = 2
_DROPPED_BITS = 16  # of fp32, to make it bf16


@dataclass(frozen=True)
class _Levels:
    """Two to four levels, in blocks that share scales.

    Bytes: the scales of all blocks (of INT2: a, then b, of each block); then the codes, several to
    a byte, the first one as the last digit; then zeros up to a multiple of 4. A group is as many
    blocks as a byte holds codes: byte i of a group holds the codes of value i of each of its
    blocks. The last group may be short: of n values it has w = ceil(n / values_per_byte) bytes, and
    byte i holds the codes of its values i, i + w, i + 2 w, ...

    Attributes:
        name: in settings.
        block_numel: values that share scales; a power of two.
        base: of the digits that are the codes.
        values_per_byte: codes in a byte.
        num_scales: of a block.
    """

    name: str
    block_numel: int
    base: int
    values_per_byte: int
    num_scales: int = 1
    has_residual: bool = True

    def encoded_bytes(self, numel: int) -> int:
        return aligned(self._used_bytes(numel))

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        data = target(self, values, out)
        for where, scales, codes in self._parts(data, values):
            part = values[where] if residual is None else residual[where].add_(values[where])
            rows, count = self._rows(part)
            magnitudes, unit, exponent = self._magnitudes(rows)
            means, large = self._means(magnitudes, count)
            means = (means * unit).masked_fill_(exponent == _NOT_FINITE, torch.nan)
            means.view(torch.int32).bitwise_and_(-1 << _DROPPED_BITS)
            scales.copy_(means)
            is_zero = exponent < _LEAST_EXPONENT
            digits, sent = self._coded(rows, large, means, is_zero, magnitudes)
            if residual is not None:
                part.sub_(sent.flatten()[: part.numel()])
            self._pack(digits.flatten()[: part.numel()], codes)
        return padded(data, self._used_bytes(values.numel()))

    def decode(self, data: Tensor, out: Tensor) -> None:
        for where, scales, codes in self._parts(data, out):
            out[where].zero_()
            self._add(scales, codes, out[where])

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        for where, scales, codes in self._parts(data, total):
            self._add(scales, codes, total[where])

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel) * self.num_scales * _BF16_BYTES

    def _used_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + -(-numel // self.values_per_byte)

    def _parts(self, data: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slabs of whole groups, then the short last group if there is one.

        Yields:
            Which values; their scales, bf16 [blocks, num_scales]; their codes, uint8 [groups, w].
        """
        numel, group = values.numel(), self.block_numel * self.values_per_byte
        whole = numel // group * group
        scale_bytes = self._scale_bytes(numel)
        blocks = -(-numel // self.block_numel)
        scales = data[:scale_bytes].view(torch.bfloat16).view(blocks, self.num_scales)
        codes = data[scale_bytes:]
        step = max(slab_numel(values) // group, 1) * group
        last = [slice(whole, numel)] if whole < numel else []
        for where in (*slabs(0, whole, step), *last):
            rows = scales[where.start // self.block_numel : -(-where.stop // self.block_numel)]
            first, stop = (
                where.start // self.values_per_byte,
                -(-where.stop // self.values_per_byte),
            )
            groups = max((where.stop - where.start) // group, 1)
            yield where, rows, codes[first:stop].view(groups, -1)

    def _rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [blocks, block_numel], padded by zeros; and how many values a block has, fp32."""
        short = values.numel() % self.block_numel
        if short:
            values = torch.nn.functional.pad(values, (0, self.block_numel - short))
        rows = values.view(-1, self.block_numel)
        count = rows.new_full((len(rows), 1), self.block_numel)
        if short:
            count[-1:].fill_(short)
        return rows, count

    def _magnitudes(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Magnitudes as integers, fp32 like `rows`; their unit; biased exponents of the largest."""
        magnitudes = rows.abs()
        largest = magnitudes.amax(dim=1, keepdim=True)
        exponent = largest.view(torch.int32) >> _MANTISSA_BITS
        shift = self.block_numel.bit_length() - _EXACT_BITS
        unit = (exponent + shift).clamp_(min=1)
        inverse = (2 * _BIAS - unit).mul_(exponent >= _LEAST_EXPONENT)
        magnitudes.mul_(_power_of_two(inverse)).floor_()
        return magnitudes, _power_of_two(unit), exponent

    def _means(self, magnitudes: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """Means that become scales, [blocks, num_scales]; and which values are large: 1, else 0.

        Mutates: `magnitudes`, which are 0 afterwards where a value is not large.
        """
        total = magnitudes.sum(dim=1, keepdim=True)
        if self.base == 2:
            return total / count, None
        # Exact as a comparison of integers: of at most 256 addends below 2^16, no quotient that is
        # not an integer is rounded to one.
        threshold = (total / count).clamp_(min=1.0)
        large = torch.ge(magnitudes, threshold, out=torch.empty_like(magnitudes))
        large_total = magnitudes.mul_(large).sum(dim=1, keepdim=True)
        number = large.sum(dim=1, keepdim=True)
        high = large_total / number.clamp(min=1.0)
        if self.num_scales == 1:
            return high, large
        low = (total - large_total) / (count - number).clamp_(min=1.0)
        return torch.cat((low, high), dim=1), large

    def _coded(
        self, rows: Tensor, large: Tensor | None, scales: Tensor, is_zero: Tensor, scratch: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Codes, uint8 like `rows`, and what they decode to. Mutates `large` and `scratch`."""
        if self.base == 3:
            assert large is not None
            signs = large.copysign_(rows)
            digits = scratch.new_empty(rows.shape, dtype=torch.int8).copy_(signs)
            return digits.view(torch.uint8), torch.mul(signs, scales, out=scratch)
        limit = torch.zeros_like(scales[:, :1]).masked_fill_(is_zero, -torch.inf)
        negative = rows < limit
        digits = negative.view(torch.uint8)
        magnitude = scales
        if large is not None:
            is_large = large.bool()
            magnitude = torch.where(is_large, scales[:, 1:], scales[:, :1])
            digits = torch.add(is_large.view(torch.uint8), digits, alpha=2)
        return digits, torch.where(negative, -magnitude, magnitude)

    def _pack(self, digits: Tensor, codes: Tensor) -> None:
        """Pack digits, uint8 [values], into uint8 [groups, w]. Mutates `codes`."""
        missing = codes.numel() * self.values_per_byte - digits.numel()
        if missing:
            digits = torch.nn.functional.pad(digits, (0, missing))
        planes = digits.view(len(codes), self.values_per_byte, -1)
        packed = planes[:, -1]
        for place in reversed(range(self.values_per_byte - 1)):
            packed = torch.add(planes[:, place], packed, alpha=self.base)  # modulo 256
        codes.copy_(packed)

    def _add(self, scales: Tensor, codes: Tensor, total: Tensor) -> None:
        """Add decoded values to `total`: all products but one are zeros, so that only the sum is
        rounded. Mutates `total`."""
        numel, rows_numel = total.numel(), len(scales) * self.block_numel
        index = codes.flatten().int()
        tables = _tables(self.base, self.values_per_byte).to(codes.device)
        size = max(codes.numel() * self.values_per_byte, rows_numel)
        factors = torch.zeros(size, dtype=torch.float32, device=codes.device)
        planes = factors[: codes.numel() * self.values_per_byte]
        planes = planes.view(len(codes), self.values_per_byte, -1)
        rows = factors[:rows_numel].view(-1, self.block_numel)
        for scale, table in zip(scales.float().split(1, dim=1), tables, strict=True):
            for place in range(self.values_per_byte):
                planes[:, place] = table[place].index_select(0, index).view(codes.shape)
            if rows_numel == numel:
                total.view_as(rows).addcmul_(rows, scale)
            else:
                total.add_(rows.mul_(scale).flatten()[:numel])


@cache
def _tables(base: int, values_per_byte: int) -> Tensor:
    """fp32 [scales, values of a byte, 256]: by what a byte multiplies the scales of its values."""
    factors = {
        2: [[1.0, -1.0]],
        3: [[0.0, 1.0, -1.0]],
        4: [[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]],
    }[base]
    return torch.tensor(
        [
            [
                [of[_digit(byte, place, base)] for byte in range(256)]
                for place in range(values_per_byte)
            ]
            for of in factors
        ],
        dtype=torch.float32,
    )


def _digit(byte: int, place: int, base: int) -> int:
    """Digit of a byte; of base 3 modulo 3, as the digits are -1, 0 and 1."""
    if base != 3:
        return byte // int(base**place) % base
    largest = (3**5 - 1) // 2  # all digits 1
    return (((byte + 128) % 256 - 128 + largest) // int(3**place) % 3 + 2) % 3


def _power_of_two(exponents: Tensor) -> Tensor:
    """fp32 powers of two of biased exponents; 0 for 0."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)


INT2: Codec = _Levels(constants.INT2, 256, base=4, values_per_byte=4, num_scales=2)
TERNARY: Codec = _Levels(constants.TERNARY, 256, base=3, values_per_byte=5)
SIGN: Codec = _Levels(constants.SIGN, 512, base=2, values_per_byte=8)
