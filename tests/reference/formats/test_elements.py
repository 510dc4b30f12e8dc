"""Element codecs against ml-dtypes and gfloat: every code, and every input where rounding turns."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from needlepoint.reference.formats import (
    Ties,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack_e2m1,
    round_to_bf16,
    to_bf16,
    unpack_e2m1,
)

Floats = NDArray[np.float64]

ENCODE = {"e4m3": e4m3_encode, "e2m1": e2m1_encode}
DECODE = {"e4m3": e4m3_decode, "e2m1": e2m1_decode}
CODES = {"e4m3": 256, "e2m1": 16}
ML_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
GFLOAT = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}


def all_codes(element: str) -> torch.Tensor:
    return torch.arange(CODES[element], dtype=torch.int64).to(torch.uint8)


def magnitudes(element: str) -> Floats:
    """Return the non-negative finite values, ascending, from ml-dtypes."""
    half = np.arange(CODES[element] // 2, dtype=np.uint8)
    values: Floats = half.view(ML_DTYPE[element]).astype(np.float64)
    return values[np.isfinite(values)]


def midpoints(element: str) -> Floats:
    values = magnitudes(element)
    return (values[1:] + values[:-1]) / 2


def all_bf16() -> Floats:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values: Floats = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    return values[np.isfinite(values)]


def neighbours(values: Floats, dtype: type[np.floating]) -> Floats:
    """Return each value with its two neighbours on either side in the given precision."""
    centre = values.astype(dtype)
    up, down = np.nextafter(centre, dtype(np.inf)), np.nextafter(centre, dtype(-np.inf))
    up2, down2 = np.nextafter(up, dtype(np.inf)), np.nextafter(down, dtype(-np.inf))
    return np.concatenate([centre, up, down, up2, down2]).astype(np.float64)


def turning_points(element: str) -> Floats:
    """Return every value of interest of an element, both signs."""
    ends = np.array([0.0, 1e-45, 5e-324, 2.0**-133, 3e38, 1e300, np.inf])
    exact = np.concatenate([magnitudes(element), midpoints(element), [464.0, 480.0, 7.0, 8.0]])
    positive = np.concatenate([ends, neighbours(exact, np.float32), neighbours(exact, np.float64)])
    return np.concatenate([all_bf16(), positive, -positive])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_every_code_decodes_like_ml_dtypes_and_gfloat(element: str) -> None:
    codes = all_codes(element)
    ours = DECODE[element](codes).numpy()

    theirs = codes.numpy().view(ML_DTYPE[element]).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    number = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))
    third = gfloat.decode_ndarray(GFLOAT[element], codes.numpy())
    np.testing.assert_array_equal(ours, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_every_code_encodes_to_itself(element: str, dtype: torch.dtype) -> None:
    codes = all_codes(element)
    values = DECODE[element](codes)
    number = ~torch.isnan(values)

    assert torch.equal(ENCODE[element](values[number].to(dtype)), codes[number])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_ties_to_even_rounds_like_gfloat_from_float64(element: str) -> None:
    x = turning_points(element)
    codes = ENCODE[element](torch.from_numpy(x))

    expected = gfloat.round_ndarray(GFLOAT[element], x, gfloat.RoundMode.TiesToEven, sat=True)
    ours = DECODE[element](codes).numpy()
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(x))


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_ties_to_even_gives_the_codes_of_ml_dtypes_from_float32(element: str) -> None:
    with np.errstate(over="ignore"):
        x = turning_points(element).astype(np.float32)
    codes = ENCODE[element](torch.from_numpy(x)).numpy()

    top = np.float32(magnitudes(element)[-1])  # ml-dtypes overflows to NaN instead of saturating
    expected = np.clip(x, -top, top).astype(ML_DTYPE[element]).view(np.uint8)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_ties_to_zero_counts_thresholds(element: str, dtype: type[np.floating]) -> None:
    with np.errstate(over="ignore"):
        x = turning_points(element).astype(dtype)
    codes = ENCODE[element](torch.from_numpy(x), Ties.ZERO).numpy()

    magnitude = np.searchsorted(midpoints(element), np.abs(x.astype(np.float64)), side="left")
    sign = np.signbit(x) * np.uint8(CODES[element] // 2)
    if element == "e2m1":
        sign = np.where(magnitude == 0, 0, sign)  # the threshold quantiser has no negative zero
    np.testing.assert_array_equal(codes, magnitude + sign)


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_tie_rules_differ_at_midpoints_with_an_odd_lower_code_and_nowhere_else(
    element: str,
) -> None:
    x = np.unique(np.abs(turning_points(element)))
    even = ENCODE[element](torch.from_numpy(x), Ties.EVEN).numpy()
    zero = ENCODE[element](torch.from_numpy(x), Ties.ZERO).numpy()

    odd_lower = midpoints(element)[1::2]
    np.testing.assert_array_equal(x[even != zero], odd_lower)


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_float64_is_rounded_once(element: str) -> None:
    """A step that fp32 cannot see decides the code; a route through fp32 would miss it."""
    ties = midpoints(element)
    above = ties + ties * 2.0**-40
    below = ties - ties * 2.0**-40
    codes = np.arange(len(ties))

    np.testing.assert_array_equal(ENCODE[element](torch.from_numpy(above)).numpy(), codes + 1)
    np.testing.assert_array_equal(ENCODE[element](torch.from_numpy(below)).numpy(), codes)
    for moved in (above, below):
        np.testing.assert_array_equal(moved.astype(np.float32), ties.astype(np.float32))


def test_encoding_keeps_shape_and_crosses_chunks() -> None:
    x = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(3))
    codes = e4m3_encode(x)

    assert codes.shape == x.shape
    np.testing.assert_array_equal(codes.numpy(), x.numpy().astype(ML_DTYPE["e4m3"]).view(np.uint8))
    assert e4m3_encode(x[:0]).shape == (0, 70_001)


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_nan_is_named(element: str) -> None:
    x = torch.zeros(4, 7)
    x[2, 5] = math.nan

    with pytest.raises(ValueError, match=r"index \(2, 5\) is NaN"):
        ENCODE[element](x)


def test_codec_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"e4m3_encode: got dtype torch\.bfloat16"):
        e4m3_encode(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"e4m3 codes: got dtype torch\.int8"):
        e4m3_decode(torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"16 at index \(1,\), expected 0 \.\. 15; packed bytes"):
        e2m1_decode(torch.tensor([3, 16], dtype=torch.uint8))
    with pytest.raises(ValueError, match="round_to_bf16: got dtype"):
        round_to_bf16(torch.zeros(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="to_bf16: got dtype"):
        to_bf16(torch.zeros(2, dtype=torch.int32))


def test_packing_puts_the_even_dim_into_the_low_nibble() -> None:
    codes = torch.arange(256, dtype=torch.int64)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1).to(torch.uint8)

    assert torch.equal(pack_e2m1(pairs).squeeze(-1), codes.to(torch.uint8))
    assert torch.equal(unpack_e2m1(pack_e2m1(pairs)), pairs)
    packed = pack_e2m1(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x43]]
    reference = np.array([1, 2, 3, 4], np.uint8).view(ML_DTYPE["e2m1"]).astype(np.float64)
    assert e2m1_decode(unpack_e2m1(packed))[0].tolist() == reference.tolist()


def test_packing_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="last axis has 3 codes"):
        pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="200 at index"):
        pack_e2m1(torch.tensor([0, 200], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"unpack_e2m1: got dtype torch\.int64"):
        unpack_e2m1(torch.zeros(2, dtype=torch.int64))


def bf16_turning_points() -> tuple[Floats, NDArray[np.uint16], NDArray[np.uint16]]:
    """Return every midpoint of adjacent positive bf16 numbers, the lower and the upper bits."""
    lower = np.arange(0x7F7F, dtype=np.uint16)
    values = all_bf16()[: len(lower) + 1]
    return (values[:-1] + values[1:]) / 2, lower, lower + np.uint16(1)


def bits_of(x: torch.Tensor) -> NDArray[np.uint16]:
    return to_bf16(x).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bf16_midpoints_and_their_float64_and_float32_neighbours(sign: float) -> None:
    ties, lower, upper = bf16_turning_points()
    flip = np.uint16(0x8000 if sign < 0 else 0)
    even = np.where(lower % 2 == 0, lower, upper)

    for dtype in (np.float32, np.float64):
        exact = ties.astype(dtype)
        np.testing.assert_array_equal(exact.astype(np.float64), ties)
        above, below = np.nextafter(exact, dtype(np.inf)), np.nextafter(exact, dtype(0))
        for x, expected in ((exact, even), (above, upper), (below, lower)):
            got = bits_of(torch.from_numpy(x) * sign)
            np.testing.assert_array_equal(got, expected ^ flip)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_bf16_number_is_kept(dtype: type[np.floating]) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        x = torch.from_numpy(bits.view(ml_dtypes.bfloat16).astype(dtype))
    rounded = round_to_bf16(x)

    assert rounded.dtype == x.dtype
    assert torch.equal(torch.isnan(rounded), torch.isnan(x))
    number = ~torch.isnan(x)
    np.testing.assert_array_equal(bits_of(x[number]), bits[number.numpy()])


def test_bf16_from_float32_is_ml_dtypes_on_random_bit_patterns() -> None:
    bits = np.random.default_rng(5).integers(0, 1 << 32, 400_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]

    expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bits_of(torch.from_numpy(x)), expected)


def test_bf16_overflow_starts_at_the_midpoint_after_the_largest_number() -> None:
    edge = (2 - 2.0**-8) * 2.0**127
    x = torch.tensor([edge, math.nextafter(edge, 0), -edge, 1e300, math.inf], dtype=torch.float64)
    largest = (2 - 2.0**-7) * 2.0**127

    assert round_to_bf16(x).tolist() == [math.inf, largest, -math.inf, math.inf, math.inf]


def test_torch_rounds_float64_to_bf16_twice_and_round_to_bf16_does_not() -> None:
    """1 + 2**-8 + 2**-40 is above the tie between 1 and 1 + 2**-7, and fp32 cannot tell."""
    witness = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)

    assert witness.to(torch.float32).item() == 1 + 2.0**-8
    assert witness.to(torch.bfloat16).item() == 1.0  # the double rounding that is avoided
    assert round_to_bf16(witness).item() == 1 + 2.0**-7
    assert round_to_bf16(-witness).item() == -(1 + 2.0**-7)
    nearest = min((1.0, 1 + 2.0**-7), key=lambda v: abs(Fraction(v) - Fraction(witness.item())))
    assert nearest == 1 + 2.0**-7


def test_bf16_from_float64_is_nearest_by_exact_rationals() -> None:
    rng = np.random.default_rng(11)
    ties, lower, upper = bf16_turning_points()
    pick = rng.integers(0, len(ties), 2_000)
    # Distances from the tie between a float64 step and an fp32 step: what a second rounding loses.
    relative = rng.choice([-1.0, 1.0], 2_000) * 2.0 ** rng.uniform(-52, -20, 2_000)
    x = ties[pick] * (1 + relative)
    got = bits_of(torch.from_numpy(x))

    for value, tie, low, high, bits in zip(
        x, ties[pick], lower[pick], upper[pick], got, strict=True
    ):
        if Fraction(value) != Fraction(tie):
            assert bits == (high if Fraction(value) > Fraction(tie) else low)
