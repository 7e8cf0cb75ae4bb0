"""64-bit digests, which differ if tensors differ in any bit. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements hashed at once: bounds the scratch at 16 MiB
_MIX = 0x9E3779B97F4A7C15  # odd; golden-ratio constant of splitmix64
_MASK = (1 << 64) - 1


def tensor_digest(tensors: Iterable[Tensor]) -> Tensor:
    """Digest of fp32 tensors in order: an int64 scalar on their device.

    The sum of the bit patterns with odd, position-dependent factors modulo 2^64: it depends on the
    order, and any single changed element changes it. Does not block the host: the digest is read
    where digests are compared, which is never inside a forward pass.
    """
    total: Tensor | None = None
    start = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int32)
        for chunk in bits.split(_CHUNK):
            index = torch.arange(start, start + chunk.numel(), device=chunk.device)
            factors = (index * 2 + 1) * _signed(_MIX) | 1
            part = (chunk.to(torch.int64) * factors).sum()
            total = part if total is None else total + part
            start += chunk.numel()
    return torch.zeros((), dtype=torch.int64) if total is None else total


def combine(digests: Sequence[int]) -> int:
    """Combine several digests to one that depends on their order."""
    total = 0
    for digest in digests:
        total = (total * _MIX + digest + 1) & _MASK
        total ^= total >> 29
    return _signed(total)


def as_hex(digest: int) -> str:
    """Format a digest as sixteen hexadecimal digits."""
    return f"{digest & _MASK:016x}"


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
