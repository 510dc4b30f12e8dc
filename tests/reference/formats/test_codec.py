"""Formats: golden vectors, floor rules, one rounding, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from needlepoint.reference.formats import (
    BF16,
    FLOAT64,
    FORMATS,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_NO_FLOOR,
    FP8_PLAIN,
    FP8_POW2,
    FP32,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
    Encoded,
    Floor,
    Format,
    ScaleKind,
    block_scales,
    decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    encode,
    round_to_bf16,
    rounding_cell,
    scale_values,
)

SCALED = [f for f in FORMATS.values() if f.scale is not ScaleKind.NONE]
POWERS = [f for f in SCALED if f.scale is ScaleKind.UE8M0]
BOTH = [torch.float32, torch.float64]


def row(values: list[float], fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return one block, zeros after the given values."""
    x = torch.zeros(fmt.block, dtype=dtype)
    x[: len(values)] = torch.tensor(values, dtype=dtype)
    return x


def round_trip(values: list[float], fmt: Format, dtype: torch.dtype) -> tuple[float, list[float]]:
    """Return the scale of a block and what the leading values decode to."""
    encoded = encode(row(values, fmt, dtype), fmt)
    assert encoded.scales is not None
    decoded = decode(encoded, fmt)
    assert not decoded[len(values) :].any()
    return scale_values(encoded.scales, fmt).item(), decoded[: len(values)].tolist()


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([448, 1, -0.30078125, 17], 1.0, [448, 1, -0.3125, 16]),
        ([450, 27], 2.0, [448, 28]),
        ([1, 0.0018997, 0.100098, -0.769531], 2.0**-8, [1, 0.001953125, 0.1015625, -0.75]),
        ([3.515625, 0.25], 2.0**-6, [3.5, 0.25]),
    ],
)
def test_golden_main_fp8(
    values: list[float], scale: float, expected: list[float], dtype: torch.dtype
) -> None:
    assert round_trip(values, MAIN_FP8, dtype) == (scale, expected)
    assert round_trip(values, MAIN_FP8_SCALE_FLOOR, dtype) == (scale, expected)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("values", "scale", "expected"),
    [
        ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25], 1.0, [6, 0, 1, 1, 2, 2, 4, 4, -0.0]),
        ([6.03125, 1, 0.5], 2.0, [6, 1, 0]),
        ([1, 0.100098, -0.300781], 0.25, [1, 0.125, -0.25]),
        ([7.9, 5.2], 2.0, [8, 6]),  # fault_log H06; a floored exponent would give [6, 6]
    ],
)
def test_golden_fp4_official(
    values: list[float], scale: float, expected: list[float], dtype: torch.dtype
) -> None:
    got_scale, got = round_trip(values, FP4_OFFICIAL, dtype)

    assert (got_scale, got) == (scale, expected)
    assert [math.copysign(1, v) for v in got] == [math.copysign(1, v) for v in expected]


def test_golden_fp4_sglang_ties_toward_zero_and_drops_the_sign_of_zero() -> None:
    values = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75]
    scale, got = round_trip(values, FP4_SGLANG, torch.float32)

    assert (scale, got) == (1.0, [6, 0, 0.5, 1, 1.5, 2, 3, 4, 0, -0.5])
    assert math.copysign(1, got[8]) == 1


def test_negative_zero_is_kept_where_the_conversion_keeps_it() -> None:
    x = row([1, -0.0], FP4_OFFICIAL)

    assert encode(x, FP4_OFFICIAL).codes[1] == 8
    assert encode(x, FP4_SGLANG).codes[1] == 0
    for fmt in (MAIN_FP8, FP8_PLAIN):
        assert encode(row([1, -0.0], fmt), fmt).codes[1] == 0x80


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("fmt", "scale"),
    [
        (FP8_PLAIN, float(np.float32(1e-4) / np.float32(448))),
        (FP8_NO_FLOOR, 0.0),
        (FP8_POW2, 2.0**-22),
        (MAIN_FP8, 2.0**-22),
        (MAIN_FP8_SCALE_FLOOR, 2.0**-13),
        (FP4_OFFICIAL, 2.0**-126),
        (FP4_SGLANG, 2.0**-15),
    ],
)
def test_scale_of_an_empty_block(fmt: Format, scale: float, dtype: torch.dtype) -> None:
    assert round_trip([], fmt, dtype) == (scale, [])


