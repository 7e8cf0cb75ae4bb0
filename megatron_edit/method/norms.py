"""Norms in float64, without a float64 copy of the tensor, and projections. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_edit.constants import BF16, FP32

# Elements that a CPU converts at once: limits the scratch to 8 MiB.
_CHUNK = 1 << 20


def sum_of_squares(*parts: Tensor) -> Tensor:
    """Sum of squares of one or more fp32 [n] on a device, a float64 scalar there, without overflow.

    The same bits for the same values: the order depends only on each n and on the type of device.
    """
    if parts[0].device.type != "cpu":
        return fused_sum_of_squares(parts)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        of_part = torch.zeros_like(total)
        for chunk in part.split(_CHUNK):
            of_part += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
        total += of_part
    return total


def fused_sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """The same in a few kernels for all parts, which convert each value as they read it."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    # The public `torch.linalg.vector_norm` takes five kernels a part, and a float64 copy.
    return torch.stack(torch._foreach_norm(filled, 2, dtype=torch.float64)).square().sum()


def sum_in_rank_order(rows: Tensor) -> Tensor:
    """Sum [ranks, ...] over the ranks, first to last: the same bits on every rank.

    As a bag of embeddings, which is one launch for any number of ranks, and adds them in this order
    on all devices. (PyTorch refuses a cumulative sum on a GPU with `--deterministic-mode`.)
    """
    columns = rows.reshape(len(rows), -1)
    ranks = torch.arange(len(rows), device=rows.device).unsqueeze(0)
    summed = torch.nn.functional.embedding_bag(ranks, columns, mode="sum")
    return summed.reshape(rows.shape[1:])


# ---- Projections that compare a sum with its addends, in float64. No communication
#
# The projection of x is p . x for a fixed vector p of positive numbers. It is linear, so that the
# projection of a sum is the sum of the projections of its addends, up to the rounding of the sum.
# Each 65536 elements have one of their own: among so few, fp32 rounding hides a changed element
# only if the change is less than about N^2 / 100 of the mean element of an addend, for N addends.


_ROWS, _COLUMNS = 64, 1024  # p is the outer product of two vectors of so many elements
_PART = _ROWS * _COLUMNS
# Multiples of irrational numbers modulo 1 differ from each other, and are spread evenly.
_ROW_STEP, _COLUMN_STEP = 0.41421356237309515, 0.6180339887498949
_LARGEST = 1.5 * 1.5  # element of p
_PARTS_AT_ONCE = {"cpu": 16}  # that are converted to float64
_PARTS_AT_ONCE_ELSEWHERE = 64

_FP32_ROUNDING = 2.0**-24
_FLOAT64_ROUNDING = 1e-12  # of a projection, relative; above that of 65536 elements
_SMALLEST_NORMAL = 2.0**-126  # devices may set smaller fp32 numbers to 0
# Rounding of a value by the encoding on the wire, relative: of each addend, then of the sum. Other
# types keep what they lose: here only the additions of what was kept are rounded.
_WIRE_ROUNDING = {FP32: 0.0, BF16: 2.0**-8}
_NUM_ADDITIONS = 4  # of what is kept: to an addend, to the sum, and both again


def num_parts(numel: int) -> int:
    """Projections of so many elements."""
    return -(-numel // _PART)


def projection(values: Tensor) -> Tensor:
    """p . x and p . |x| for each part x of `values`, fp32 [n]: float64 [num_parts(n), 2] on its
    device.

    Scratch: 8 MiB on the CPU, 32 MiB elsewhere. p does not depend on the device.
    """
    device, numel = values.device, values.numel()
    total = torch.zeros(num_parts(numel), 2, dtype=torch.float64, device=device)
    rows, columns = _spread(_ROWS, _ROW_STEP, device), _spread(_COLUMNS, _COLUMN_STEP, device)
    at_once = min(_PARTS_AT_ONCE.get(device.type, _PARTS_AT_ONCE_ELSEWHERE), len(total))
    scratch = torch.empty(at_once * _PART, dtype=torch.float64, device=device)
    for first in range(0, len(total), at_once or 1):
        found = total[first : first + at_once]
        some, wide = values[first * _PART :][: at_once * _PART], scratch[: len(found) * _PART]
        wide[: some.numel()].copy_(some)
        wide[some.numel() :] = 0.0
        for column in found.t():
            column.copy_((wide.view(-1, _COLUMNS) @ columns).view(-1, _ROWS) @ rows)
            wide.abs_()
    return total


def sum_differs(addends: Tensor, average: Tensor, wire: str) -> bool:
    """Whether a sum differs from its addends by more than rounding can explain.

    Args:
        addends: `projection` of each, float64 [N, parts, 2]; where the wire has a residual, of
            what was sent (`CheckedSync.sent_projections`).
        average: `projection` of the sum.
        wire: type on the wire, with sums in fp32.
    """
    expected, magnitude = addends.sum(dim=0).unbind(dim=-1)
    encoded, size = 1.0 + _WIRE_ROUNDING.get(wire, 0.0), len(addends)
    num_rounded = size if wire in _WIRE_ROUNDING else size + _NUM_ADDITIONS
    relative = encoded**2 * (1.0 + _FP32_ROUNDING) ** num_rounded - 1.0 + _FLOAT64_ROUNDING
    absolute = (size + 2) * _PART * _LARGEST * _SMALLEST_NORMAL
    is_close = (average[:, 0] - expected).abs() <= relative * magnitude + absolute
    return not bool(is_close.all())  # nor is what is not a number close


def _spread(count: int, step: float, device: torch.device) -> Tensor:
    """`count` numbers between 0.5 and 1.5, float64."""
    numbers = torch.arange(count, dtype=torch.float64, device=device)
    return numbers.mul_(step).frac_().add_(0.5)
