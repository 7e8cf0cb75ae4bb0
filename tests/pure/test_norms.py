"""Sums of squares: exact enough, never infinite where fp32 is finite, and small in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 40), ("meta", 3)])
def test_launches_of_a_device(device: str, chunks: int) -> None:
    """Where launches cost more than memory there are few: of 40 Mi elements three chunks. Catches
    thousands of launches for the norms of a large model. `meta` stands for a GPU."""
    found = Counting()
    with found:
        sum_of_squares(torch.empty(40 * MEBIBYTE, device=device))
    assert found.num_norms == chunks


class Counting(TorchDispatchMode):  # type: ignore[misc]
    """Counts norms."""

    num_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation."""
        self.num_norms += "vector_norm" in str(func)
        return func(*args, **(kwargs or {}))
