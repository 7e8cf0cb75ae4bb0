"""Codecs of all wire types: bytes of the reference, residuals, and values at the edges of fp32."""

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
from tests.reference.wire import COARSE, coarse_codes, quantised, sparse_bytes

FINE, FEW_LEVELS, LOGARITHMIC = [BF16, INT8, INT4], [INT2, TERNARY, SIGN], [LOG8, ULOG8]
WITH_RESIDUAL = [*FINE, *FEW_LEVELS, TOP64]
EVERY = [*WITH_RESIDUAL, *LOGARITHMIC]
SIZES = [
    *(0, 1, 2, 5, 63, 64, 65, 127, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1279, 1280),
    *(1281, 4095, 4096, 4097, 4161, 8192, 100_003),
]
MANY_SIZES = st.one_of(st.sampled_from(SIZES[:-1]), st.integers(0, 6000))
LARGEST = torch.finfo(torch.float32).max
DEGENERATE = {
    "zeros": [0.0, -0.0] * 150,
    "zeros and two magnitudes": [-0.0, 1.0, -2.0] * 50,
    "equal magnitudes": [-1.0, 1.0, 1.0] * 1500,
    "large values": [3e38, 3.4e38, -3.4e38],
    "largest values": [LARGEST, -LARGEST] * 2500,
    "subnormals": [1e-45, -1e-40, 1e-38] * 100,
    "at the smallest scale": [2.0**-100, 2.0**-101, -(2.0**-100)] * 100,
    "below the smallest scale": [2.0**-101] * 100,
    "one huge value": [1e-3] * 3000 + [1e30] + [-1e-3] * 3000,
    "one value": [0.0] * 4095 + [-3.0],
    "one huge among tiny values": [1e-30] * 5000 + [1e8] + [1e-30] * 100,
    "one large among equal values": [1e8] + [1.0] * 300,
    "thirds": [1 / 3] * 77 + [-1 / 3] * 200,
}


def of(chosen: list[Codec]) -> pytest.MarkDecorator:
    """Run a test with each of these codecs."""
    return pytest.mark.parametrize("codec", chosen, ids=lambda codec: codec.name)


