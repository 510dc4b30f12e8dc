"""Directions: planted ones inside the size limit are found, sound errors never are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.formats import FP4_OFFICIAL, FP8_POW2, Encoded, Format, encode
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to
from needlepoint.verify.numerics.bias import ROWS_NEEDED, bias_tests
from needlepoint.verify.numerics.compare import compare_dense
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.directions import Z_LIMIT, bias_note
from needlepoint.verify.numerics.error_bound import ErrorBound
from needlepoint.verify.numerics.error_model import LEAN, U
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.numerics.tally import Tally
from needlepoint.verify.schema.stage import BiasTest

KEY = ("main", "stored")


def drawn(seed: int, rows: int = 96, dims: int = 128) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return reference values, a radius of one bf16 step, and a source of noise."""
    noise = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, dims, generator=noise, dtype=torch.float64)
    return value, value.abs() * 2.0**-7, noise


def jitter(value: Tensor, delta: Tensor, noise: torch.Generator, share: float = 0.5) -> Tensor:
    """Return the value with an error of either sign, inside the radius."""
    return value + share * delta * (2 * torch.rand(value.shape, generator=noise).double() - 1)


def judged(row: RowErrors, lean: float = LEAN.value * U, limit: float = 1.0) -> dict[str, BiasTest]:
    assert not bool(row.failed(1.0).any()), "the fault must hide from the size limit"
    tests = bias_tests(StageErrors(KEY, row, row, lean=lean), limit)
    # Ties have a test for each side; the louder one speaks.
    return {test.test: test for test in sorted(tests, key=lambda test: abs(test.z))}


def truncated(value: Tensor) -> Tensor:
    bits = value.to(torch.float32).view(torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).double()


Fault = Callable[[Tensor, Tensor, torch.Generator], Tensor]
DENSE: dict[str, tuple[Fault, float]] = {
    # Name: what the candidate stores for a reference value, and the sign of its direction.
    "gain": (lambda v, d, n: round_to(jitter(v * (1 + 2.0**-10), d, n), Precision.BF16), 1),
    "loss": (lambda v, d, n: round_to(jitter(v * (1 - 2.0**-10), d, n), Precision.BF16), -1),
    "truncation": (lambda v, d, n: truncated(jitter(v, d, n, 0.1)), -1),
}


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("name", DENSE)
def test_a_direction_inside_the_limit_is_found_in_bf16(name: str, scale: float) -> None:
    fault, sign = DENSE[name]
    value, delta, noise = drawn(3)
    value, delta = value * scale, delta * scale

    row = compare_dense(fault(value, delta, noise), ErrorBound(value, delta), Precision.BF16)
    flips = judged(row)["flips"]

    assert flips.exceeded
    assert math.copysign(1, flips.z) == math.copysign(1, flips.effect) == sign
    assert flips.rows >= flips.rows_needed == ROWS_NEEDED
    note = bias_note([flips])
    assert note is not None
    assert note.startswith("code-flip test, a balance of ")


@pytest.mark.parametrize(("gain", "found"), [(1e-4, True), (-1e-4, True), (2e-7, False)])
def test_a_gain_of_unrounded_numbers_is_found_beyond_what_fp32_may_lean(
    gain: float, found: bool
) -> None:
    value, delta, noise = drawn(5)
    candidate = jitter(value, delta, noise, 0.01) * (1 + gain)

    test = judged(compare_dense(candidate, ErrorBound(value, delta)))["gain"]

    assert test.exceeded is found
    assert test.effect == pytest.approx(gain, abs=2e-6)


@pytest.mark.parametrize("fmt", [FP8_POW2, FP4_OFFICIAL], ids=["fp8", "fp4"])
@pytest.mark.parametrize("gain", [1 + 2.0**-6, 1 - 2.0**-6])
def test_a_gain_inside_the_limit_shows_in_the_codes(fmt: Format, gain: float) -> None:
    value, delta, noise = drawn(7, dims=512)
    delta = 4 * delta
    shifted = jitter(value * gain, delta, noise, 0.3)

    test = judged(compare_encoded(stored(value, shifted, fmt), ErrorBound(value, delta), fmt))[
        "flips"
    ]

    assert test.exceeded
    assert (test.z > 0) == (gain > 1)


def stored(value: Tensor, moved: Tensor, fmt: Format) -> Encoded:
    """Return the codes of moved values whose largest of each block stay, and so the scales."""
    blocks = value.abs().reshape(len(value), -1, fmt.block)
    largest = (blocks == blocks.amax(2, keepdim=True)).flatten(1)
    limit = blocks.amax(2, keepdim=True).expand_as(blocks).flatten(1)
    return encode(torch.where(largest, value, moved.clamp(-limit, limit)), fmt)


