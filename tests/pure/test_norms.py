"""Sums of squares: precision, range and memory."""

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


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 40), ("meta", 3)])
def test_number_of_norm_kernels_by_device(device: str, chunks: int) -> None:
    """On a GPU (here `meta`) 40 Mi elements take three kernels. Catches thousands of launches for
    the norms of a large model."""
    found = NormCounter()
    with found:
        sum_of_squares(torch.empty(40 * MEBIBYTE, device=device))
    assert found.num_norms == chunks


class NormCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls of `vector_norm`."""

    num_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it if it is a norm."""
        self.num_norms += "vector_norm" in str(func)
        return func(*args, **(kwargs or {}))