def draw(numel: int, seed: int, low: float = -3.0, high: float = 3.0) -> Tensor:
    """Draw values whose magnitude varies by decades between blocks, some of them exact zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=random)
    decades = low + (high - low) * torch.rand(-(-numel // 64), generator=random)
    values *= (10.0 ** decades.repeat_interleave(64)[:numel].double()).float()
    return values.masked_fill_(torch.rand(numel, generator=random) < 0.1, 0.0)


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


def drawn_for(codec: Codec, numel: int, seed: int, *, is_wide: bool = False) -> Tensor:
    """Draw values that the codec is for."""
    if codec in LOGARITHMIC:
        values = draw(numel, seed, -18, 18) if is_wide else draw(numel, seed)
        return values.square() if codec is ULOG8 else values
    if codec in FINE:
        return draw(numel, seed, -30, 30) if is_wide else draw(numel, seed)
    return mixed(numel, seed) if is_wide else draw(numel, seed)


def decode(codec: Codec, data: Tensor, numel: int) -> Tensor:
    """Decode into memory that holds other values."""
    out = torch.full((numel,), torch.nan)
    codec.decode(data, out)
    return out


def round_trip(codec: Codec, values: Tensor, rest: Tensor | None = None) -> Tensor:
    """Encode and decode values. Mutates the residual."""
    return decode(codec, codec.encode(values, residual=rest), values.numel())


def assert_adds(codec: Codec, other: Tensor, data: Tensor, decoded: Tensor) -> None:
    """Assert that the sum of other values, encoded, and of `data` is rounded once."""
    total = torch.full_like(decoded, torch.nan)
    codec.decode_sum(torch.stack((codec.encode(other), data)), total)
    assert bits(total) == bits((torch.zeros_like(decoded) + round_trip(codec, other)) + decoded)


def bits(values: Tensor) -> list[int]:
    """Return bit patterns as integers, which distinguish -0, 0 and NaN."""
    return list(values.view(torch.int32).tolist())


def assert_equals_reference(codec: Codec, values: Tensor) -> None:
    """Assert the decoded values and, for codecs of few levels, all bytes; input is not changed."""
    before, data = values.clone(), codec.encode(values)
    assert data.dtype == torch.uint8 and data.shape == (codec.encoded_bytes(values.numel()),)
    assert bits(values) == bits(before) and torch.equal(codec.encode(values), data)
    expected = quantised(values.numpy(), codec.name)
    np.testing.assert_array_equal(round_trip(codec, values).numpy(), expected)
    if codec is TOP64:
        assert data.numpy().tobytes() == sparse_bytes(values.numpy())
    elif codec in FEW_LEVELS:
        assert_same_codes(codec, values, data, expected)


def assert_same_codes(codec: Codec, values: Tensor, data: Tensor, expected: np.ndarray) -> None:
    """Assert the codes behind the scales, and zeros behind the codes."""
    numel, size = values.numel(), COARSE[codec.name]
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


@of(EVERY)
def test_bytes_equal_the_reference_at_every_size(codec: Codec) -> None:
    """Catches: a short last group or block, a wrong nibble or digit, a scale off by one block."""
    for numel in SIZES:
        for seed in (0, 1):
            assert_equals_reference(codec, drawn_for(codec, numel, seed))


@of(EVERY)
@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_bytes_equal_the_reference_for_all_kinds_of_blocks(
    codec: Codec, numel: int, seed: int
) -> None:
    """Catches: rounding half up, a sum that overflows or depends on the order of its addends, a
    subnormal scale, ties between equal magnitudes that depend on the sort."""
    assert_equals_reference(codec, drawn_for(codec, numel, seed, is_wide=True))


@of([*FEW_LEVELS, TOP64])
@pytest.mark.parametrize("name", DEGENERATE)
def test_bytes_equal_the_reference_for_degenerate_blocks(codec: Codec, name: str) -> None:
    """Catches: nothing is sent of a block of equal magnitudes, a mean of no values."""
    assert_equals_reference(codec, torch.tensor(DEGENERATE[name]))


@of([*FINE, TERNARY, SIGN, *LOGARITHMIC])
@settings(max_examples=20, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000), is_wide=st.booleans())
def test_decoded_values_encode_to_themselves(
    codec: Codec, numel: int, seed: int, is_wide: bool
) -> None:
    """Catches a scale that shrinks with every exchange."""
    has_wide = is_wide and codec not in FEW_LEVELS
    decoded = round_trip(codec, drawn_for(codec, numel, seed, is_wide=has_wide))
    assert bits(round_trip(codec, decoded)) == bits(decoded)


@pytest.mark.parametrize(("codec", "max_code"), [(INT8, 127), (INT4, 7)])
@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
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


@pytest.mark.parametrize(("codec", "max_code"), [(INT8, 127), (INT4, 7)])
def test_codec_rounds_half_to_even(codec: Codec, max_code: int) -> None:
    """Catches rounding half away from zero, which drifts."""
    values = torch.tensor([max_code, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], dtype=torch.float32)
    assert round_trip(codec, values).tolist() == [max_code, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


@of(LOGARITHMIC)
def test_log_code_error_is_relative_to_each_value(codec: Codec) -> None:
    """Over 15 octaves (31 without a sign); not relative to the largest value of the block."""
    octaves = 15 if codec is LOG8 else 31
    values = 2.0 ** -(octaves * torch.rand(256, generator=torch.Generator().manual_seed(1)))
    error = (round_trip(codec, values) / values - 1).abs()
    assert 0.03 < float(error.max()) <= 2 ** (1 / 16) - 1 + 1e-6


@of(LOGARITHMIC)
def test_codes_of_an_octave_begin_at_powers_of_an_eighth(codec: Codec) -> None:
    """A value is decoded to the middle of its code, by logarithms: from 2^(k / 8) on by code k.
    Would catch a bound in the wrong part of the octave, or on the wrong side of its first value."""
    nearest = [(2.0 ** (step / 8), np.float32(2.0 ** (step / 8))) for step in range(1, 8)]
    first = [x if float(x) >= begin else np.nextafter(x, np.float32(2)) for begin, x in nearest]
    before = [np.nextafter(x, np.float32(0)) for x in first]
    values = torch.tensor(np.array([1.0, *first, *before], dtype=np.float32))
    found = round_trip(codec, values)
    middles = [2.0 ** ((2 * step + 1) / 16) for step in range(8)]
    assert found.tolist() == pytest.approx([*middles, *middles[:7]], rel=1e-6)


def test_small_second_moments_do_not_become_zero() -> None:
    """Updates are divided by them: catches an unbounded update next to large values."""
    values = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    assert round_trip(ULOG8, values)[1:3].tolist() == [round_trip(ULOG8, values)[1]] * 2
    assert 1e-10 < float(round_trip(ULOG8, values)[1]) < 1e-9
    assert float(round_trip(ULOG8, values)[3]) == 0.0
    assert round_trip(LOG8, -values)[1:].tolist() == [0.0] * 3
    assert (round_trip(ULOG8, torch.tensor([1e-44, 1e-38])) >= 2.0**-126).all()


@of(WITH_RESIDUAL)
@settings(max_examples=40, deadline=None)
@given(numel=MANY_SIZES, seed=st.integers(0, 1000))
def test_residual_is_what_was_not_sent(codec: Codec, numel: int, seed: int) -> None:
    """Decoded + residual is the value + old residual (of which top64 keeps 0.95): bit for bit;
    with few levels exactly for magnitudes from half the scale on and where zero is sent, else
    within 2^-24 of the scale."""
    values, rest = draw(numel, seed), draw(numel, seed + 1)
    corrected, before = values + (rest * 0.95 if codec is TOP64 else rest), values.clone()
    data = codec.encode(values, residual=rest)
    assert torch.equal(values, before)
    decoded = decode(codec, data, numel)
    assert bits(rest) == bits(corrected - decoded) or codec in FINE
    error = (decoded.double() + rest.double() - corrected.double()).abs()
    assert (error <= 2.0**-24 * decoded.abs()).all()
    assert not error[corrected.abs() >= 0.5 * decoded.abs()].any() or codec is TOP64
    assert not error.any() or codec not in FINE
    assert torch.equal(codec.encode(corrected), data)
    assert_adds(codec, draw(numel, seed + 2), data, decoded)


@of(EVERY)
def test_codes_do_not_depend_on_slab_size(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scales, codes or places of the second slab written over those of the first."""
    numel, has_rest = 40_001, codec in WITH_RESIDUAL
    values, one = drawn_for(codec, numel, 3), drawn_for(codec, numel, 4)
    rest = one.clone() if has_rest else None
    whole = codec.encode(values, residual=rest)
    decoded = decode(codec, whole, numel)
    for slab in (512, 9000):
        monkeypatch.setitem(codecs._SLAB_NUMEL, "cpu", slab)
        again = one.clone() if has_rest else None
        assert torch.equal(codec.encode(values, residual=again), whole)
        assert again is None or rest is None or bits(again) == bits(rest)
        assert bits(decode(codec, whole, numel)) == bits(decoded)
        assert_adds(codec, one, whole, decoded)


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        (BF16, 2.0), (INT8, 1.02), (INT4, 0.52), (INT2, 0.254), (TERNARY, 0.208), (SIGN, 0.129),
        (TOP64, 116 / 4096), (LOG8, 1.02), (ULOG8, 1.02),
    ],
)  # fmt: skip
def test_encoded_bytes_per_value_are_bounded(codec: Codec, bound: float) -> None:
    """Sizes are multiples of 4 bytes, so that encoded units can be concatenated."""
    for numel in (1 << 20, 3 * 256 if codec in FINE else 0):
        assert codec.encoded_bytes(numel) <= bound * numel
    assert codec.encoded_bytes(0) == 0
    assert all(codec.encoded_bytes(numel) % 4 == 0 for numel in range(9000))


