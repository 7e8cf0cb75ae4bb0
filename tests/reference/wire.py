"""Sums over encoded wires in NumPy, block by block: the reference for the wires of `comm`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

F32 = np.float32
LOGARITHMIC = {"log8": 127, "ulog8": 255}  # the largest code
BLOCKS = {"int8": (256, 127, 16), "int4": (128, 7, 8)}  # values, largest code, bits of a scale
COARSE = {"int2": 1024, "ternary": 256, "sign": 512, "int2 of 64": 64}  # values of a block
SPARSE = "top64"  # the largest of blocks, encoded as "int2 of 64"; sums are not encoded
SPARSE_BLOCK, SPARSE_SHARE = 4096, 64  # of so many values one is kept
RESIDUAL_DECAY = {SPARSE: F32(0.95)}


def quantised(values: Any, name: str) -> Any:
    """Return fp32 values [n] after encoding and decoding, computed from the codec's definition."""
    if name == "fp32":
        return values.copy()
    if name in LOGARITHMIC:
        return _powers(values, name)
    if name == "bf16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)
    if name == SPARSE:
        out, places = np.zeros_like(values), largest_places(values)
        for first in range(0, len(places), SPARSE_SHARE):
            kept = places[first : first + SPARSE_SHARE]
            out[kept] = _levels(values[kept], "int2 of 64")
            if np.isnan(out[kept]).any():
                start = kept[0] // SPARSE_BLOCK * SPARSE_BLOCK
                out[start : start + SPARSE_BLOCK] = np.nan
        return out
    if name in COARSE:
        size = COARSE[name]
        blocks = [_levels(values[i : i + size], name) for i in range(0, len(values), size)]
        return np.concatenate([values[:0], *blocks])
    size, top, bits = BLOCKS[name]
    out = np.zeros_like(values)
    for first in range(0, len(values), size):
        block = values[first : first + size]
        mantissa, exponent = np.frexp(np.abs(block).max() / F32(top))
        scale = F32(np.ldexp(np.floor(np.ldexp(mantissa, bits)), int(exponent) - bits))
        if scale > 2.0**-120:
            out[first : first + size] = np.rint(block * (F32(1) / scale)) * scale
    return out


