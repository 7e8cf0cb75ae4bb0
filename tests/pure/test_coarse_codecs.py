"""Codecs of few levels: bytes of the reference, what the residual holds, degenerate blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.method import codec as codecs
from megatron_edit.method.coarse_codecs import INT2, SIGN, TERNARY
from megatron_edit.method.codec import Codec
from tests.pure.test_codec import (
    assert_adds,
    assert_equal_on_cpu_and_cuda,
    bits,
    draw,
    round_trip,
)
from tests.reference.wire import COARSE, coarse_codes, quantised

ALL = pytest.mark.parametrize("codec", [INT2, TERNARY, SIGN], ids=lambda c: c.name)
SIZES = [
    0,
    1,
    2,
    5,
    255,
    256,
    257,
    511,
    512,
    513,
    1023,
    1024,
    1025,
    1279,
    1280,
    1281,
    4097,
    100_003,
]
MANY_SIZES = st.one_of(st.sampled_from(SIZES[:-1]), st.integers(0, 6000))
ADVERSARIAL = [
    [0.0, -0.0, 0.0],
    [-0.0, 1.0, -2.0] * 50,
    [1.0] * 3 + [-1.0] * 7,
    [3e38, 3.4e38, -3.4e38],
    [1e-45, -1e-40, 1e-38],
    [2.0**-100, 2.0**-101, -(2.0**-100)],
    [1e30, 1e-30, -1e-30],
    [1e8] + [1.0] * 300,
    [1 / 3] * 77 + [-1 / 3] * 200,
]


def mixed(numel: int, seed: int) -> Tensor:
    """Blocks of all kinds, with magnitudes from subnormal to the largest."""
    random = torch.Generator().manual_seed(seed)
    values = draw(numel, seed, -44.0, 38.0) if seed % 2 else draw(numel, seed)
    values.clamp_(-3.4e38, 3.4e38)
    for first in range(0, numel, 128):
        block, kind = values[first : first + 128], int(torch.randint(6, (), generator=random))
        if kind == 0:
            block.zero_()
        elif kind == 1:
            block.copy_(block.sign() * 0.7)
        elif kind == 2:
            block[0] *= 1e9 if block[0].abs() < 1e20 else 1.0
    return values


def assert_equals_reference(codec: Codec, values: Tensor) -> None:
    """Assert decoded values and all bytes."""
    numel, size = values.numel(), COARSE[codec.name]
    data, decoded = codec.encode(values), round_trip(codec, values)
    assert data.dtype == torch.uint8 and data.shape == (codec.encoded_bytes(numel),)
    expected = quantised(values.numpy(), codec.name)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    num_scales, num_blocks = 2 if codec is INT2 else 1, -(-numel // size)
    used = 2 * num_scales * num_blocks
    stored = data[:used].view(torch.bfloat16).float().view(num_blocks, num_scales)
    high = stored[:, -1:].numpy().repeat(size, axis=1).flatten()[:numel]
    if codec is INT2 and bool(((stored[:, 0] == stored[:, 1]) & (stored[:, 1] > 0)).any()):
        return  # codes do not follow from decoded values where both levels are equal
    codes = coarse_codes(
        (values.numpy() < 0) & (high > 0), (np.abs(expected) == high) & (high > 0), codec.name
    )
    assert data[used : used + len(codes)].numpy().tobytes() == codes
    assert not data[used + len(codes) :].any()


@ALL
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_equal_the_reference_at_every_size(codec: Codec, numel: int) -> None:
    """Catches: a short last group, a digit in the wrong place, a mean over the padding."""
    for seed in (0, 1):
        assert_equals_reference(codec, draw(numel, seed))


@ALL
@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_bytes_equal_the_reference_for_all_kinds_of_blocks(
    codec: Codec, numel: int, seed: int
) -> None:
    """Catches: a sum that overflows or depends on the order of its addends, a subnormal scale."""
    assert_equals_reference(codec, mixed(numel, seed))


@ALL
@pytest.mark.parametrize("values", ADVERSARIAL, ids=lambda v: f"{v[0]:g}")
def test_bytes_equal_the_reference_for_degenerate_blocks(codec: Codec, values: list[float]) -> None:
    """Catches: nothing is sent of a block of equal magnitudes, a mean of no values."""
    assert_equals_reference(codec, torch.tensor(values))


@ALL
@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_residual_is_the_rounded_encoding_error(codec: Codec, numel: int, seed: int) -> None:
    """decoded + residual is the value: exactly for magnitudes from half the scale on and where zero
    is sent, else within 2^-24 of the scale."""
    values, rest = draw(numel, seed), draw(numel, seed + 1)
    corrected, before = values + rest, values.clone()
    data = codec.encode(values, residual=rest)
    assert torch.equal(values, before)
    decoded = torch.empty(numel)
    codec.decode(data, decoded)
    assert bits(rest) == bits(corrected - decoded)
    error = (decoded.double() + rest.double() - corrected.double()).abs()
    assert (error <= 2.0**-24 * decoded.abs()).all()
    assert not error[corrected.abs() >= 0.5 * decoded.abs()].any()
    assert torch.equal(codec.encode(corrected), data)
    assert_adds(codec, draw(numel, seed + 2), data, decoded)


@ALL
def test_codes_do_not_depend_on_slab_size(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scales or codes of the second slab written over those of the first."""
    values, one = draw(20_001, seed=3), draw(20_001, seed=4)
    rests = [one.clone(), one.clone()]
    whole = codec.encode(values, residual=rests[0])
    decoded = torch.empty(20_001)
    codec.decode(whole, decoded)
    for slab in (512, 9000):
        monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", slab)
        rests[1].copy_(one)
        assert torch.equal(codec.encode(values, residual=rests[1]), whole)
        assert bits(rests[1]) == bits(rests[0])
        again = torch.empty(20_001)
        codec.decode(whole, again)
        assert bits(again) == bits(decoded)
        assert_adds(codec, one, whole, decoded)


