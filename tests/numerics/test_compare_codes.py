"""Codes and scales: correct fp32 quantisers always pass, wrong ones never do.

The quantisers are written here from the formats' definitions, with ml-dtypes for the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.formats import (
    BF16,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_NO_FLOOR,
    FP8_PLAIN,
    FP8_POW2,
    FP32,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
    Encoded,
    Format,
)
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.error_bound import ErrorBound, exact
from needlepoint.verify.numerics.row_errors import RowErrors

SCALED = (
    FP8_PLAIN,
    FP8_POW2,
    FP8_NO_FLOOR,
    FP4_OFFICIAL,
    FP4_SGLANG,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
)
WIDTH = {32: 128, 64: 448, 128: 128}
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLE = (GRID[1:] + GRID[:-1]) / 2


def in_blocks(x: Tensor, block: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, block)


@dataclass(frozen=True)
class Quantiser:
    """A quantiser in fp32, as a kernel writes it; every field is a way to write it wrong."""

    floor: str  # "amax", "tiny", "scale" or "none"
    power_of_two: bool
    pre_round: bool = False
    ties_to_zero: bool = False
    divide: str = "divide"  # "divide", "inverse", "reciprocal of max"
    truncate: bool = False
    gain: float = 1.0
    scale_down: bool = False

    def scales(self, x: Tensor, block: int, largest: float) -> Tensor:
        amax = in_blocks(x, block).abs().amax(-1)
        if self.floor in ("amax", "tiny"):
            amax = amax.clamp(min=1e-4 if self.floor == "amax" else 6 * 2.0**-126)
        inverse = torch.tensor(1 / largest, dtype=torch.float32)
        s = amax * inverse if self.divide == "reciprocal of max" else amax / largest
        if self.floor == "scale":
            s = s.clamp(min=1e-4)
        if not self.power_of_two:
            return s
        bits = s.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        return ((exponent - int(self.scale_down)) << 23).view(torch.float32)

    def run(self, x: Tensor, element: str, block: int) -> Encoded:
        largest = 448.0 if element == "e4m3" else 6.0
        if self.pre_round:
            x = x.bfloat16().float()
        s = self.scales(x, block, largest)
        step = torch.where(s == 0, 1.0, s).repeat_interleave(block, -1)
        y = x * (1 / step) if self.divide == "inverse" else x / step
        y = (y * self.gain).clamp(-largest, largest)
        codes = e4m3(y, self.truncate) if element == "e4m3" else self.e2m1(y)
        if not self.power_of_two:
            return Encoded(codes, s)
        return Encoded(codes, (s.view(torch.int32) >> 23).to(torch.uint8))

    def e2m1(self, y: Tensor) -> Tensor:
        level = torch.bucketize(y.abs(), GRID[1:] if self.truncate else MIDDLE, right=self.truncate)
        if not self.ties_to_zero and not self.truncate:
            odd = level % 2 == 1
            at_middle = (y.abs() == MIDDLE[level.clamp(max=6)]) & (level < 7)
            level = level + (at_middle & odd).to(level.dtype)
        sign = torch.signbit(y)
        if self.ties_to_zero:
            sign = sign & (level > 0)
        return (level + 8 * sign).to(torch.uint8)


def e4m3(y: Tensor, truncate: bool) -> Tensor:
    codes = y.numpy().astype(ml_dtypes.float8_e4m3fn)
    if truncate:
        over = np.abs(codes.astype(np.float32)) > np.abs(y.numpy())
        return torch.from_numpy(codes.view(np.uint8) - over.astype(np.uint8))
    return torch.from_numpy(codes.view(np.uint8))


def quantiser(fmt: Format, **changes: object) -> Quantiser:
    floor = {
        "amax-1e-4": "amax",
        "amax-tiny": "tiny",
        "scale-1e-4": "scale",
        "none": "none",
    }[fmt.floor.value]
    settings = {
        "floor": floor,
        "power_of_two": fmt.scale.value == "ue8m0",
        "pre_round": fmt.pre_round_bf16,
        "ties_to_zero": fmt.ties.value == "zero",
    }
    return Quantiser(**{**settings, **changes})  # type: ignore[arg-type]


def rows(count: int, fmt: Format, seed: int, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    width = WIDTH[fmt.block]
    spread = torch.exp(torch.randn(count, 1, generator=g))
    return scale * spread * torch.randn(count, width, generator=g)


def within(x: Tensor, relative: float) -> ErrorBound:
    value = x.to(torch.float64)
    return ErrorBound(value, relative * value.abs() + 1e-40)


def judge(found: Encoded, reference: ErrorBound, fmt: Format) -> RowErrors:
    return compare_encoded(found, reference, fmt)


@pytest.mark.parametrize("divide", ["divide", "inverse", "reciprocal of max"])
@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@given(seed=st.integers(0, 2**31), power=st.integers(-20, 12), radius=st.sampled_from([0, -20, -9]))
@settings(max_examples=12, deadline=None)
def test_a_correct_quantiser_of_any_admissible_row_passes(
    fmt: Format, divide: str, seed: int, power: int, radius: int
) -> None:
    x = rows(24, fmt, seed, 2.0**power)
    x[3] = 0
    x[4, ::5] = 0
    relative = 2.0**radius if radius else 0.0
    push = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 1
    value = x.to(torch.float64)
    # What the candidate holds is fp32: the radius covers that rounding too.
    moved = (value * (1 + relative * push)).to(torch.float32) if radius else x
    reference = ErrorBound(value, value.abs() * (relative + 2.0**-23 * (radius != 0)))

    found = quantiser(fmt, divide=divide).run(moved, fmt.element, fmt.block)

    assert not bool(judge(found, reference, fmt).failed(1.0).any())


POWERS = tuple(f for f in SCALED if f.scale.value == "ue8m0")
Change = dict[str, object]
FAULTS: list[Change] = [{"truncate": True}, {"gain": 1.004}, {"gain": 1.02}, {"scale_down": True}]
CHANGES = [
    (fmt, change) for change in FAULTS for fmt in (POWERS if "scale_down" in change else SCALED)
]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize(
    ("fmt", "change"), CHANGES, ids=lambda v: v.name if isinstance(v, Format) else str(v)
)
def test_a_wrong_quantiser_fails(fmt: Format, change: Change, scale: float) -> None:
    x = rows(50, fmt, 7, scale)
    reference = within(x, 2.0**-20)

    right = judge(quantiser(fmt).run(x, fmt.element, fmt.block), reference, fmt)
    wrong = judge(quantiser(fmt, **change).run(x, fmt.element, fmt.block), reference, fmt)

    assert not bool(right.failed(1.0).any())
    # A gain of 0.4 % moves one four-bit code in about 128: most rows of 128 show it, not all.
    few = fmt.element == "e2m1" and change == {"gain": 1.004}
    assert int(wrong.failed(1.0).sum()) >= (20 if few else 50)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_the_scale_of_the_neighbouring_row_fails_wherever_it_differs(fmt: Format) -> None:
    x = rows(50, fmt, 7)
    right = quantiser(fmt).run(x, fmt.element, fmt.block)
    assert right.scales is not None
    moved = right.scales.roll(1, 0)
    differs = (moved != right.scales).any(-1)
    assert int(differs.sum()) >= 20

    judged = judge(Encoded(right.codes, moved), within(x, 2.0**-20), fmt)

    assert torch.equal(judged.failed(1.0), differs)
    assert bool(judged.scale_fault[differs].all())


@pytest.mark.parametrize(
    ("fmt", "floor", "amax"),
    [
        (FP8_PLAIN, "none", 9e-5),
        (FP8_PLAIN, "scale", 1e-3),
        (FP8_PLAIN, "tiny", 9e-5),
        (FP8_NO_FLOOR, "amax", 9e-5),
        (FP8_POW2, "tiny", 4e-5),
        (FP8_POW2, "scale", 1e-3),
        (FP4_OFFICIAL, "amax", 5e-5),
        (FP4_SGLANG, "tiny", 5e-5),
        (MAIN_FP8, "scale", 1e-2),
        (MAIN_FP8_SCALE_FLOOR, "amax", 1e-2),
    ],
    ids=lambda v: v.name if isinstance(v, Format) else str(v),
)
def test_another_floor_rule_fails_where_the_rules_part(
    fmt: Format, floor: str, amax: float
) -> None:
    x = rows(20, fmt, 9)
    x = x / in_blocks(x, fmt.block).abs().amax(-1).amin(-1, keepdim=True) * amax
    reference = within(x, 2.0**-20)

    right = quantiser(fmt).run(x, fmt.element, fmt.block)
    wrong = quantiser(fmt, floor=floor).run(x, fmt.element, fmt.block)
    judged = judge(wrong, reference, fmt)

    assert not bool(judge(right, reference, fmt).failed(1.0).any())
    assert bool(judged.failed(1.0).all())


@pytest.mark.parametrize(
    ("fmt", "middle", "right", "wrong"),
    [
        (FP4_OFFICIAL, 1.75, 4, 3),
        (FP4_SGLANG, 1.75, 3, 4),
        (FP4_OFFICIAL, -0.75, 8 + 2, 8 + 1),
        (FP4_SGLANG, -0.75, 8 + 1, 8 + 2),
        (FP4_OFFICIAL, 2.5, 4, 5),
        (FP8_POW2, 1.0625, 0x38, 0x39),
        (FP8_POW2, -1.1875, 0x80 + 0x3A, 0x80 + 0x39),
    ],
    ids=lambda v: v.name if isinstance(v, Format) else str(v),
)
def test_an_exact_tie_is_judged_by_the_rule_of_the_profile(
    fmt: Format, middle: float, right: int, wrong: int
) -> None:
    # bf16 queries hit midpoints exactly, and there nothing is left open.
    x = torch.zeros(2, 128)
    x[:, ::32] = fmt.max_value
    x[1, 5] = middle
    stored = quantiser(fmt).run(x, fmt.element, fmt.block)
    assert int(stored.codes[1, 5]) == right
    codes = stored.codes.clone()
    codes[1, 5] = wrong

    judged = judge(Encoded(codes, stored.scales), exact(x), fmt)

    assert not bool(judge(stored, exact(x), fmt).failed(1.0).any())
    assert judged.failed(1e6).tolist() == [False, True]
    assert int(judged.dim[1]) == 5
    open_tie = ErrorBound(x.to(torch.float64), torch.full(x.shape, 1e-9, dtype=torch.float64))
    assert not bool(judge(Encoded(codes, stored.scales), open_tie, fmt).failed(1.0).any())


@pytest.mark.parametrize("fmt", [MAIN_FP8, MAIN_FP8_SCALE_FLOOR], ids=lambda f: f.name)
def test_leaving_out_the_bf16_rounding_before_the_store_fails(fmt: Format) -> None:
    x = rows(40, fmt, 5)

    wrong = quantiser(fmt, pre_round=False).run(x, fmt.element, fmt.block)

    assert bool(judge(wrong, exact(x), fmt).failed(1.0).all())
    # and the other way round: a format without it must not be rounded first
    plain = Format("main-unrounded", "e4m3", fmt.scale, fmt.block, fmt.floor)
    rounded = quantiser(fmt).run(x, fmt.element, fmt.block)
    assert bool(judge(rounded, exact(x), plain).failed(1.0).all())


@pytest.mark.parametrize(("fmt", "largest"), [(FP8_POW2, 448.0), (FP4_OFFICIAL, 6.0)])
@pytest.mark.parametrize("power", [-9, 0, 5])
def test_a_power_of_two_scale_is_exact_at_its_boundary(
    fmt: Format, largest: float, power: int
) -> None:
    x = torch.zeros(1, 128)
    x[0, ::32] = largest * 2.0**power
    right = quantiser(fmt).run(x, fmt.element, fmt.block)
    assert right.scales is not None
    assert right.scales.flatten().tolist() == [127 + power] * (128 // fmt.block)

    doubled = Encoded(
        torch.where(right.codes > 0, _half(right.codes, fmt), right.codes), right.scales + 1
    )
    open_amax = within(x, 2.0**-20)

    assert not bool(judge(right, exact(x), fmt).failed(1.0).any())
    judged = judge(doubled, exact(x), fmt)
    assert bool(judged.failed(1e6).all())
    assert bool(judged.scale_fault.all())
    assert judged.found.tolist() == [2.0 ** (power + 1)]
    assert judged.expected.tolist() == [2.0**power]
    # An amax known to 2**-20 may stand on either side.
    assert not bool(judge(right, open_amax, fmt).failed(1.0).any())
    assert not bool(judge(doubled, open_amax, fmt).failed(1.0).any())
    two_up = Encoded(right.codes, right.scales + 2)
    assert bool(judge(two_up, open_amax, fmt).failed(1.0).all())


def _half(codes: Tensor, fmt: Format) -> Tensor:
    """Codes of half the largest value: one exponent less, 224 and 3."""
    return torch.full_like(codes, 0x76 if fmt.element == "e4m3" else 5)


Edit = Callable[[Encoded], Encoded]


def _with_scale(value: float) -> Edit:
    def edit(stored: Encoded) -> Encoded:
        assert stored.scales is not None
        scales = stored.scales.clone()
        scales[11] = value
        return Encoded(stored.codes, scales)

    return edit


def _with_code(code: int) -> Edit:
    def edit(stored: Encoded) -> Encoded:
        codes = stored.codes.clone()
        codes[11, 3] = code
        return Encoded(codes, stored.scales)

    return edit


@pytest.mark.parametrize(
    ("edit", "scale_fault"),
    [
        (_with_scale(math.nan), True),
        (_with_scale(math.inf), True),
        (_with_scale(-1.0), True),
        (_with_scale(0.0), True),
        (_with_code(0x7F), False),
        (_with_code(0xFF), False),
        (_with_code(0x7E), False),
    ],
)
def test_one_impossible_byte_fails_its_row_alone(edit: Edit, scale_fault: bool) -> None:
    x = rows(30, FP8_PLAIN, 1)
    x[11, 3] = 0.01 * x[11].abs().max()
    stored = edit(quantiser(FP8_PLAIN).run(x, "e4m3", 128))

    judged = judge(stored, within(x, 2.0**-20), FP8_PLAIN)

    assert judged.failed(1.0).nonzero().flatten().tolist() == [11]
    assert bool(judged.scale_fault[11]) is scale_fault
    assert int(judged.dim[11]) == (0 if scale_fault else 3)


@pytest.mark.parametrize("slot", ["uint8", "fp32"])
def test_power_of_two_scales_may_stand_in_an_fp32_slot(slot: str) -> None:
    x = rows(30, FP8_POW2, 1)
    stored = quantiser(FP8_POW2).run(x, "e4m3", 128)
    assert stored.scales is not None
    wide = torch.ldexp(torch.ones(stored.scales.shape), stored.scales.to(torch.int32) - 127)
    scales = stored.scales if slot == "uint8" else wide

    assert not bool(
        judge(Encoded(stored.codes, scales), within(x, 1e-6), FP8_POW2).failed(1.0).any()
    )


def test_a_plain_scale_where_a_power_of_two_is_meant_fails() -> None:
    x = rows(30, FP8_POW2, 1)
    plain = quantiser(FP8_PLAIN).run(x, "e4m3", 128)

    judged = judge(plain, within(x, 1e-6), FP8_POW2)

    assert bool(judged.failed(1e6).all())
    assert bool(judged.scale_fault.all())


def test_the_worst_block_of_a_row_is_named() -> None:
    x = rows(10, MAIN_FP8, 1)
    stored = quantiser(MAIN_FP8).run(x, "e4m3", 64)
    assert stored.scales is not None
    scales = stored.scales.clone()
    scales[4, 6] -= 1

    judged = judge(Encoded(stored.codes, scales), exact(x), MAIN_FP8)

    assert judged.failed(1.0).nonzero().flatten().tolist() == [4]
    assert int(judged.dim[4]) == 6 * 64
    assert bool(judged.scale_fault[4])


def test_a_query_has_one_row_over_all_heads() -> None:
    x = rows(12, FP8_PLAIN, 1).reshape(4, 3, 128)
    stored = quantiser(FP8_PLAIN).run(x, "e4m3", 128)
    codes = stored.codes.clone()
    codes[2, 1, 9] ^= 0x10

    judged = judge(Encoded(codes, stored.scales), within(x, 2.0**-20), FP8_PLAIN)

    assert judged.rows == 4
    assert judged.failed(1.0).nonzero().flatten().tolist() == [2]
    assert int(judged.dim[2]) == 128 + 9
    assert int(judged.distance[2]) == 16


def test_equal_bytes_have_no_relative_error_and_no_distance() -> None:
    x = rows(12, FP8_PLAIN, 1)

    judged = judge(quantiser(FP8_PLAIN).run(x, "e4m3", 128), within(x, 2.0**-20), FP8_PLAIN)

    assert float(judged.relative(1e-30).max()) < 1e-6
    assert int(judged.distance.max()) == 0


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP32, torch.float32)])
def test_unscaled_formats_are_compared_as_dense_rows(fmt: Format, dtype: torch.dtype) -> None:
    x = rows(12, FP8_PLAIN, 1)
    stored = x.clone().to(dtype)

    assert not bool(judge(Encoded(stored), within(x, 2.0**-20), fmt).failed(1.0).any())
    stored[3, 3] *= 1.02
    assert judge(Encoded(stored), within(x, 2.0**-20), fmt).failed(1.0).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("scales", [None, torch.ones(4, 2), torch.ones(3, 1)])
def test_scales_that_do_not_fit_are_refused(scales: Tensor | None) -> None:
    codes = torch.zeros(4, 128, dtype=torch.uint8)

    with pytest.raises(ValueError, match=r"fp8-plain: codes \(4, 128\) with scales"):
        judge(Encoded(codes, scales), exact(torch.ones(4, 128)), FP8_PLAIN)


def test_packed_bytes_are_refused() -> None:
    codes = torch.full((2, 128), 0x77, dtype=torch.uint8)
    scales = torch.full((2, 4), 127, dtype=torch.uint8)

    with pytest.raises(ValueError, match="packed bytes must be unpacked first"):
        judge(Encoded(codes, scales), exact(torch.ones(2, 128)), FP4_OFFICIAL)
