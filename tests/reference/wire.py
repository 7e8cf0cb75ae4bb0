"""Sums over encoded wires in NumPy, block by block: the reference for the wires of `comm`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

F32 = np.float32
LOGARITHMIC = {"log8": 127, "ulog8": 255}  # the largest code
BLOCKS = {"int8": (256, 127, 16), "int4": (128, 7, 8)}  # values, largest code, bits of a scale


def quantised(values: Any, name: str) -> Any:
    """Return fp32 values [n] after encoding and decoding, computed from the codec's definition."""
    if name == "fp32":
        return values.copy()
    if name in LOGARITHMIC:
        return _powers(values, name)
    if name == "bf16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)
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


def chunk_slices(total: int, size: int, name: str) -> list[slice]:
    """Return the chunk of each rank."""
    chunk, block = -(-total // size), BLOCKS.get(name, (256 if name in LOGARITHMIC else 1,))[0]
    if chunk > block:
        chunk = -(-chunk // block) * block
    return [slice(min(i * chunk, total), min((i + 1) * chunk, total)) for i in range(size)]


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
        total = np.zeros_like(self.addends[0])
        for replica, addend in enumerate(self.addends):
            if replica not in self.left_out:
                rest = None if residuals is None else residuals.sent[replica]
                total += _send(addend, rest, name, chunks)
        return _send(total, None if residuals is None else residuals.summed, name, chunks)


def _send(values: Any, rest: Any, name: str, chunks: list[slice]) -> Any:
    corrected = values if rest is None else values + rest
    sent = np.concatenate([quantised(corrected[chunk], name) for chunk in chunks])
    if rest is not None:
        rest[:] = corrected - sent
    return sent
