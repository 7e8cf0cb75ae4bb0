"""Codecs: bounds, exactness, and value happens at the edges of fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_edit.method import codec as codecs
from megatron_edit.method.coarse_codecs import INT2, SIGN, TERNARY
from megatron_edit.method.codec import BF16, INT4, INT8, LOG8, ULOG8, Codec
from megatron_edit.method.sparse_codec import TOP64
from tests.reference.wire import quantised

ALL = pytest.mark.parametrize("codec", [BF16, INT8, INT4], ids=lambda c: c.name)
BLOCKED = pytest.mark.parametrize(("codec", "max_code"), [(INT8, 127), (INT4, 7)])
SIZES = st.one_of(st.integers(0, 3), st.integers(100, 700), st.sampled_from([128, 256, 1024]))


def draw(numel: int, seed: int, low: float = -3.0, high: float = 3.0) -> Tensor:
    """Draw values whose magnitude varies by decades between blocks, some of them exact zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=random)
    decades = low + (high - low) * torch.rand(-(-numel // 64), generator=random)
    values *= (10.0 ** decades.repeat_interleave(64)[:numel].double()).float()
    return values.masked_fill_(torch.rand(numel, generator=random) < 0.1, 0.0)


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    """Encode and decode values."""
    out = torch.full_like(values, torch.nan)
    codec.decode(codec.encode(values), out)
    return out


def assert_adds(codec: Codec, other: Tensor, data: Tensor, decoded: Tensor) -> None:
    """Assert that the sum of other values, encoded, and of `data` is rounded once."""
    total = torch.full_like(decoded, torch.nan)
    codec.decode_sum(torch.stack((codec.encode(other), data)), total)
    assert bits(total) == bits((torch.zeros_like(decoded) + round_trip(codec, other)) + decoded)


def bits(values: Tensor) -> list[int]:
    """Return bit patterns as integers, which distinguish -0, 0 and NaN."""
    return list(values.view(torch.int32).tolist())


@ALL
@settings(max_examples=40, deadline=None)
@given(numel=SIZES, seed=st.integers(0, 1000), decades=st.sampled_from([(-3, 3), (-30, 30)]))
def test_round_trip_matches_reference(
    codec: Codec, numel: int, seed: int, decades: tuple[int, int]
) -> None:
    """Catches: a wrong nibble, a scale off by one block, a short last block, rounding half up."""
    values = draw(numel, seed, *decades)
    before = values.clone()
    data = codec.encode(values)
    assert data.dtype == torch.uint8 and data.shape == (codec.encoded_bytes(numel),)
    assert bits(values) == bits(before)
    decoded = round_trip(codec, values)
    np.testing.assert_array_equal(decoded.numpy(), quantised(values.numpy(), codec.name))
    assert torch.equal(decoded[values == 0], torch.zeros(int((values == 0).sum())))
    assert bits(round_trip(codec, decoded)) == bits(decoded)  # decoded values are fixed points
    assert torch.equal(codec.encode(values), data)  # the same bytes again


@BLOCKED
@settings(max_examples=40, deadline=None)
@given(numel=SIZES, seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_quantization_error_is_at_most_half_a_step(
    codec: Codec, max_code: int, numel: int, seed: int, exponent: int
) -> None:
    """Catches: saturation, a scale of the whole tensor, truncation instead of rounding."""
    values = draw(numel, seed) * 10.0**exponent
    error = (round_trip(codec, values) - values).abs()
    for first in range(0, numel, codec.block_numel):
        block = slice(first, first + codec.block_numel)
        step = values[block].abs().max() / max_code
        assert error[block].max() <= 0.5 * step * (1 + 1e-6)


@ALL
@settings(max_examples=40, deadline=None)
@given(numel=SIZES, seed=st.integers(0, 1000))
def test_residual_holds_exactly_the_encoding_error(codec: Codec, numel: int, seed: int) -> None:
    """decoded + new residual = value + old residual, rounded once: in value + old residual."""
    values, rest = draw(numel, seed), draw(numel, seed + 1)
    corrected = values + rest
    data = codec.encode(values, residual=rest)
    decoded = torch.empty(numel)
    codec.decode(data, decoded)
    assert torch.equal(decoded.double() + rest.double(), corrected.double())
    assert torch.equal(codec.encode(corrected), data)
    assert_adds(codec, draw(numel, seed + 2), data, decoded)


@ALL
def test_codes_do_not_depend_on_slab_size(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scales or codes of the second slab written over those of the first."""
    values = draw(3001, seed=3)
    whole, rest = codec.encode(values, residual=(one := draw(3001, seed=4)).clone()), one.clone()
    monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", 512)
    assert torch.equal(codec.encode(values, residual=rest), whole)
    decoded = torch.empty(3001)
    codec.decode(whole, decoded)
    assert torch.equal(decoded.double() + rest.double(), (values + one).double())
    assert_adds(codec, one, whole, decoded)


@pytest.mark.parametrize(("codec", "bound"), [(BF16, 2.0), (INT8, 1.02), (INT4, 0.52)])
def test_encoded_bytes_per_value_are_bounded(codec: Codec, bound: float) -> None:
    """Sizes are multiples of 4 bytes, so that encoded units can be concatenated."""
    for numel in (1 << 20, 3 * 256):
        assert codec.encoded_bytes(numel) <= bound * numel
    assert codec.encoded_bytes(0) == 0
    assert all(codec.encoded_bytes(numel) % 4 == 0 for numel in range(600))


@ALL
def test_zero_bytes_decode_to_exact_zeros(codec: Codec) -> None:
    """A replica that is left out sends zero bytes; zeros encode to them, too."""
    zeros = torch.zeros(777)
    assert bits(round_trip(codec, zeros)) == [0] * 777
    assert not codec.encode(zeros).any()


@BLOCKED
def test_codec_rounds_half_to_even(codec: Codec, max_code: int) -> None:
    """Catches rounding half away from zero, which drifts."""
    values = torch.tensor([max_code, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], dtype=torch.float32)
    assert round_trip(codec, values).tolist() == [max_code, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


@BLOCKED
def test_largest_and_smallest_fp32_are_encoded(codec: Codec, max_code: int) -> None:
    """The largest values stay finite; the smallest become zero and remain in the residual."""
    largest = torch.finfo(torch.float32).max
    decoded = round_trip(codec, torch.tensor([largest, -largest, 1.0]))
    assert decoded.isfinite().all() and decoded[0] > 0.99 * largest
    tiny, rest = torch.tensor([1e-40, -1e-36]), torch.zeros(2)
    data = codec.encode(tiny, residual=rest)
    assert not data.any() and torch.equal(rest, tiny)


@ALL
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_value_decodes_to_nonfinite_block(codec: Codec, value: float) -> None:
    """All values of the poisoned block are non-finite; other blocks do not change."""
    values = draw(600, seed=1)
    clean = round_trip(codec, values)
    values[300] = value
    decoded = round_trip(codec, values)
    start = 300 // codec.block_numel * codec.block_numel
    poisoned = torch.zeros(600, dtype=torch.bool)
    poisoned[start : start + codec.block_numel] = True
    assert not decoded[poisoned].isfinite().any()
    assert bits(decoded[~poisoned]) == bits(clean[~poisoned])


@ALL
def test_error_feedback_converges_to_the_true_mean(codec: Codec) -> None:
    """The mean of n rounds is off by the last residual / n, however coarse the codec."""
    values, rest, total = draw(500, seed=9), torch.zeros(500), torch.zeros(500)
    total = total.double()
    decoded, largest_rest = torch.empty(500), 0.0
    for _ in range(200):
        codec.decode(codec.encode(values, residual=rest), decoded)
        total += decoded
        largest_rest = max(largest_rest, float(rest.abs().max()))
    error = (total / 200 - values).abs().max()
    plain = (round_trip(codec, values) - values).abs().max()
    assert error <= largest_rest / 200 + 1e-6 * values.abs().max()
    assert error < 0.05 * plain


EVERY = [BF16, INT8, INT4, INT2, TERNARY, SIGN, TOP64, LOG8, ULOG8]


def assert_rows_are_alone(codec: Codec, values: Tensor, rest: Tensor | None) -> None:
    """Assert that rows with a stride are encoded, decoded and added like each one alone."""
    num_rows, numel = values.shape
    own = [None if rest is None else rest[row].clone() for row in range(num_rows)]
    rows = [codec.encode(each, residual=kept) for each, kept in zip(values, own, strict=True)]
    buffer = torch.full((num_rows, len(rows[0]) + 8), 77, dtype=torch.uint8)
    data = codec.encode(values, residual=rest, out=buffer[:, 4:-4])
    finite = values.isfinite().all(dim=1)  # a NaN has many codes: torch writes some of them in bf16
    assert torch.equal(data[finite], torch.stack(rows)[finite])
    assert (buffer[:, :4] == 77).all() and (buffer[:, -4:] == 77).all()
    decoded, total, added = torch.empty(num_rows, numel), torch.empty(numel), torch.zeros(numel)
    codec.decode(data, decoded)
    codec.decode_sum(data, total)
    for row, each in enumerate(rows):
        alone = torch.empty(numel)
        codec.decode(each, alone)
        torch.testing.assert_close(decoded[row], alone, rtol=0, atol=0, equal_nan=True)
        added += alone
        if rest is not None:
            torch.testing.assert_close(rest[row], own[row], rtol=0, atol=0, equal_nan=True)
    is_number = ~added.isnan()
    assert bits(total[is_number]) == bits(added[is_number])
    assert torch.equal(total.isnan(), added.isnan())


@pytest.mark.parametrize("slab", [1 << 12, 1 << 18])
@pytest.mark.parametrize("numel", [1, 7, 300, 4096, 20_003])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("codec", EVERY, ids=lambda c: c.name)
def test_rows_are_encoded_and_added_like_each_one_alone(
    codec: Codec, num_rows: int, numel: int, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and nothing is written between the rows. Catches rows that share a scale, and a
    sum in another order than that of the rows."""
    monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", slab)
    drawn = draw(num_rows * numel, seed=num_rows).view(num_rows, -1)
    for what in (None, torch.nan, torch.inf):
        values = drawn.square() if codec is ULOG8 else drawn.clone()
        if what is not None:
            values[-1, numel // 2] = what
        rest = draw(num_rows * numel, seed=9).view(num_rows, -1)
        assert_rows_are_alone(codec, values, None)
        if codec.has_residual or codec is BF16:
            assert_rows_are_alone(codec, values, rest)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 64])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA"))],
)  # fmt: skip
def test_rows_are_added_in_their_order_from_zero(device: str, num_rows: int) -> None:
    """Bit for bit on every device; catches a release of torch whose kernel has another order. Of
    negative zeros the sum is zero."""
    rows = draw(num_rows * 4096, seed=5).view(num_rows, -1)
    rows[:, 0] = -0.0
    total = torch.zeros(4096)
    for row in rows:
        total += row
    assert bits(codecs._sum_of_rows(rows.to(device)).cpu()) == bits(total)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@ALL
def test_codec_bytes_are_equal_on_cpu_and_cuda(codec: Codec) -> None:
    """Values encoded on either device can be decoded on the other."""
    assert_equal_on_cpu_and_cuda(codec, draw(100_003, seed=2), draw(100_003, seed=3))


def assert_equal_on_cpu_and_cuda(codec: Codec, values: Tensor, rest: Tensor) -> None:
    """Check that both devices encode, decode and leave residuals alike, bit for bit."""
    there = rest.cuda()
    data = codec.encode(values, residual=rest)
    assert torch.equal(codec.encode(values.cuda(), residual=there).cpu(), data)
    assert torch.equal(there.cpu(), rest)
    decoded, expected = torch.empty(values.numel(), device="cuda"), torch.empty(values.numel())
    codec.decode(data.cuda(), decoded)
    codec.decode(data, expected)
    assert torch.equal(decoded.cpu(), expected)