def _powers(values: Any, name: str) -> Any:
    """Return values rounded to eighths of an octave, by float64 logarithms and powers of two."""
    largest_code, out = LOGARITHMIC[name], np.zeros_like(values)
    for first in range(0, len(values), 256):
        block = values[first : first + 256].astype(np.float64)
        if not block.any():
            continue
        least = -126 + -(-largest_code // 8)
        top = max(np.floor(np.log2(np.abs(block).max())), least)
        is_stored = np.abs(block) > 0 if name == "log8" else block > 0
        eighth = np.floor(8 * np.log2(np.where(is_stored, np.abs(block), 1.0))) - 8 * top
        code = np.minimum(eighth + largest_code - 7, largest_code)
        is_stored &= (code >= 1) | (name == "ulog8")
        code = np.maximum(code, 1)
        power = 2.0 ** (top + (code - largest_code + 7.5) / 8)
        out[first : first + 256] = np.where(is_stored, np.sign(block) * power, 0.0).astype(F32)
    return out


def largest_places(values: Any) -> Any:
    """Return the places of the values that are kept, ascending; of equal ones the first."""
    places: list[int] = []
    for first in range(0, len(values), SPARSE_BLOCK):
        sizes = np.abs(values[first : first + SPARSE_BLOCK])
        sizes = np.where(np.isfinite(sizes), sizes, np.inf)
        order = np.argsort(-sizes, kind="stable")[: -(-len(sizes) // SPARSE_SHARE)]
        places += sorted(first + order)
    return np.array(places, np.int64)


def sparse_bytes(values: Any) -> bytes:
    """Return the encoding of finite values: scales, codes, zeros, indices, zeros."""
    places = largest_places(values)
    scales: list[Any] = []
    negative, large, index = (np.zeros(len(places), np.int64) for _ in range(3))
    for first in range(0, len(places), SPARSE_SHARE):
        own = slice(first, first + SPARSE_SHARE)
        low, high, is_large = _statistics(values[places[own]], "int2 of 64")
        scales += [low, high]
        if high > 0:
            negative[own], large[own] = values[places[own]] < 0, is_large
            index[own] = places[own] % SPARSE_BLOCK
    halves = (np.array(scales, F32).view(np.uint32) >> 16).astype("<u2").tobytes()
    codes = coarse_codes(negative, large, "int2 of 64")
    pairs = np.pad(index, (0, len(index) % 2)).reshape(-1, 2).tolist()
    words = b"".join((one + 4096 * two).to_bytes(3, "little") for one, two in pairs)
    return _to_multiple_of_4(_to_multiple_of_4(halves + codes) + words)


def _to_multiple_of_4(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _levels(block: Any, name: str) -> Any:
    """Return the values of a block, rounded to at most four levels."""
    low, high, is_large = _statistics(block, name)
    out = np.where(is_large, high, low)
    return np.where(block < 0, -out, out).astype(F32)


def _statistics(block: Any, name: str) -> tuple[Any, Any, Any]:
    """Return both scales of a block, and which values are large, by integer arithmetic."""
    largest = float(np.abs(block).max())
    if not np.isfinite(largest):
        return F32(np.nan), F32(np.nan), np.ones(len(block), bool)
    if largest < 2.0**-100:
        return F32(0), F32(0), np.zeros(len(block), bool)
    unit = COARSE[name] * 2.0 ** (np.frexp(largest)[1] - 24)
    sizes = [math.floor(abs(float(value)) / unit) for value in block]
    total, number = sum(sizes), len(sizes)
    is_large = [name == "sign" or size * number >= total for size in sizes]
    high = _mean([size for size, large in zip(sizes, is_large, strict=True) if large], unit)
    low = F32(0)
    if name.startswith("int2"):
        low = _mean([size for size, large in zip(sizes, is_large, strict=True) if not large], unit)
    return low, high, np.array(is_large)


def _mean(sizes: list[int], unit: float) -> Any:
    """Return their fp32 mean times the unit, without the last 16 bits; 0 where there are none."""
    mean = F32(sum(sizes)) / F32(max(len(sizes), 1)) * F32(unit)
    return (np.asarray(mean).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def coarse_codes(negative: Any, large: Any, name: str) -> bytes:
    """Return the packed codes of n values.

    Args:
        negative: bool [n], whether a value is negative, in a block that is not sent as zeros.
        large: bool [n], whether a value is sent as the larger level of its block.
        name: of the codec.
    """
    kind = name.split()[0]
    base, per_byte = {"int2": (4, 4), "ternary": (3, 5), "sign": (2, 8)}[kind]
    digits = {
        "int2": large + 2 * negative,
        "ternary": large * (1 - 2 * negative),
        "sign": 1 * negative,
    }[kind]
    group, packed = COARSE[name] * per_byte, bytearray()
    for first in range(0, len(digits), group):
        part = [int(digit) for digit in digits[first : first + group]]
        width = -(-len(part) // per_byte)
        for byte in range(width):
            packed.append(sum(d * base**k for k, d in enumerate(part[byte::width])) % 256)
    return bytes(packed)


def chunk_slices(total: int, size: int, name: str) -> list[slice]:
    """Return the chunk of each rank whose sum it encodes."""
    if name == SPARSE:
        return [slice(0, 0)] * size
    chunk, block = -(-total // size), _block(name)
    if chunk > block:
        chunk = -(-chunk // block) * block
    return [slice(min(i * chunk, total), min((i + 1) * chunk, total)) for i in range(size)]


def _block(name: str) -> int:
    """Return how many values share a scale."""
    if name in COARSE:
        return COARSE[name]
    return 256 if name in LOGARITHMIC else BLOCKS.get(name, (1,))[0]


@dataclass
class Residuals:
    """Residuals of all replicas: of their addends, and of the sum (each rank owns a chunk)."""

    sent: list[Any]
    summed: Any

    @classmethod
    def zeros(cls, size: int, numel: int) -> Residuals:
        """Return zero residuals."""
        return cls([np.zeros(numel, F32) for _ in range(size)], np.zeros(numel, F32))


@dataclass
class AllReduce:
    """One all-reduce of the addends of all replicas.

    Attributes:
        addends: fp32 [n] of every replica.
        left_out: replicas that contribute zeros.
    """

    addends: list[Any]
    left_out: set[int] = field(default_factory=set)

    def sum(self, name: str, residuals: Residuals | None) -> Any:
        """Return the sum that every replica receives, fp32 [n]. Updates `residuals` in place."""
        chunks = chunk_slices(len(self.addends[0]), len(self.addends), name)
        if name == SPARSE:
            chunks = [slice(0, len(self.addends[0]))]
        total = np.zeros_like(self.addends[0])
        for replica, addend in enumerate(self.addends):
            if replica not in self.left_out:
                rest = None if residuals is None else residuals.sent[replica]
                total += _send(addend, rest, name, chunks)
        if name == SPARSE:
            return total
        return _send(total, None if residuals is None else residuals.summed, name, chunks)


def _send(values: Any, rest: Any, name: str, chunks: list[slice]) -> Any:
    corrected = values if rest is None else values + RESIDUAL_DECAY.get(name, F32(1)) * rest
    sent = np.concatenate([quantised(corrected[chunk], name) for chunk in chunks])
    if rest is not None:
        rest[:] = corrected - sent
    return sent
