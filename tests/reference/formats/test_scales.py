"""UE8M0 scales: exact around every power of two, and decoded like ml-dtypes and gfloat."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from needlepoint.reference.formats import ue8m0_decode, ue8m0_encode, ue8m0_exponent


def exact_exponent(amax: float, max_value: float) -> int:
    """Return the smallest e with 2**e >= amax / max_value, in rationals."""
    ratio = Fraction(amax) / Fraction(max_value)
    e = math.frexp(amax / max_value)[1] - 3
    while Fraction(2) ** e < ratio:
        e += 1
    return e


@pytest.mark.parametrize("max_value", [448.0, 6.0, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponent_at_every_power_of_two_and_its_neighbours(
    dtype: type[np.floating], max_value: float
) -> None:
    for e in range(-126, 119):
        centre = dtype(max_value * 2.0**e)
        points = [centre, np.nextafter(centre, dtype(np.inf)), np.nextafter(centre, dtype(0))]
        got = ue8m0_exponent(torch.tensor(np.array(points)), max_value).tolist()
        assert got == [e, e + 1, e]
        assert got == [exact_exponent(float(p), max_value) for p in points]


def test_float_above_a_power_of_two_is_not_an_octave_low() -> None:
    """fault_log H02: fp32 log2 of the next float above 2**e is e itself for most e."""
    exponents = torch.arange(-40, 20)
    powers = torch.pow(2.0, exponents.to(torch.float64)).to(torch.float32)
    above = torch.nextafter(powers, torch.tensor(math.inf))

    assert torch.equal(ue8m0_exponent(above, 1.0), exponents + 1)
    by_log = torch.from_numpy(np.ceil(np.log2(above.double().numpy()).astype(np.float32)))
    assert int((by_log.to(torch.int64) < exponents + 1).sum()) == 52


@pytest.mark.parametrize("max_value", [448.0, 6.0])
def test_bit_rule_of_the_official_code_over_one_whole_binade(max_value: float) -> None:
    """Multiply by fl(1 / max), divide in fp32 and the exact ceiling agree on every fp32 amax."""
    amax = (torch.arange(1 << 23, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    exact = ue8m0_exponent(amax, max_value)

    inverse = torch.tensor(1.0) / max_value
    assert inverse.view(torch.int32).item() == {448.0: 0x3B124925, 6.0: 0x3E2AAAAB}[max_value]
    for ratio in (amax * inverse, amax / max_value):
        bits = ratio.view(torch.int32)
        by_bits = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        assert torch.equal(exact, by_bits.to(torch.int64))


def test_exponent_stays_within_the_codes() -> None:
    smallest = torch.tensor([0.0, 1e-45, 2.0**-140], dtype=torch.float32)
    assert ue8m0_exponent(smallest, 448.0).tolist() == [-127, -127, -127]
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert ue8m0_exponent(largest, 6.0).tolist() == [126]
    with pytest.raises(ValueError, match="ue8m0_exponent: got dtype"):
        ue8m0_exponent(torch.zeros(1, dtype=torch.int64), 6.0)


def test_every_scale_code_decodes_like_ml_dtypes_and_gfloat() -> None:
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    ours = ue8m0_decode(codes).numpy()

    with np.errstate(all="ignore"):
        theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    third = gfloat.decode_ndarray(gfloat.formats.format_info_ocp_e8m0, codes.numpy())
    np.testing.assert_array_equal(ours, third)
    assert torch.equal(ue8m0_encode(ue8m0_decode(codes[:255])), codes[:255])
    with pytest.raises(ValueError, match=r"ue8m0_decode: got dtype torch\.int64"):
        ue8m0_decode(codes.to(torch.int64))


@pytest.mark.parametrize("scale", [1.5, 0.0, -1.0, math.nan, math.inf, 2.0**-128, 1 + 2.0**-23])
def test_a_scale_that_is_no_power_of_two_is_refused(scale: float) -> None:
    """fault_log H03: its bits must not be shifted into an exponent byte."""
    scales = torch.tensor([[1.0, 2.0], [0.5, scale]])

    with pytest.raises(ValueError, match=r"at index \(1, 1\) is not a power of two"):
        ue8m0_encode(scales)
