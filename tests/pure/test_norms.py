"""Sums of squares: exact enough, never infinite where fp32 is finite, and small in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_edit.method.norms import sum_of_squares

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, MEBIBYTE, 3 * MEBIBYTE + 17])
def test_equal_to_float64(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = np.square(values.numpy().astype(np.float64)).sum()
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-12)


def test_large_values_are_finite_and_broken_ones_are_not() -> None:
    """Squares of fp32 overflow fp32."""
    assert torch.isfinite(sum_of_squares(torch.full((10,), 3e38)))
    for bad in (torch.inf, torch.nan):
        assert not torch.isfinite(sum_of_squares(torch.tensor([1.0, bad])))


def test_no_float64_copy_of_the_whole() -> None:
    """torch converts before it reduces: twice the memory of what is measured, if done at once."""
    values = torch.ones(8 * MEBIBYTE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        sum_of_squares(values)
    largest = max(event.cpu_memory_usage for event in recorded.events())
    assert 0 < largest <= 8 * MEBIBYTE
