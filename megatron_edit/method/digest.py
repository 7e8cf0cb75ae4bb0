"""64-bit digests, which differ if tensors differ in any bit, and the differences that rounding
explains. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

# Elements hashed at once: on the CPU so few that the scratch stays in a cache, elsewhere so many
# that few kernels are launched, with a scratch of 8 MiB.
_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 20
_MIX = 0x9E3779B97F4A7C15  # odd; golden-ratio constant of splitmix64
_MASK = (1 << 64) - 1
_SIGNED_MIX = _MIX - (1 << 64)  # the same bits as an int64


def tensor_digest(tensors: Iterable[Tensor]) -> Tensor:
    """Digest of fp32 tensors in order: an int64 scalar on their device.

    The sum of the bit patterns with odd, position-dependent factors modulo 2^64, (2 i + 1) `_MIX`
    of element i: it depends on the order, and any single changed element changes it. Does not block
    the host: the digest is read where digests are compared, which is never inside a forward pass.
    """
    total: Tensor | None = None
    start = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int32)
        size = _CPU_CHUNK if bits.device.type == "cpu" else _CHUNK
        for chunk in bits.split(size):
            values = chunk.to(torch.int64)
            plain = values.sum()
            part = values.mul_(_odd_numbers(size, bits.device)[: len(values)]).sum()
            part += plain * (2 * start)
            total = part if total is None else total + part
            start += len(values)
    return torch.zeros((), dtype=torch.int64) if total is None else total * _SIGNED_MIX


def combine(digests: Sequence[int]) -> int:
    """Combine several digests to one that depends on their order."""
    return combine_columns(torch.tensor(digests, dtype=torch.int64).unsqueeze(1))[0]


def combine_columns(rows: Tensor) -> list[int]:
    """Combine the digests of each column, int64 [n, columns], from the first row to the last."""
    total = np.zeros(rows.shape[1:], dtype=np.uint64)
    for row in rows.numpy().view(np.uint64):
        total = total * np.uint64(_MIX) + row + np.uint64(1)  # modulo 2^64
        total ^= total >> np.uint64(29)
    return list(total.view(np.int64).tolist())


def as_hex(digest: int) -> str:
    """Format a digest as sixteen hexadecimal digits."""
    return f"{digest & _MASK:016x}"


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """1, 3, 5, ..., int64 [count]."""
    # Copied from the host, which waits for it: any stream may use it then.
    return (torch.arange(count) * 2 + 1).to(device)


def rounding_bound(theta: Tensor, steps: int, update_error: float) -> Tensor:
    """Differences that rounding explains between replicas that have applied the same gradients.

    In each step a replica rounds the parameter to fp32, and its update. The differences add up, and
    do not grow by themselves, as all replicas apply the same averaged gradients.

    Args:
        theta: parameters of one of the replicas, fp32.
        steps: since the replicas were equal.
        update_error: rounding error of an element's update.

    Returns:
        Absolute differences, like `theta`.
    """
    return steps * (torch.finfo(torch.float32).eps * theta.abs() + update_error)
