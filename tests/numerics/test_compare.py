"""Dense rows and masked scores: masks before arithmetic, one wrong row fails by name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.profile import Precision
from needlepoint.verify.numerics.compare import compare_dense, compare_masked_scores
from needlepoint.verify.numerics.error_bound import ErrorBound, exact
from needlepoint.verify.numerics.row_errors import RowErrors

BF16 = Precision.BF16


def values(rows: int, width: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=g, dtype=torch.float64)


def within(value: Tensor, relative: float) -> ErrorBound:
    return ErrorBound(value, value.abs() * relative)


# --- dense rows in fp32 ---------------------------------------------------------------------------


def test_error_is_the_distance_in_units_of_the_radius() -> None:
    reference = ErrorBound(
        torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], dtype=torch.float64),
        torch.tensor([[0.1, 0.5, 1.0], [0.1, 0.5, 1.0]], dtype=torch.float64),
    )
    found = torch.tensor([[1.05, 2.0, 4.0], [1.0, 1.0, 4.5]])

    rows = compare_dense(found, reference)

    assert rows.ratio.tolist() == pytest.approx([0.5, 2.0])
    assert rows.dim.tolist() == [0, 1]
    assert rows.expected.tolist() == [1.0, 2.0]
    assert rows.found.tolist() == pytest.approx([1.05, 1.0])
    assert rows.relative(1e-30).tolist() == pytest.approx(
        [0.05 / 21**0.5, 1.25**0.5 / 21**0.5], rel=1e-6
    )
    assert rows.failed(1.0).tolist() == [False, True]
    assert rows.failed(2.0).tolist() == [False, False]
    assert not bool(rows.scale_fault.any())


def test_zero_radius_passes_only_the_same_number() -> None:
    reference = exact(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    found = torch.tensor([[1.0, -0.0], [1.0, 1e-45]])

    rows = compare_dense(found, reference)

    assert rows.ratio.tolist() == [0.0, math.inf]
    assert rows.distance.tolist() == [0, 1]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_fails_its_row_alone(bad: float, precision: Precision) -> None:
    reference = within(values(50, 64, 0), 2.0**-7)
    found = reference.value.float().bfloat16()
    found[17, 5] = bad

    rows = compare_dense(found, reference, precision)

    assert rows.failed(1e6).nonzero().flatten().tolist() == [17]
    assert rows.dim[17] == 5
    assert math.isnan(float(rows.found[17])) or float(rows.found[17]) == bad


@pytest.mark.parametrize(("power", "distance"), [(-23, 1), (-22, 2), (-13, 1024)])
def test_distance_counts_fp32_numbers(power: int, distance: int) -> None:
    reference = within(torch.ones(1, 4, dtype=torch.float64), 1e-3)
    found = torch.ones(1, 4)
    found[0, 2] += 2.0**power

    assert compare_dense(found, reference).distance.tolist() == [distance]


def test_distance_crosses_zero_without_a_jump() -> None:
    reference = ErrorBound(
        torch.full((1, 1), 2.0**-149, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    )

    assert compare_dense(torch.full((1, 1), -(2.0**-149)), reference).distance.tolist() == [2]


def test_a_query_is_one_row_over_all_its_heads() -> None:
    reference = within(values(6, 12, 1).reshape(6, 3, 4), 1e-6)
    found = reference.value.float()
    found[4, 2, 1] += 1

    rows = compare_dense(found, reference)

    assert rows.rows == 6
    assert rows.failed(1.0).nonzero().flatten().tolist() == [4]
    assert rows.dim[4] == 2 * 4 + 1


def test_one_wrong_row_among_many_is_named() -> None:
    reference = within(values(40_000, 64, 2), 2.0**-20)
    found = reference.value.float()
    found[31_234] = found[31_233]

    rows = compare_dense(found, reference)

    assert rows.rows == 40_000
    assert rows.failed(1.0).nonzero().flatten().tolist() == [31_234]


# --- dense rows in bf16 ---------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), scale=st.integers(-60, 60), radius=st.integers(-24, -9))
@settings(max_examples=40, deadline=None)
def test_whatever_the_interval_holds_passes_once_it_is_rounded(
    seed: int, scale: int, radius: int
) -> None:
    reference = within(values(4, 64, seed) * 2.0**scale, 2.0**radius)
    push = 2 * torch.rand(4, 64, generator=torch.Generator().manual_seed(seed)) - 1
    inside = reference.value + push * reference.delta

    rows = compare_dense(inside.float().bfloat16(), reference, BF16)

    assert not bool(rows.failed(1.0).any())
    assert int(rows.distance.max()) <= 1 + 2 ** (radius + 9)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("fault", ["truncation", "gain 0.4 %", "gain 2 %", "not rounded", "up"])
def test_wrong_roundings_fail_in_every_row(fault: str, scale: float) -> None:
    reference = within(scale * values(60, 128, 3), 1e-5)
    x = reference.value.float()
    right = x.bfloat16()
    wrong = {
        "truncation": (x.view(torch.int32) & ~0xFFFF).view(torch.float32),
        "gain 0.4 %": (x * 1.004).bfloat16(),
        "gain 2 %": (x * 1.02).bfloat16(),
        "not rounded": x,
        "up": (right.view(torch.int16) + 1).view(torch.bfloat16),
    }[fault]

    assert not bool(compare_dense(right, reference, BF16).failed(1.0).any())
    assert bool(compare_dense(wrong, reference, BF16).failed(5.0).all())


def test_an_exact_tie_must_go_to_the_even_number() -> None:
    tie = 1 + 2.0**-8
    reference = exact(torch.tensor([[tie], [tie], [tie + 2.0**-7]]))
    found = torch.tensor([[1.0], [1 + 2.0**-7], [1 + 2.0**-6]])

    rows = compare_dense(found, reference, BF16)

    assert rows.ratio.tolist() == [0.0, math.inf, 0.0]
    open_tie = ErrorBound(reference.value, torch.full_like(reference.value, 1e-9))
    assert not bool(compare_dense(found, open_tie, BF16).failed(1.0).any())


def test_a_number_next_to_the_boundary_costs_its_distance() -> None:
    reference = ErrorBound(
        torch.tensor([[1 + 2.0**-8 - 3e-5]], dtype=torch.float64),
        torch.tensor([[1e-5]], dtype=torch.float64),
    )

    rows = compare_dense(torch.tensor([[1 + 2.0**-7]]), reference, BF16)

    assert float(rows.ratio) == pytest.approx(3.0)
    assert rows.expected.tolist() == [1.0]
    assert rows.distance.tolist() == [1]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (12,), (3, 2, 2)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"reference \(3, 4\); expected the same shape"):
        compare_dense(torch.zeros(shape), exact(torch.zeros(3, 4)))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_an_empty_comparison_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not empty"):
        compare_dense(torch.zeros(shape), exact(torch.zeros(shape)))


@pytest.mark.parametrize(("name", "bad"), [("reference", math.nan), ("radius", math.inf)])
def test_a_reference_that_is_not_finite_judges_nothing(name: str, bad: float) -> None:
    value, delta = values(5, 4, 0), torch.ones(5, 4, dtype=torch.float64)
    (value if name == "reference" else delta)[3, 1] = bad

    with pytest.raises(ValueError, match=f"the {name} of row 3 is not finite"):
        compare_dense(torch.zeros(5, 4), ErrorBound(value, delta))


# --- scores ---------------------------------------------------------------------------------------


def masked(scores: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    return scores.masked_fill(hidden, -math.inf)


VISIBLE = torch.tensor([0, 1, 5, 8])


def scores_case() -> tuple[Tensor, Tensor]:
    reference = masked(values(4, 8, 4), VISIBLE)
    return reference, torch.full_like(reference, 1e-6)


def compare(found: Tensor) -> RowErrors:
    return compare_masked_scores(found, *scores_case(), VISIBLE)


def test_scores_within_the_bound_pass() -> None:
    reference, _ = scores_case()

    rows = compare((reference + 5e-7).float())

    assert not bool(rows.failed(1.0).any())
    assert bool((rows.ratio[1:] > 0.4).all())
    assert float(rows.ratio[0]) == 0


@pytest.mark.parametrize(
    ("row", "entry", "bad"),
    [
        (2, 3, math.nan),
        (2, 3, math.inf),
        (2, 3, -math.inf),  # masked although visible
        (2, 5, 0.0),  # visible one too far
        (2, 7, math.nan),
        (2, 7, math.inf),
        (2, 7, -3.4e38),  # a large number is no mask
        (0, 0, 0.0),
        (3, 7, 1e-3),
    ],
)
def test_a_wrong_mask_or_score_fails_its_query_alone(row: int, entry: int, bad: float) -> None:
    found = scores_case()[0].clone()
    found[row, entry] = bad

    rows = compare(found)

    assert rows.failed(1.0).nonzero().flatten().tolist() == [row]
    assert rows.dim[row] == entry
    assert str(float(rows.found[row])) == str(bad)
    assert rows.expected[row] == scores_case()[0][row, entry]


def test_a_mask_fault_does_not_depend_on_the_limit() -> None:
    found = scores_case()[0].clone()
    found[3, 0] = math.nan

    assert compare(found).failed(1e30).tolist() == [False, False, False, True]


@pytest.mark.parametrize("factor", [1.004, 1.1, -1.0])
def test_a_constant_on_all_scores_fails_every_query_that_sees_any(factor: float) -> None:
    rows = compare(masked(scores_case()[0] * factor, VISIBLE))

    assert rows.failed(5.0).tolist() == [False, True, True, True]


def test_a_reference_masked_otherwise_is_refused() -> None:
    reference, bound = scores_case()

    for entry, bad in ((3, -math.inf), (6, 0.0), (3, math.nan), (3, math.inf)):
        wrong = reference.clone()
        wrong[2, entry] = bad
        with pytest.raises(ValueError, match="not finite up to `visible`"):
            compare_masked_scores(reference, wrong, bound, VISIBLE)


def test_scores_of_other_shapes_are_refused() -> None:
    reference, bound = scores_case()

    with pytest.raises(ValueError, match=r"visible \(3,\); expected \[queries, entries\]"):
        compare_masked_scores(reference, reference, bound, VISIBLE[:3])
    with pytest.raises(ValueError, match=r"candidate \(4, 7\)"):
        compare_masked_scores(reference[:, :7], reference, bound, VISIBLE)
    with pytest.raises(ValueError, match="not empty"):
        compare_masked_scores(torch.zeros(4, 0), torch.zeros(4, 0), torch.zeros(4, 0), VISIBLE)


# --- row errors -----------------------------------------------------------------------------------


def test_two_parts_of_a_row_join_into_one() -> None:
    nope = compare_dense(
        torch.tensor([[3.0, 4.0], [0.0, 0.0]]), within(torch.ones(2, 2).double(), 1)
    )
    rope = compare_dense(
        torch.tensor([[1.0, 2.0], [1.0, 9.0]]), within(torch.ones(2, 2).double(), 1)
    )

    joined = nope.join(rope, first_dim=448)

    assert joined.ratio.tolist() == [3.0, 8.0]
    assert joined.dim.tolist() == [1, 449]
    assert joined.found.tolist() == [4.0, 9.0]
    assert joined.error_norm.tolist() == pytest.approx([14**0.5, 66**0.5])
    assert joined.reference_norm.tolist() == [2.0, 2.0]
    assert joined.distance.tolist() == [
        max(a, b) for a, b in zip(nope.distance.tolist(), rope.distance.tolist(), strict=True)
    ]


def test_blocks_concatenate_in_order_and_no_blocks_are_refused() -> None:
    one = compare_dense(torch.tensor([[3.0]]), within(torch.ones(1, 1).double(), 1))
    two = compare_dense(torch.tensor([[5.0]]), within(torch.ones(1, 1).double(), 1))

    assert RowErrors.concatenate([one, two]).ratio.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="no blocks"):
        RowErrors.concatenate([])


def test_relative_error_of_a_zero_row_is_taken_against_the_floor() -> None:
    rows = compare_dense(torch.tensor([[1e-3, 0.0]]), exact(torch.zeros(1, 2)))

    assert rows.relative(1e-2).tolist() == pytest.approx([0.1])
    assert rows.with_ratio(rows.relative(1e-2)).failed(0.05).tolist() == [True]