@of(EVERY)
def test_zero_bytes_decode_to_zeros(codec: Codec) -> None:
    """A replica that is left out sends zero bytes; zeros encode to them, too."""
    for numel in SIZES[:-1]:
        zeros = torch.zeros(numel)
        data = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8)
        assert bits(decode(codec, data, numel)) == [0] * numel
        assert not codec.encode(zeros).any() and not (
            codec is not BF16 and codec.encode(-zeros).any()
        )
        assert_adds(codec, drawn_for(codec, numel, 1), data, zeros)


@of(WITH_RESIDUAL[1:])
def test_largest_and_smallest_fp32_are_encoded(codec: Codec) -> None:
    """The largest values stay finite; the smallest become zero and remain in the residual."""
    values = torch.full((600,), LARGEST)
    values[::2] *= -1
    decoded = round_trip(codec, values)
    sent = decoded != 0
    assert decoded.isfinite().all() and (decoded / values > 0.99)[sent].all() and sent.any()
    tiny, rest = torch.tensor([1e-40, -1e-36]), torch.zeros(2)
    assert not codec.encode(tiny, residual=rest).any() and bits(rest) == bits(tiny)


@of(EVERY)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_value_decodes_to_nonfinite_block(codec: Codec, value: float) -> None:
    """All values of the poisoned block and their residual are non-finite; no others are, also in
    the sum with others."""
    numel = 10_000
    values = drawn_for(codec, numel, 1)
    clean = round_trip(codec, values)
    for place in (5000, numel - 1):
        poisoned, rest = values.clone(), torch.zeros(numel) if codec in WITH_RESIDUAL else None
        poisoned[place] = value
        data = codec.encode(poisoned, residual=rest)
        decoded, total = decode(codec, data, numel), torch.empty(numel)
        codec.decode_sum(torch.stack((codec.encode(values), data)), total)
        size = codec.block_numel
        inside = torch.arange(numel) // size == place // size
        for each in (decoded, total) if rest is None else (decoded, total, rest):
            assert not each[inside].isfinite().any() and each[~inside].isfinite().all()
        assert bits(decoded[~inside]) == bits(clean[~inside])


