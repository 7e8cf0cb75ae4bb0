"""Projections that compare an average with its addends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.constants import BF16, FP32
from megatron_edit.method import norms as tested
from megatron_edit.method.norms import num_parts, projection, sum_differs

SIZES = st.sampled_from([0, 1, 7, 1023, 1024, 1025, 40_000, 65_536, 65_537, 200_000])


def draw_addends(count: int, numel: int, seed: int, kind: str) -> list[Tensor]:
    """Values of like and of very different size, equal ones, and some that nearly cancel."""
    torch.manual_seed(seed)
    if kind == "equal":
        return [torch.full((numel,), 0.1 * (rank + 1)) for rank in range(count)]
    if kind == "tiny":
        return [torch.randn(numel) * 1e-41 for _ in range(count)]
    values = [torch.randn(numel) for _ in range(count)]
    if kind == "wide":
        return [value * 10.0 ** torch.randint(-30, 30, (numel,)) for value in values]
    if kind == "cancel" and count > 1:
        values[-1] = -sum(values[:-1], torch.zeros(numel))
    return values


def sum_over_wire(addends: list[Tensor], wire: str) -> Tensor:
    """The sum, with the rounding of the wire, in fp32."""

    def coded(values: Tensor) -> Tensor:
        return values.bfloat16().float() if wire == BF16 else values

    total = torch.zeros_like(addends[0])
    for addend in addends:
        total += coded(addend)
    return coded(total)


def differs(addends: list[Tensor], average: Tensor, wire: str = FP32) -> bool:
    """Whether the check finds a difference."""
    table = torch.stack([projection(addend) for addend in addends])
    return sum_differs(table, projection(average), wire)


@settings(deadline=None, max_examples=120)
@given(
    count=st.integers(1, 9),
    numel=SIZES,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["like", "equal", "wide", "cancel", "tiny"]),
    wire=st.sampled_from([FP32, BF16]),
)
def test_rounding_is_no_difference(count: int, numel: int, seed: int, kind: str, wire: str) -> None:
    addends = draw_addends(count, numel, seed, kind)
    assert not differs(addends, sum_over_wire(addends, wire), wire)


@pytest.mark.parametrize("numel", [1500, 1 << 16, 3 << 19, (3 << 19) + 1])
def test_projection_is_that_of_one_fixed_vector(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parts are converted at once, as devices differ in that."""
    torch.manual_seed(0)
    values = torch.randn(numel)
    found = projection(values)
    for number in (1, 3, 100):
        monkeypatch.setattr(tested, "_PARTS_AT_ONCE", {"cpu": number})
        torch.testing.assert_close(projection(values), found, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found[:, 1], projection(values.abs())[:, 0], rtol=1e-12, atol=0)
    assert len(found) == num_parts(numel)


def flip_exponent(values: Tensor) -> None:
    values.view(torch.int32)[7] ^= 1 << 30


def change_one(values: Tensor) -> None:
    """By less than the mean element."""
    values[70_000 % len(values)] += 0.5


def swap_parts(values: Tensor) -> None:
    values[:2048] = values[:2048].roll(1024)


def swap_neighbours(values: Tensor) -> None:
    values[:2] = values[:2].flip(0)


def lose_a_part(values: Tensor) -> None:
    values[100:200] = 0.0


def add_nan(values: Tensor) -> None:
    values[0] = torch.nan


@pytest.mark.parametrize(
    "change",
    [flip_exponent, change_one, swap_parts, swap_neighbours, lose_a_part, add_nan],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("numel", [4096, 1 << 20])
def test_changes_are_found(change: Callable[[Tensor], None], numel: int) -> None:
    addends = draw_addends(4, numel, 1, "like")
    average = sum_over_wire(addends, FP32)
    change(average)
    assert differs(addends, average)


def test_addend_that_changed_on_the_way_is_found() -> None:
    addends = draw_addends(3, 4096, 2, "like")
    sent = [addend.clone() for addend in addends]
    sent[1].view(torch.int32)[3000] ^= 1 << 30
    assert differs(addends, sum_over_wire(sent, FP32), FP32)
    assert differs(addends, sum_over_wire(sent, BF16), BF16)