def test_floors_act_below_their_own_threshold_only() -> None:
    """Amax and scale floor part ways at amax = 448 * 2**-14 and below."""
    edge = 448 * 2.0**-14
    points = torch.tensor(
        [edge, math.nextafter(edge, 1), edge / 2, 2e-4, 1e-4], dtype=torch.float64
    )
    x = torch.stack([row([float(p)], MAIN_FP8, torch.float64) for p in points])
    exact = replace(MAIN_FP8, pre_round_bf16=False)
    scale_floor = replace(MAIN_FP8_SCALE_FLOOR, pre_round_bf16=False)

    assert (block_scales(x, exact).squeeze(-1).long() - 127).tolist() == [-14, -13, -15, -21, -22]
    assert (block_scales(x, scale_floor).squeeze(-1).long() - 127).tolist() == [-13] * 5


def test_floor_after_the_division_of_a_plain_scale() -> None:
    fmt = replace(FP8_PLAIN, name="plain-scale-floor", floor=Floor.SCALE_1E4)
    x = torch.stack([row([v], fmt) for v in (0.0, 0.04, 0.05)])

    floor = float(np.float32(1e-4))
    expected = [floor, floor, float(np.float32(0.05) / np.float32(448))]
    assert block_scales(x, fmt).squeeze(-1).tolist() == expected


def test_no_floor_survives_a_scale_that_underflows() -> None:
    """Amax / 448 is below half of the smallest fp32 number: the scale is 0, the values stay."""
    encoded = encode(row([1e-43, -1e-43], FP8_NO_FLOOR), FP8_NO_FLOOR)

    assert encoded.scales is not None
    assert encoded.scales.tolist() == [0.0]
    assert encoded.codes[:3].tolist() == [0, 0x80, 0]
    assert not decode(encoded, FP8_NO_FLOOR).any()


def test_plain_scale_is_the_fp32_division() -> None:
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 7 + 1e-3
    x = torch.zeros(4096, 128)
    x[:, 77] = -amax

    expected = amax.numpy() / np.float32(448)
    np.testing.assert_array_equal(block_scales(x, FP8_PLAIN).squeeze(-1).numpy(), expected)
    double = block_scales(x.to(torch.float64), FP8_PLAIN)
    np.testing.assert_array_equal(double.squeeze(-1).numpy(), expected)


def test_plain_scale_of_a_float64_row_is_rounded_once() -> None:
    """Amax / 448 one float64 step beside an fp32 midpoint, judged by exact rationals."""
    rng = np.random.default_rng(2)
    low = rng.uniform(1e-3, 1.0, 3000).astype(np.float32)
    high = np.nextafter(low, np.float32(1))
    tie = (low.astype(np.float64) + high.astype(np.float64)) / 2 * 448
    for amax, expected in ((np.nextafter(tie, 1e9), high), (np.nextafter(tie, 0), low)):
        x = torch.zeros(len(amax), 128, dtype=torch.float64)
        x[:, 3] = torch.from_numpy(amax)
        np.testing.assert_array_equal(block_scales(x, FP8_PLAIN).squeeze(-1).numpy(), expected)


def test_codes_under_a_plain_scale_are_nearest_by_exact_rationals() -> None:
    """Values one float64 step beside midpoint * scale: the quotient must not become the tie."""
    rng = np.random.default_rng(4)
    values = e4m3_decode(torch.arange(127).to(torch.uint8)).numpy()
    x = np.zeros((400, 128))
    x[:, 0] = rng.uniform(0.3, 3.0, 400)
    scale = block_scales(torch.from_numpy(x), FP8_PLAIN).squeeze(-1).double().numpy()
    lower = rng.integers(0, 126, (400, 127))
    tie = (values[lower] + values[lower + 1]) / 2 * scale[:, None]
    up = rng.random((400, 127)) < 0.5
    x[:, 1:] = np.where(up, np.nextafter(tie, 9.0), np.nextafter(tie, 0.0))
    keep = x[:, 1:] <= x[:, :1]  # a larger value would move the scale
    x[:, 1:] = np.where(keep, x[:, 1:], 0)

    codes = encode(torch.from_numpy(x), FP8_PLAIN).codes[:, 1:].numpy()
    assert keep.mean() > 0.9
    np.testing.assert_array_equal(codes[keep], (lower + up)[keep])
    i, j = (int(v) for v in np.argwhere(keep & up)[0])
    middle = Fraction(values[lower[i, j]]) + Fraction(values[lower[i, j] + 1])
    assert Fraction(x[i, j + 1]) > middle / 2 * Fraction(scale[i])


