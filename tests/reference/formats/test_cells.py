"""Rounding cells: a value inside rounds to the code, a value outside does not."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from needlepoint.reference.formats import (
    BF16,
    FLOAT64,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_PLAIN,
    FP32,
    Format,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    round_to_bf16,
    rounding_cell,
)


def away(x: torch.Tensor, towards: float) -> torch.Tensor:
    return torch.nextafter(x, torch.tensor(towards, dtype=torch.float64))


@pytest.mark.parametrize("fmt", [FP8_PLAIN, FP4_OFFICIAL, FP4_SGLANG], ids=lambda f: f.name)
def test_cells_of_every_code(fmt: Format) -> None:
    e4m3 = fmt.element == "e4m3"
    encode, to_values = (e4m3_encode, e4m3_decode) if e4m3 else (e2m1_encode, e2m1_decode)
    codes = torch.arange(256 if e4m3 else 16).to(torch.uint8)
    values = to_values(codes)
    codes, values = codes[~torch.isnan(values)], values[~torch.isnan(values)]
    lower, upper = rounding_cell(codes, fmt)

    def reached(x: torch.Tensor) -> torch.Tensor:
        return to_values(encode(x, fmt.ties))

    inside_low, inside_high = away(lower, math.inf), away(upper, -math.inf)
    assert torch.equal(reached(inside_low), values)
    assert torch.equal(reached(inside_high), values)
    low, high = torch.isfinite(lower), torch.isfinite(upper)
    assert int((~low).sum()) == int((~high).sum()) == 1
    assert bool((reached(away(lower[low], -math.inf)) < values[low]).all())
    assert bool((reached(away(upper[high], math.inf)) > values[high]).all())
    assert lower[~low].item() == -math.inf
    assert upper[~high].item() == math.inf
    assert values[~high].item() == fmt.max_value


@pytest.mark.parametrize("fmt", [FP8_PLAIN, FP4_OFFICIAL], ids=lambda f: f.name)
def test_zeros_share_a_cell(fmt: Format) -> None:
    negative = 0x80 if fmt.element == "e4m3" else 8
    lower, upper = rounding_cell(torch.tensor([0, negative], dtype=torch.uint8), fmt)

    smallest = 2.0**-9 if fmt.element == "e4m3" else 0.5
    assert lower.tolist() == [-smallest / 2] * 2
    assert upper.tolist() == [smallest / 2] * 2


def test_a_nan_code_has_no_cell() -> None:
    lower, upper = rounding_cell(torch.tensor([0x7F, 0xFF], dtype=torch.uint8), FP8_PLAIN)

    assert torch.isnan(lower).all()
    assert torch.isnan(upper).all()


def test_cells_of_every_bf16_number() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = torch.from_numpy(bits.view(ml_dtypes.bfloat16).astype(np.float64))
    lower, upper = rounding_cell(values, BF16)

    nan = torch.isnan(values)
    assert torch.equal(torch.isnan(lower), nan)
    assert torch.equal(torch.isnan(upper), nan)
    values, lower, upper = values[~nan], lower[~nan], upper[~nan]
    low, high = torch.isfinite(lower), torch.isfinite(upper)
    assert int((~low).sum()) == int((~high).sum()) == 1  # the infinities
    for ends, outwards, inwards, finite in (
        (lower, -math.inf, math.inf, low),
        (upper, math.inf, -math.inf, high),
    ):
        assert torch.equal(round_to_bf16(away(ends[finite], inwards)), values[finite])
        outside = round_to_bf16(away(ends[finite], outwards))
        assert bool(((outside - values[finite]) * outwards > 0).all())
    assert torch.equal(lower[values == 0], -upper[values == 0])
    edge = (2 - 2.0**-8) * 2.0**127
    assert lower[values == math.inf].item() == upper[values == torch.finfo(torch.bfloat16).max]
    assert lower[values == math.inf].item() == edge


def test_cells_of_fp32_numbers() -> None:
    rng = np.random.default_rng(6)
    special = np.array([0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, np.finfo(np.float32).max])
    bits = rng.integers(0, 0x7F800000, 20_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([special, bits, -bits]).astype(np.float32)
    lower, upper = rounding_cell(torch.from_numpy(values), FP32)

    with np.errstate(over="ignore"):
        for ends, towards in ((lower.numpy(), np.inf), (upper.numpy(), -np.inf)):
            np.testing.assert_array_equal(np.nextafter(ends, towards).astype(np.float32), values)
            outside = np.nextafter(ends, -towards).astype(np.float32)
            assert ((outside > values) == (towards < 0)).all()
            assert (outside != values).all()


def test_bf16_tensors_and_float64_numbers() -> None:
    lower, upper = rounding_cell(torch.tensor([1.0], dtype=torch.bfloat16), BF16)
    assert (lower.item(), upper.item()) == (1 - 2.0**-9, 1 + 2.0**-8)
    x = torch.tensor([0.1, -3.0], dtype=torch.float64)
    assert all(torch.equal(end, x) for end in rounding_cell(x, FLOAT64))


def test_what_is_not_of_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.00390625 is not a bf16 number"):
        rounding_cell(torch.tensor([1.0, 1 + 2.0**-8]), BF16)
    with pytest.raises(ValueError, match=r"0\.1 is not a fp32 number"):
        rounding_cell(torch.tensor([0.1], dtype=torch.float64), FP32)
    with pytest.raises(ValueError, match=r"17 at index \(0,\), expected 0 \.\. 15"):
        rounding_cell(torch.tensor([17], dtype=torch.uint8), FP4_OFFICIAL)
