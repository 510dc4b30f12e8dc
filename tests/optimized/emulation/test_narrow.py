"""Encoders against the format definitions, every code and every midpoint; the scale rules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from needlepoint.optimized.emulation.narrow import (
    ceil_exponent,
    store_bf16,
    store_fp4,
    store_fp8,
    store_main_fp8,
    to_bf16,
    to_e2m1,
    to_e4m3,
    widen_bf16,
)
from needlepoint.reference import formats

F32 = npt.NDArray[np.float32]


def every_bf16() -> F32:
    """Return every finite bf16 number and its two fp32 neighbours."""
    values = widen_bf16(np.arange(1 << 16, dtype=np.uint16))
    values = values[np.isfinite(values)]
    bits = values.view(np.uint32)
    return np.concatenate((values, (bits + 1).view(np.float32), (bits - 1).view(np.float32)))


def finite(x: F32) -> F32:
    return x[np.isfinite(x)]


def column(*values: float, width: int) -> F32:
    """Return one row as a channels-first block [width, 1], zeros after the values."""
    row = np.zeros((width, 1), np.float32)
    row[: len(values), 0] = values
    return row


def codes_of(rows: npt.NDArray[np.uint8], count: int) -> list[int]:
    return [int(v) for v in rows[0, :count]]


def test_bf16_every_tie_and_neighbour() -> None:
    high = np.arange(0, 0x7F80, 3, dtype=np.uint32) << 16
    x = np.concatenate([(high | low).view(np.float32) for low in (0x7FFF, 0x8000, 0x8001, 1)])
    x = np.concatenate((x, -x))
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(x), expected)


def test_e4m3_equals_the_format() -> None:
    x = finite(every_bf16())
    expected = formats.e4m3_encode(torch.from_numpy(x)).numpy()
    assert np.array_equal(to_e4m3(x), expected)


def test_e2m1_equals_the_format() -> None:
    x = finite(every_bf16())
    expected = formats.e2m1_encode(torch.from_numpy(x)).numpy()
    assert np.array_equal(to_e2m1(x), expected)


def test_fp8_keeps_the_sign_of_zero() -> None:
    assert to_e4m3(np.array([-1e-9, 1e-9, -0.0], np.float32)).tolist() == [0x80, 0, 0x80]
    assert to_e2m1(np.array([-1e-9, 0.25, -0.25], np.float32)).tolist() == [8, 0, 8]


def test_ceil_exponent_next_to_powers_of_two() -> None:
    powers = 2.0 ** np.arange(-126, 127).astype(np.float32)
    for g, more in ((powers, 0), (np.nextafter(powers, np.float32(np.inf)), 1)):
        expected = np.log2(powers.astype(np.float64)).astype(int) + 127 + more
        assert np.array_equal(ceil_exponent(g.astype(np.float32)), expected)


@pytest.mark.parametrize("amax", [1e-9, 1e-4, 2e-4, 0.3, 447.9, 448, 1e6])
def test_fp8_scale_is_one_division(amax: float) -> None:
    stored = store_fp8(column(amax, -amax, width=128))
    scale = stored.scales.view("<f4")[0, 0]
    assert scale == np.maximum(np.float32(amax), np.float32(1e-4)) / np.float32(448)
    assert stored.values.shape == (1, 128)
    if amax >= 1e-4:
        assert codes_of(stored.values, 3) == [0x7E, 0xFE, 0]


def test_fp8_multiplies_by_the_inverse() -> None:
    # The product differs from the quotient only next to a midpoint of two codes: put values there.
    rng = np.random.default_rng(0)
    amax = (1 + rng.random(512)).astype(np.float32)
    scale = amax / np.float32(448)
    values = formats.e4m3_decode(torch.arange(0x20, 0x7F, dtype=torch.uint8)).numpy()
    midpoints = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    y = np.zeros((128, amax.size), np.float32)
    y[: midpoints.size] = midpoints[:, None] * scale
    y[-1] = amax
    codes = store_fp8(y).values
    product = torch.from_numpy(y * (np.float32(1) / scale))
    assert np.array_equal(codes, formats.e4m3_encode(product).numpy().T)
    quotient = formats.e4m3_encode(torch.from_numpy(y / scale)).numpy().T
    assert (codes != quotient).sum() > 1000


def test_fp4_golden_codes_low_nibble_first() -> None:
    stored = store_fp4(column(6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, width=128))
    # 6 0 1 1 2 2 4 4 -0 as codes 7 0 2 2 4 4 6 6 8, two a byte
    assert codes_of(stored.values, 5) == [0x07, 0x22, 0x44, 0x66, 0x08]
    assert codes_of(stored.scales, 4) == [127, 1, 1, 1]


@pytest.mark.parametrize(
    ("row", "exponent", "codes"),
    [
        ((6.03125, 1, 0.5), 128, [0x15, 0x00]),
        ((1, 0.100098, -0.300781), 125, [0x16, 0x0A]),
    ],
)
def test_fp4_scale_rounds_up(row: tuple[float, ...], exponent: int, codes: list[int]) -> None:
    stored = store_fp4(column(*row, width=128))
    assert int(stored.scales[0, 0]) == exponent
    assert codes_of(stored.values, 2) == codes


def test_fp4_floor_is_tiny() -> None:
    stored = store_fp4(column(2.0**-126, width=32))
    assert int(stored.scales[0, 0]) == 1  # 2**-126, not the 1e-4 floor
    assert codes_of(stored.values, 1) == [0x02]  # 1


@pytest.mark.parametrize(
    ("row", "exponent", "values"),
    [
        ((448, 1, -0.30078125, 17), 0, (448, 1, -0.3125, 16)),
        ((450, 27), 1, (448, 28)),
        ((1, 0.0018997, 0.100098, -0.769531), -8, (1, 0.00195312, 0.1015625, -0.75)),
        ((3.515625, 0.25), -6, (3.5, 0.25)),
        ((1e-6, -1e-6), -22, (2.0**-20, -(2.0**-20))),
        ((0.0,), -22, (0.0,)),
    ],
)
def test_main_golden(row: tuple[float, ...], exponent: int, values: tuple[float, ...]) -> None:
    stored = store_main_fp8(column(*row, width=512))
    assert int(stored.scales[0, 0]) == exponent + 127
    decoded = formats.e4m3_decode(torch.from_numpy(stored.values[0, :448])) * 2.0**exponent
    assert decoded[: len(values)].tolist() == pytest.approx(list(values), rel=1e-5)


def test_main_rounds_to_bf16_before_the_scale_and_the_code() -> None:
    # 448 + a little: its bf16 is 448, so the scale stays 1.
    above = float(np.nextafter(np.float32(448), np.float32(1e9)))
    stored = store_main_fp8(column(above, 1 + 2.0**-4 + 2.0**-20, width=512))
    assert int(stored.scales[0, 0]) == 127
    # 1 + 2**-4 + 2**-20 lies above the tie of 1 and 1.125, its bf16 on it: to even.
    assert int(stored.values[0, 1]) == 0x38
    assert int(to_e4m3(np.array([1 + 2.0**-4 + 2.0**-20], np.float32))[0]) == 0x39


def test_main_row_bytes() -> None:
    y = np.zeros((512, 2), np.float32)
    y[448:, 1] = np.arange(64) + 1 / 512
    stored = store_main_fp8(y)
    assert stored.values.shape == (2, 576)
    assert stored.scales.tolist() == [[105] * 7 + [0]] * 2
    rope = widen_bf16(stored.values[1, 448:].view(np.uint16))
    expected = torch.from_numpy(y[448:, 1].copy()).to(torch.bfloat16).float().numpy()
    assert np.array_equal(rope, expected)


def test_bf16_row_bytes() -> None:
    y = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    assert store_bf16(y).values.tolist() == [[0x80, 0x3F, 0, 0x3F], [0, 0xC0, 0x40, 0x40]]