def test_unscaled_formats() -> None:
    witness = 1 + 2.0**-8 + 2.0**-40
    x = torch.tensor([witness, -0.0, 1 + 2.0**-24 + 2.0**-50], dtype=torch.float64)

    assert torch.equal(decode(encode(x, FLOAT64), FLOAT64), x)
    bf16 = encode(x, BF16)
    assert bf16.codes.dtype == torch.bfloat16
    assert bf16.scales is None
    assert decode(bf16, BF16).tolist() == [1 + 2.0**-7, -0.0, 1.0]
    fp32 = encode(x, FP32)
    assert fp32.codes.dtype == torch.float32
    assert decode(fp32, FP32).tolist() == [float(np.float32(witness)), -0.0, 1 + 2.0**-23]


def test_main_rows_are_rounded_to_bf16_before_amax_and_division() -> None:
    """448.5 becomes 448 in bf16 and keeps scale 1; unrounded it needs scale 2."""
    x = row([448.5, 17.01], MAIN_FP8, torch.float64)

    assert round_trip([448.5, 17.01], MAIN_FP8, torch.float64) == (1.0, [448, 16])
    unrounded = replace(MAIN_FP8, pre_round_bf16=False)
    assert round_trip([448.5, 17.01], unrounded, torch.float64) == (2.0, [448, 18])
    assert block_scales(x, MAIN_FP8).tolist() == [127]