@pytest.mark.parametrize("side", [1, -1])
def test_a_wrong_tie_rule_is_found_where_the_radius_admits_both_neighbours(side: int) -> None:
    """Every value is a midpoint of two bf16 numbers; ties go away from zero, or towards it."""
    grid = round_to(drawn(11)[0].clamp(min=0.1), Precision.BF16)
    step = torch.exp2(torch.floor(torch.log2(grid)) - 7)
    value = grid + step / 2
    away = grid + step if side > 0 else grid

    row = compare_dense(away, ErrorBound(value, step), Precision.BF16)
    ties = judged(row)["ties"]

    assert ties.exceeded
    assert ties.effect == 1.0
    assert (ties.z > 0) == (side > 0)


@pytest.mark.parametrize("rule", ["even", "noise"])
def test_ties_by_the_rule_or_by_errors_of_either_sign_lean_nowhere(rule: str) -> None:
    grid = round_to(drawn(13)[0].clamp(min=0.1), Precision.BF16)
    step = torch.exp2(torch.floor(torch.log2(grid)) - 7)
    value = grid + step / 2
    noise = torch.Generator().manual_seed(0)
    held = value if rule == "even" else jitter(value, step, noise, 0.01)

    row = compare_dense(round_to(held, Precision.BF16), ErrorBound(value, step), Precision.BF16)

    assert not any(test.exceeded for test in judged(row).values())


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_many_seeds_of_sound_data_stay_far_below_the_limit(precision: Precision) -> None:
    """Hoeffding's level at 4.5 is 1 in 12,000 for either side."""
    worst = []
    for seed in range(300):
        value, delta, noise = drawn(seed, rows=64, dims=32)
        found = jitter(value, delta, noise)
        found = round_to(found, Precision.BF16) if precision is Precision.BF16 else found
        row = compare_dense(found, ErrorBound(value, delta), precision)
        worst += [abs(test.z) for test in judged(row, lean=0.0).values()]

    assert len(worst) == 300
    assert max(worst) < 4.5
    assert max(worst) > 2, "the statistic must move"


@pytest.mark.parametrize("fmt", [FP8_POW2, FP4_OFFICIAL], ids=["fp8", "fp4"])
def test_many_seeds_of_sound_codes_stay_far_below_the_limit(fmt: Format) -> None:
    worst = []
    for seed in range(50):
        value, delta, noise = drawn(seed, rows=64, dims=128)
        found = stored(value, jitter(value, delta, noise), fmt)
        row = compare_encoded(found, ErrorBound(value, delta), fmt)
        worst += [abs(test.z) for test in judged(row, lean=0.0).values()]

    assert len(worst) == 50
    assert max(worst) < 4.5


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), below=st.booleans(), offset=st.sampled_from([2e-12, 1e-9, 1e-7]))
def test_values_on_a_lattice_beside_a_boundary_lean_nowhere(
    seed: int, below: bool, offset: float
) -> None:
    """Half of them cross by noise, all to one side: that side is the lattice's, not a fault's."""
    grid = round_to(drawn(seed, rows=64, dims=32)[0].clamp(min=0.1), Precision.BF16)
    step = torch.exp2(torch.floor(torch.log2(grid)) - 7)
    value = (grid + step / 2) * (1 - offset if below else 1 + offset)
    found = jitter(value, step, torch.Generator().manual_seed(seed), 0.01)

    row = compare_dense(round_to(found, Precision.BF16), ErrorBound(value, step), Precision.BF16)

    assert not any(test.exceeded for test in judged(row, lean=0.0).values())


def test_rows_made_from_equal_input_count_once() -> None:
    value, delta, noise = drawn(17, rows=8)
    found = round_to(jitter(value * (1 + 2.0**-10), delta, noise), Precision.BF16)
    many = [tensor.repeat(50, 1) for tensor in (found, value, delta)]

    alone = compare_dense(many[0], ErrorBound(many[1], many[2]), Precision.BF16)
    known = compare_dense(many[0], ErrorBound(many[1], many[2]), Precision.BF16)
    known.tally[:, Tally.CONTENT] = torch.arange(1, 9).repeat(50)

    assert judged(alone)["flips"].exceeded
    assert not judged(known)["flips"].exceeded
    assert judged(known)["flips"].rows == 8


def test_too_few_rows_cannot_reach_the_limit_and_a_loosened_limit_loosens_it() -> None:
    value, delta, noise = drawn(19, rows=ROWS_NEEDED - 1)
    found = jitter(value, delta, noise, 0.01) * (1 + 1e-3)
    row = compare_dense(found, ErrorBound(value, delta))

    assert abs(judged(row)["gain"].z) < Z_LIMIT
    value, delta, noise = drawn(19, rows=4 * ROWS_NEEDED)
    row = compare_dense(jitter(value, delta, noise, 0.01) * (1 + 1e-3), ErrorBound(value, delta))
    assert judged(row)["gain"].exceeded
    assert not judged(row, limit=10.0)["gain"].exceeded
    assert judged(row, lean=math.inf) == {}
    assert bias_note([]) is None
