"""Codecs of 2 bits per value and less: two to four levels, which are means of magnitudes.

    INT2     2 bits per value, two bf16 scales for every 1024: levels -b, -a, a, b
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

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit import constants
from megatron_edit.method.codec import Codec, longest, power_of_two

_EXACT_BITS = 24  # fp32 holds all integers up to 2^24
_BIAS = 127  # of fp32 exponents
_MANTISSA_BITS = 23  # of fp32
_LEAST_EXPONENT = _BIAS - 100  # biased; blocks of smaller magnitudes are zeros
_NOT_FINITE = 255  # biased exponent of NaN and infinity
_BF16_BYTES = 2
_DROPPED_BITS = 16  # of fp32, to make it bf16


@dataclass(frozen=True)
class _Levels(Codec):
    """Two to four levels, in blocks that share scales.

    Bytes: the scales of all blocks (of INT2: a, then b, of each block); then the codes, several to
    a byte, the first one as the last digit; then zeros up to a multiple of 4. A group is as many
    blocks as a byte holds codes: byte i of a group holds the codes of value i of each of its
    blocks. The last group may be short: of n values it has w = ceil(n / values_per_byte) bytes, and
    byte i holds the codes of its values i, i + w, i + 2 w, ...

    Attributes:
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
    encodes_sums: bool = True

    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        scales, codes = self._sections(data, numel, where)
        blocks = self._blocks(part, scales.shape[1])
        magnitudes, large = (each[: blocks.numel()].view(blocks.shape) for each in scratch)
        unit, exponent = self._magnitudes(blocks, magnitudes)
        means = self._means(magnitudes, large, self._count(part, blocks)).mul_(unit)
        means.masked_fill_(exponent == _NOT_FINITE, torch.nan)
        means.view(torch.int32).bitwise_and_(-1 << _DROPPED_BITS)
        scales.copy_(means)
        negative = magnitudes
        if self.base == 3:
            large.copysign_(blocks)
        else:
            limit = torch.zeros_like(unit).masked_fill_(exponent < _LEAST_EXPONENT, -torch.inf)
            torch.lt(blocks, limit, out=negative)
        self._pack(large, negative, part.shape[1], codes)
        if has_residual:
            self._add_levels(blocks, means, large, negative, factor=-1.0)
            self._copy_back(blocks, part)

    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        scales, codes = self._sections(data, numel, where)
        blocks = self._blocks(out if adds else out.zero_(), scales.shape[1])
        digits = self._unpack(codes, scratch)
        large, negative = (self._blocks(each, scales.shape[1]) for each in digits)
        self._add_levels(blocks, scales.float(), large, negative, factor=1.0)
        self._copy_back(blocks, out)

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_numel) * self.num_scales * _BF16_BYTES

    def used_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + -(-numel // self.values_per_byte)

    def _sections(self, data: Tensor, numel: int, where: slice) -> tuple[Tensor, Tensor]:
        """Scales of a part, bf16 [rows, blocks, num_scales]; its codes, uint8 [rows, groups, w]."""
        first, stop = where.start // self.block_numel, -(-where.stop // self.block_numel)
        scales = data[:, : self._scale_bytes(numel)].view(torch.bfloat16)
        scales = scales[:, first * self.num_scales : stop * self.num_scales]
        begin, end = (-(-edge // self.values_per_byte) for edge in (where.start, where.stop))
        codes = data[:, self._scale_bytes(numel) :][:, begin:end]
        groups = max((where.stop - where.start) // self.unit, 1)
        return scales.unflatten(1, (stop - first, -1)), codes.unflatten(1, (groups, -1))

    @property
    def unit(self) -> int:
        """Values of a group."""
        return self.block_numel * self.values_per_byte

    def scratch(self, data: Tensor, parts: list[slice], *, decodes: bool) -> list[Tensor]:
        """Two, each with one number more per byte than a part has values."""
        numel = len(data) * -(-longest(parts) // self.unit) * (self.unit + self.block_numel)
        return [torch.empty(numel, dtype=torch.float32, device=data.device) for _ in range(2)]

    def _blocks(self, values: Tensor, num_blocks: int) -> Tensor:
        """Values [rows, n] as [rows, num_blocks, block_numel]; where the size differs, a copy,
        padded by zeros."""
        if missing := num_blocks * self.block_numel - values.shape[1]:
            values = torch.nn.functional.pad(values, (0, missing))  # cuts if negative
        return values.unflatten(1, (num_blocks, self.block_numel))

    def _copy_back(self, blocks: Tensor, values: Tensor) -> None:
        """Copy what `_blocks` made of values back, if it is a copy."""
        if blocks.numel() != values.numel():
            values.copy_(blocks.flatten(1)[:, : values.shape[1]])

    def _count(self, values: Tensor, blocks: Tensor) -> Tensor | float:
        """How many values a block has, of values in `blocks`."""
        short = values.shape[1] % self.block_numel
        if not short:
            return float(self.block_numel)
        count = blocks.new_full((blocks.shape[1], 1), self.block_numel)
        count[-1:].fill_(short)
        return count

    def _magnitudes(self, blocks: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes as integers.

        Mutates: `out`, fp32 like `blocks`, which becomes them.

        Returns:
            Their unit; biased exponents of the largest.
        """
        exponent = torch.abs(blocks, out=out).amax(dim=2, keepdim=True).view(torch.int32)
        exponent >>= _MANTISSA_BITS
        shift = self.block_numel.bit_length() - _EXACT_BITS
        unit = (exponent + shift).clamp_(min=1)
        inverse = (2 * _BIAS - unit).mul_(exponent >= _LEAST_EXPONENT)
        out.mul_(power_of_two(inverse)).floor_()
        return power_of_two(unit), exponent

    def _means(self, magnitudes: Tensor, large: Tensor, count: Tensor | float) -> Tensor:
        """Means that become scales, [rows, blocks, num_scales].

        Mutates: if there are several levels, `large`, which becomes 1 for large values and else 0,
        and `magnitudes`, which become 0 for others.
        """
        total = magnitudes.sum(dim=2, keepdim=True)
        if self.base == 2:
            return total / count
        # Exact as a comparison of integers: of B addends below 2^24 / B, no quotient that is
        # not an integer is rounded to one.
        torch.ge(magnitudes, (total / count).clamp_(min=1.0), out=large)
        large_total = magnitudes.mul_(large).sum(dim=2, keepdim=True)
        number = large.sum(dim=2, keepdim=True)
        high = large_total / number.clamp(min=1.0)
        if self.num_scales == 1:
            return high
        low = (total - large_total) / (count - number).clamp_(min=1.0)
        return torch.cat((low, high), dim=2)

    def _add_levels(
        self, blocks: Tensor, scales: Tensor, large: Tensor, negative: Tensor, *, factor: float
    ) -> None:
        """Add the levels of codes. All products but one are zeros: only the sum is rounded.

        Mutates: `blocks`, `large`, `negative`.

        Args:
            blocks: fp32 [rows, blocks, block_numel], to add to.
            scales: fp32 [rows, blocks, num_scales].
            large: like `blocks`; for INT2 1 or 0, for TERNARY 1, -1 or 0.
            negative: like `blocks`; for INT2 and SIGN 1 or 0.
            factor: 1 or -1, multiplied to the levels.
        """
        if self.base == 3:
            blocks.addcmul_(large, scales, value=factor)
            return
        if self.base == 4:
            large.addcmul_(large, negative, value=-2.0)
        signs = torch.sub(torch.ones(()), negative, alpha=2.0, out=negative)
        if self.base == 4:
            blocks.addcmul_(large, scales[..., 1:], value=factor)
            signs.sub_(large)
        blocks.addcmul_(signs, scales[..., :1], value=factor)

    def _pack(self, large: Tensor, negative: Tensor, numel: int, codes: Tensor) -> None:
        """Pack digits.

        Mutates: `codes`.

        Args:
            large: of `_add_levels`.
            negative: of `_add_levels`.
            numel: how many values of a row there are, without padding.
            codes: uint8 [rows, groups, w].
        """
        packed = self._joined(negative if self.base == 2 else large, numel, codes)
        if self.base == 4:
            packed.add_(self._joined(negative, numel, codes), alpha=2.0)
        codes.copy_(packed.to(torch.int32))  # modulo 256

    def _joined(self, digits: Tensor, numel: int, codes: Tensor) -> Tensor:
        """Numbers whose digits are these, fp32 like `codes`."""
        digits, (_, groups, width) = digits.flatten(1)[:, :numel], codes.shape
        if missing := groups * width * self.values_per_byte - numel:
            digits = torch.nn.functional.pad(digits, (0, missing))
        *planes, joined = digits.unflatten(1, (groups, self.values_per_byte, width)).unbind(2)
        for plane in reversed(planes):
            joined = torch.add(plane, joined, alpha=self.base)
        return joined

    def _unpack(self, codes: Tensor, scratch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Inverse of `_pack`.

        Args:
            codes: uint8 [rows, groups, w].
            scratch: mutated; the digits are in it.

        Returns:
            fp32 [rows, values]: `large` and `negative` of `_add_levels`.
        """
        rows, groups, width = codes.shape
        shape, size = (rows, groups, self.values_per_byte, width), self.values_per_byte
        numel = codes.numel() * size
        powers = torch.full((size + 1, 1), 1.0 / self.base, device=codes.device)
        powers = powers.cumprod(0).mul_(self.base)  # of 1 / base, from 1 on
        quotients = scratch[0][: numel + codes.numel()].view(rows, groups, size + 1, width)
        digits, negative = scratch[1][:numel], scratch[0][:numel]
        if self.base == 3:
            numbers = codes.view(torch.int8).float().unsqueeze(2)
            torch.mul(numbers, powers, out=quotients).round_()  # the digits are -1, 0 and 1
        else:
            torch.mul(codes.float().unsqueeze(2), powers, out=quotients).floor_()
        planes = digits.view(shape)
        torch.sub(quotients[:, :, :-1], quotients[:, :, 1:], alpha=self.base, out=planes)
        if self.base == 4:
            digits.sub_(torch.ge(digits, 2.0, out=negative), alpha=2.0)
        digits = digits.view(rows, -1)
        return digits, digits if self.base == 2 else negative.view(rows, -1)


INT2: Codec = _Levels(constants.INT2, 1024, base=4, values_per_byte=4, num_scales=2)
INT2_OF_64: Codec = _Levels("int2 of 64", 64, base=4, values_per_byte=4, num_scales=2)
TERNARY: Codec = _Levels(constants.TERNARY, 256, base=3, values_per_byte=5)
SIGN: Codec = _Levels(constants.SIGN, 512, base=2, values_per_byte=8)