def test_dividing_by_the_raw_scale_and_storing_the_rounded_one_is_seen() -> None:
    """fault_log H01: round trip about 0.02 when right, several times that when wrong."""
    x = torch.randn(128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    encoded = encode(x, FP8_POW2)

    raw = x.abs().max() / 448
    assert encoded.scales is not None
    wrong = Encoded(e4m3_encode(x / raw), encoded.scales)
    right_error = float((decode(encoded, FP8_POW2) - x).norm() / x.norm())
    wrong_error = float((decode(wrong, FP8_POW2) - x).norm() / x.norm())
    assert right_error < 0.03
    assert wrong_error > 4 * right_error


def test_floored_exponent_is_told_apart_from_the_ceiling() -> None:
    """fault_log H06: with the exponent rounded down both values saturate at 6."""
    x = row([7.9, 5.2], FP4_OFFICIAL)
    encoded = encode(x, FP4_OFFICIAL)
    assert encoded.scales is not None

    floored = Encoded(e2m1_encode(x), encoded.scales - 1)
    assert decode(floored, FP4_OFFICIAL)[:2].tolist() == [6, 6]
    assert decode(encoded, FP4_OFFICIAL)[:2].tolist() == [8, 6]


@pytest.mark.parametrize("fmt", POWERS, ids=lambda f: f.name)
def test_power_of_two_scales_agree_with_ml_dtypes(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(200, 2 * fmt.block, generator=generator)
    x *= torch.pow(2.0, torch.randint(-9, 9, (200, 1), generator=generator).float())
    encoded = encode(x, fmt)
    assert encoded.scales is not None
    prepared = x.bfloat16().float() if fmt.pre_round_bf16 else x

    steps = encoded.scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    scaled = prepared.numpy() / np.repeat(steps, fmt.block, axis=1)
    small = ml_dtypes.float8_e4m3fn if fmt.element == "e4m3" else ml_dtypes.float4_e2m1fn
    expected = scaled.astype(small).astype(np.float64)
    got = decode(Encoded(encoded.codes, torch.full_like(encoded.scales, 127)), fmt).numpy()
    np.testing.assert_array_equal(got, expected)


@settings(deadline=None, max_examples=60)
@given(
    fmt=st.sampled_from(SCALED),
    dtype=st.sampled_from(BOTH),
    rows=st.integers(0, 5),
    blocks=st.integers(1, 3),
    octave=st.integers(-40, 40),
    seed=st.integers(0, 2**31),
)
def test_every_scaled_value_lies_in_the_cell_of_its_code(
    fmt: Format, dtype: torch.dtype, rows: int, blocks: int, octave: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, blocks * fmt.block)
    x = torch.randn(shape, dtype=dtype, generator=generator) * 2.0**octave
    encoded = encode(x, fmt)
    assert encoded.scales is not None
    assert encoded.codes.shape == shape
    assert encoded.scales.shape == (rows, blocks)
    assert torch.equal(encoded.scales, block_scales(x, fmt))

    prepared = (round_to_bf16(x) if fmt.pre_round_bf16 else x).to(torch.float64)
    steps = scale_values(encoded.scales, fmt).repeat_interleave(fmt.block, -1)
    lower, upper = rounding_cell(encoded.codes, fmt)
    assert bool((prepared >= lower * steps).all())
    assert bool((prepared <= upper * steps).all())
    again = decode(encoded, fmt)
    if fmt.scale is ScaleKind.UE8M0:
        assert torch.equal(decode(encode(again, fmt), fmt), again)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_value_that_is_no_number_is_named(fmt: Format, bad: float) -> None:
    x = torch.zeros(3, 128)
    x[1, 40] = bad

    with pytest.raises(ValueError, match=rf"encode {fmt.name}: value {bad} at index \(1, 40\)"):
        encode(x, fmt)


def test_values_beyond_fp32_are_refused_except_in_float64() -> None:
    x = torch.full((1, 128), 1e39, dtype=torch.float64)

    assert torch.equal(encode(x, FLOAT64).codes, x)
    for fmt in (BF16, FP32, FP8_PLAIN, FP4_OFFICIAL):
        with pytest.raises(ValueError, match=r"1e\+39 at index \(0, 0\)"):
            encode(x, fmt)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 100\).*multiple of the block 128"):
        encode(torch.zeros(4, 100), FP8_PLAIN)
    with pytest.raises(ValueError, match=r"shape \(\).*multiple of the block 32"):
        encode(torch.tensor(1.0), FP4_OFFICIAL)
    with pytest.raises(ValueError, match=r"encode bf16: got dtype torch\.bfloat16"):
        encode(torch.zeros(4, dtype=torch.bfloat16), BF16)
    with pytest.raises(ValueError, match="block_scales: format 'bf16' has no scales"):
        block_scales(torch.zeros(4), BF16)
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales \(2, 2\), expected one scale for each 128 codes"):
        decode(Encoded(codes, torch.zeros(2, 2)), FP8_PLAIN)
    with pytest.raises(ValueError, match="scales None"):
        decode(Encoded(codes), FP8_PLAIN)
    with pytest.raises(ValueError, match=r"codes \(2, 100\)"):
        decode(Encoded(codes[:, :100], torch.zeros(2, 0)), FP8_PLAIN)
    with pytest.raises(ValueError, match=r"torch\.uint8 scales for format 'fp8-plain'"):
        decode(Encoded(codes, torch.zeros(2, 1, dtype=torch.uint8)), FP8_PLAIN)
    with pytest.raises(ValueError, match=r"torch\.float32 scales for format 'bf16'"):
        scale_values(torch.ones(1), BF16)
    with pytest.raises(ValueError, match=r"ue8m0_decode: got dtype torch\.float32"):
        decode(Encoded(codes, torch.zeros(2, 1)), FP8_POW2)
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16 and no scales"):
        decode(Encoded(torch.zeros(4)), BF16)
    with pytest.raises(ValueError, match="and no scales"):
        decode(Encoded(torch.zeros(4), torch.zeros(1)), FP32)


def test_formats_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="element 'e5m2', expected one of"):
        Format("x", "e5m2", ScaleKind.FP32, 128, Floor.AMAX_1E4)
    with pytest.raises(ValueError, match="scale 'none' with block 0 for element 'e4m3'"):
        Format("x", "e4m3")
    with pytest.raises(ValueError, match="scale 'fp32' with block 128 for element 'bf16'"):
        Format("x", "bf16", ScaleKind.FP32, 128)
    with pytest.raises(ValueError, match="scale 'fp32' with block 0"):
        Format("x", "e4m3", ScaleKind.FP32, 0)
    with pytest.raises(ValueError, match="UE8M0 scale cannot be zero"):
        Format("x", "e4m3", ScaleKind.UE8M0, 64)


def test_presets_are_found_by_name() -> None:
    assert all(FORMATS[name].name == name for name in FORMATS)
    assert len(FORMATS) == 10
    assert [FORMATS[n].max_value for n in ("fp8-plain", "fp4-official")] == [448.0, 6.0]


def test_inputs_are_not_modified() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    for fmt in FORMATS.values():
        encoded = encode(x, fmt)
        codes = encoded.codes.clone()
        decode(encoded, fmt)
        assert torch.equal(encoded.codes, codes)
    assert torch.equal(x, before)
