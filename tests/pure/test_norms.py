"""Sums of squares: precision, range and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.method.norms import fused_sum_of_squares, sum_of_squares

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, MEBIBYTE, 3 * MEBIBYTE + 17])
def test_sum_of_squares_equals_float64(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = np.square(values.numpy().astype(np.float64)).sum()
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-12)


def test_sum_of_squares_is_finite_where_fp32_values_are() -> None:
    """Squares of large fp32 values overflow fp32."""
    assert torch.isfinite(sum_of_squares(torch.full((10,), 3e38)))
    for bad in (torch.inf, torch.nan):
        assert not torch.isfinite(sum_of_squares(torch.tensor([1.0, bad])))


def test_sum_of_squares_makes_no_full_float64_copy() -> None:
    """torch converts before it reduces, which would take twice the memory of the tensor."""
    values = torch.ones(8 * MEBIBYTE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        sum_of_squares(values)
    largest = max(event.cpu_memory_usage for event in recorded.events())
    assert 0 < largest <= 8 * MEBIBYTE


def test_gpu_takes_one_norm_kernel_for_all_parts() -> None:
    """On a GPU, here `meta`. Catches thousands of launches for the norms of a large model."""
    found = NormCounter()
    with found:
        sum_of_squares(*torch.empty(40, MEBIBYTE, device="meta"))
    assert found.num_norms == 1


def test_fused_sum_equals_float64() -> None:
    """Over parts of different sizes, also empty ones; large values do not overflow fp32."""
    parts = [torch.randn(numel) for numel in (0, 1, 1000, 70_001)] + [torch.full((3,), 3e38)]
    expected = sum(np.square(part.numpy().astype(np.float64)).sum() for part in parts)
    for total in (fused_sum_of_squares(parts), sum_of_squares(*parts)):
        assert total.dtype == torch.float64
        assert total.item() == pytest.approx(expected, rel=1e-12)
    assert fused_sum_of_squares(parts[:1]).item() == 0.0


class NormCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls of norms."""

    num_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it if it is a norm."""
        self.num_norms += "norm" in str(func)
        return func(*args, **(kwargs or {}))