@of([*FINE, *FEW_LEVELS])
@settings(max_examples=20, deadline=None)
@given(numel=st.sampled_from([1, 3, 300, 700]), seed=st.integers(0, 100))
def test_error_feedback_converges_to_the_true_mean(codec: Codec, numel: int, seed: int) -> None:
    """The mean of n rounds is off by the last residual / n, even of a single value."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    rest, total = torch.zeros(numel), torch.zeros(numel).double()
    for _ in range(200):
        total += round_trip(codec, values, rest)
    error = (total / 200 - values).abs().max()
    assert error <= float(rest.abs().max()) / 200 + 1e-5
    assert numel > 1 or error <= 1e-3 * values.abs()
    if numel >= 300 and codec in FINE:
        assert error < 0.05 * (round_trip(codec, values) - values).abs().max()


@of(FEW_LEVELS)
def test_residual_of_changing_values_stays_bounded(codec: Codec) -> None:
    """Catches error feedback that diverges. (With the same values in every exchange the largest
    ones of a block catch up only when their residual has raised the scale.)"""
    random, rest = torch.Generator().manual_seed(0), torch.zeros(5120)
    for _ in range(100):
        codec.encode(values := torch.randn(5120, generator=random), residual=rest)
    assert rest.norm() < 0.8 * values.norm()


def test_unsent_values_add_up_until_they_are_sent() -> None:
    """Catches: a residual that decays twice, or not at all, or that is not added to the values."""
    rest, num_sent = torch.zeros(8192), torch.zeros(8192)
    values = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    for _ in range(200):
        num_sent += round_trip(TOP64, values, rest) != 0
    assert (rest.abs() <= 20.0 * values.abs().max()).all()  # 1 / (1 - 0.95)
    assert (num_sent > 0).sum() > 10 * 128 and num_sent.max() < 100
    single = torch.full((1,), 8.0)
    assert 7.5 < round_trip(TOP64, torch.zeros(1), single) <= 7.6  # 0.95 x 8
    assert single.abs() < 0.1


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
@of(EVERY)
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
@of(WITH_RESIDUAL)
def test_codec_bytes_are_equal_on_cpu_and_cuda(codec: Codec) -> None:
    """Values encoded on either device can be decoded on the other, with equal residuals."""
    values, rest = drawn_for(codec, 100_003, 2, is_wide=codec not in FINE), draw(100_003, seed=3)
    there = rest.cuda()
    data = codec.encode(values, residual=rest)
    assert torch.equal(codec.encode(values.cuda(), residual=there).cpu(), data)
    assert torch.equal(there.cpu(), rest)
    decoded, expected = torch.empty(values.numel(), device="cuda"), torch.empty(values.numel())
    codec.decode(data.cuda(), decoded)
    codec.decode(data, expected)
    assert torch.equal(decoded.cpu(), expected)
