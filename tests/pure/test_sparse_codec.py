"""Codec of the largest values of blocks: bytes of the reference, residual, degenerate blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.method import codec as codecs
from megatron_edit.method.sparse_codec import TOP64
from tests.pure.test_coarse_codecs import mixed
from tests.pure.test_codec import (
    assert_adds,
    assert_equal_on_cpu_and_cuda,
    bits,
    draw,
    round_trip,
)
from tests.reference.wire import quantised, sparse_bytes

SIZES = [0, 1, 2, 63, 64, 65, 127, 129, 4095, 4096, 4097, 4161, 8192, 100_003]
MANY_SIZES = st.one_of(st.sampled_from(SIZES[:-1]), st.integers(0, 20_000))
LARGEST = torch.finfo(torch.float32).max
ADVERSARIAL = {
    "zeros": [0.0, -0.0] * 150,
    "equal magnitudes": [-1.0, 1.0, 1.0] * 1500,
    "one huge value": [1e-3] * 3000 + [1e30] + [-1e-3] * 3000,
    "one value": [0.0] * 4095 + [-3.0],
    "largest fp32 values": [LARGEST, -LARGEST] * 2500,
    "subnormals": [1e-45, -1e-40] * 100,
    "at the smallest scale": [2.0**-100, -(2.0**-101)] * 100,
    "below the smallest scale": [2.0**-101] * 100,
    "one huge among tiny values": [1e-30] * 5000 + [1e8] + [1e-30] * 100,
}


def assert_equals_reference(values: Tensor) -> None:
    """Assert all bytes and all decoded values."""
    data = TOP64.encode(values)
    assert data.shape == (TOP64.encoded_bytes(values.numel()),)
    assert data.numpy().tobytes() == sparse_bytes(values.numpy())
    expected = quantised(values.numpy(), "top64")
    np.testing.assert_array_equal(round_trip(TOP64, values).numpy(), expected)


@pytest.mark.parametrize("numel", SIZES)
def test_bytes_equal_the_reference_at_every_size(numel: int) -> None:
    """Catches: an index in another block, a short last block that keeps too many values."""
    for seed in (0, 1):
        assert_equals_reference(draw(numel, seed))


@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_bytes_equal_the_reference_for_all_kinds_of_blocks(numel: int, seed: int) -> None:
    """Catches: ties between equal magnitudes that depend on the sort, a sum that overflows."""
    assert_equals_reference(mixed(numel, seed))


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_bytes_equal_the_reference_for_degenerate_blocks(name: str) -> None:
    """Catches: of equal magnitudes others than the first are kept; indices of blocks of zeros."""
    assert_equals_reference(torch.tensor(ADVERSARIAL[name]))


@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_residual_is_what_was_not_sent(numel: int, seed: int) -> None:
    """e <- 0.95 e + D - q, with the rounding of fp32 in each operation."""
    values, rest = draw(numel, seed), draw(numel, seed + 1)
    corrected, before = rest * 0.95 + values, values.clone()
    data = TOP64.encode(values, residual=rest)
    assert torch.equal(values, before)
    decoded = torch.empty(numel)
    TOP64.decode(data, decoded)
    assert bits(rest) == bits(corrected - decoded)
    assert torch.equal(TOP64.encode(corrected), data)
    assert_adds(TOP64, draw(numel, seed + 2), data, decoded)


def test_codes_do_not_depend_on_slab_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the places of the second slab counted from its beginning."""
    values, one = draw(40_001, seed=3), draw(40_001, seed=4)
    rests = [one.clone(), one.clone()]
    whole, decoded = TOP64.encode(values, residual=rests[0]), torch.empty(40_001)
    TOP64.decode(whole, decoded)
    for slab in (512, 9000):
        monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", slab)
        rests[1].copy_(one)
        assert torch.equal(TOP64.encode(values, residual=rests[1]), whole)
        assert bits(rests[1]) == bits(rests[0])
        again = torch.empty(40_001)
        TOP64.decode(whole, again)
        assert bits(again) == bits(decoded)
        assert_adds(TOP64, one, whole, decoded)


def test_block_of_4096_values_takes_116_bytes() -> None:
    """96 of indices, 16 of codes, 4 of scales; sizes are multiples of 4 bytes."""
    assert TOP64.encoded_bytes(4096) == 116
    assert TOP64.encoded_bytes(1 << 20) == 116 << 8
    assert TOP64.encoded_bytes(0) == 0
    assert all(TOP64.encoded_bytes(numel) % 4 == 0 for numel in range(9000))


@pytest.mark.parametrize("numel", SIZES)
def test_zero_bytes_decode_to_zeros(numel: int) -> None:
    """A replica that is left out sends zero bytes; blocks of zeros or tiny values are such."""
    data = torch.zeros(TOP64.encoded_bytes(numel), dtype=torch.uint8)
    decoded = torch.full((numel,), 7.0)
    TOP64.decode(data, decoded)
    assert bits(decoded) == [0] * numel
    assert_adds(TOP64, draw(numel, seed=1), data, decoded)
    tiny, rest = torch.full((numel,), -1e-35), torch.zeros(numel)
    assert not TOP64.encode(tiny, residual=rest).any()
    assert bits(rest) == bits(tiny)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [5000, 9999])
def test_nonfinite_value_decodes_to_nonfinite_block(value: float, place: int) -> None:
    """All values of the poisoned block and their residual are non-finite; no others are."""
    values, rest = draw(10_000, seed=1), torch.zeros(10_000)
    poisoned = values.clone()
    poisoned[place] = value
    data = TOP64.encode(poisoned, residual=rest)
    decoded, total = torch.empty(10_000), torch.zeros(10_000)
    TOP64.decode(data, decoded)
    TOP64.decode_sum(torch.stack((TOP64.encode(values), data)), total)
    inside = torch.arange(10_000) // 4096 == place // 4096
    for each in (decoded, total, rest):
        assert not each[inside].isfinite().any() and each[~inside].isfinite().all()
    assert bits(decoded[~inside]) == bits(round_trip(TOP64, values)[~inside])


def test_unsent_values_add_up_until_they_are_sent() -> None:
    """Catches: a residual that decays twice, or not at all, or that is not added to the values."""
    rest, num_sent = torch.zeros(8192), torch.zeros(8192)
    values = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    for _ in range(200):
        num_sent += round_trip_with(values, rest) != 0
    assert (rest.abs() <= 20.0 * values.abs().max()).all()  # 1 / (1 - 0.95)
    assert (num_sent > 0).sum() > 10 * 128 and num_sent.max() < 100
    single = torch.full((1,), 8.0)
    assert 7.5 < round_trip_with(torch.zeros(1), single) <= 7.6  # 0.95 x 8
    assert single.abs() < 0.1


def round_trip_with(values: Tensor, rest: Tensor) -> Tensor:
    """Encode with a residual, and decode. Mutates `rest`."""
    decoded = torch.empty_like(values)
    TOP64.decode(TOP64.encode(values, residual=rest), decoded)
    return decoded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_codec_bytes_are_equal_on_cpu_and_cuda() -> None:
    """Values encoded on either device can be decoded on the other."""
    assert_equal_on_cpu_and_cuda(TOP64, mixed(100_003, seed=2), draw(100_003, seed=3))