@pytest.mark.parametrize(("codec", "bound"), [(INT2, 0.254), (TERNARY, 0.208), (SIGN, 0.129)])
def test_encoded_bytes_per_value_are_bounded(codec: Codec, bound: float) -> None:
    """Sizes are multiples of 4 bytes, so that encoded units can be concatenated."""
    assert codec.encoded_bytes(1 << 20) <= bound * (1 << 20)
    assert codec.encoded_bytes(0) == 0
    assert all(codec.encoded_bytes(numel) % 4 == 0 for numel in range(600))


@ALL
def test_zeros_and_tiny_values_encode_to_zero_bytes(codec: Codec) -> None:
    """A replica that is left out sends zero bytes; tiny values remain in the residual."""
    zeros = torch.zeros(7777)
    assert bits(round_trip(codec, zeros)) == [0] * 7777
    assert not codec.encode(zeros).any() and not codec.encode(-zeros).any()
    tiny, rest = torch.tensor([1e-40, -1e-36, 1e-31]), torch.zeros(3)
    assert not codec.encode(tiny, residual=rest).any()
    assert bits(rest) == bits(tiny)


@ALL
def test_residual_of_changing_values_stays_bounded(codec: Codec) -> None:
    """Catches error feedback that diverges. (With the same values in every exchange the largest
    ones of a block catch up only when their residual has raised the scale.)"""
    random, rest = torch.Generator().manual_seed(0), torch.zeros(5120)
    for _ in range(100):
        codec.encode(values := torch.randn(5120, generator=random), residual=rest)
    assert rest.norm() < 0.8 * values.norm()


@ALL
def test_largest_fp32_values_stay_finite(codec: Codec) -> None:
    """Catches a sum of magnitudes that overflows."""
    largest = torch.finfo(torch.float32).max
    values = torch.full((600,), largest)
    values[::2] *= -1
    decoded = round_trip(codec, values)
    assert decoded.isfinite().all() and (decoded / values > 0.99).all()


@pytest.mark.parametrize("codec", [TERNARY, SIGN], ids=lambda c: c.name)
def test_decoded_values_encode_to_themselves(codec: Codec) -> None:
    """Catches a scale that shrinks with every exchange."""
    decoded = round_trip(codec, draw(5000, seed=5))
    assert bits(round_trip(codec, decoded)) == bits(decoded)


@ALL
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_value_decodes_to_nonfinite_block(codec: Codec, value: float) -> None:
    """All values of the poisoned block and their residual are non-finite; no others are."""
    values, rest = draw(6000, seed=1), torch.zeros(6000)
    for place in (3000, 5999):
        poisoned = values.clone()
        poisoned[place] = value
        rest.zero_()
        decoded = torch.empty(6000)
        codec.decode(codec.encode(poisoned, residual=rest), decoded)
        start = place // codec.block_numel * codec.block_numel
        inside = torch.zeros(6000, dtype=torch.bool)
        inside[start : start + codec.block_numel] = True
        assert not decoded[inside].isfinite().any() and not rest[inside].isfinite().any()
        assert bits(decoded[~inside]) == bits(round_trip(codec, values)[~inside])


@ALL
@settings(max_examples=20, deadline=None)
@given(numel=st.sampled_from([1, 3, 300, 700]), seed=st.integers(0, 100))
def test_error_feedback_converges_to_the_true_mean(codec: Codec, numel: int, seed: int) -> None:
    """The mean of n rounds is off by the last residual / n, even of a single value."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    rest, total, decoded = torch.zeros(numel), torch.zeros(numel).double(), torch.empty(numel)
    for _ in range(200):
        codec.decode(codec.encode(values, residual=rest), decoded)
        total += decoded
    error = (total / 200 - values).abs().max()
    assert error <= float(rest.abs().max()) / 200 + 1e-5
    assert numel > 1 or error <= 1e-3 * values.abs()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@ALL
def test_codec_bytes_are_equal_on_cpu_and_cuda(codec: Codec) -> None:
    """Values encoded on either device can be decoded on the other."""
    assert_equal_on_cpu_and_cuda(codec, mixed(100_003, seed=2), draw(100_003, seed=3))
