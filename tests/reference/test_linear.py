from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.linear import BLOCK, project
from needlepoint.reference.profile import Precision


def tensors(tokens: int, seed: int, width: int = 96, out: int = 40) -> tuple[Tensor, Tensor]:
    """Return bf16 numbers: their products and most of their float64 sums are exact."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=g).to(torch.bfloat16)
    return x, torch.randn(out, width, generator=g).to(torch.bfloat16)


def test_one_rounding_of_the_exact_sum() -> None:
    x, w = tensors(5, 0)
    found = project(x, w, Precision.FP32)
    for row in range(5):
        for column in (0, 39):
            pairs = zip(x[row].tolist(), w[column].tolist(), strict=True)
            exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
            assert found[row, column].item() == torch.tensor(float(exact)).item()
    assert torch.equal(found, project(x, w, Precision.FLOAT64).float().double())
    assert not torch.equal(found, project(x, w, Precision.FLOAT64))


def fine_tensors(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return numbers whose sums round, so that another order of addition shows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 384, generator=g, dtype=torch.float64)
    return x, torch.randn(40, 384, generator=g, dtype=torch.float64)


def test_order_of_addition_shows_in_these_numbers() -> None:
    x, w = fine_tensors(1, 0)
    reversed_terms = project(x.flip(1), w.flip(1), Precision.FLOAT64)
    assert not torch.equal(reversed_terms, project(x, w, Precision.FLOAT64))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 3 * BLOCK),
    cuts=st.lists(st.integers(1, 3 * BLOCK), max_size=4),
    seed=st.integers(0, 5),
    threads=st.sampled_from([1, 2, 4]),
)
def test_bytes_do_not_depend_on_split_or_threads(
    tokens: int, cuts: list[int], seed: int, threads: int
) -> None:
    x, w = fine_tensors(tokens, seed)
    torch.set_num_threads(1)
    whole = project(x, w, Precision.FLOAT64)
    torch.set_num_threads(threads)
    ends = [0, *sorted({c for c in cuts if c < tokens}), tokens]
    parts = [
        project(x[a:b], w, Precision.FLOAT64, first_position=a) for a, b in itertools.pairwise(ends)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.get_num_threads() == threads


def test_bytes_do_not_depend_on_other_tokens() -> None:
    x, w = fine_tensors(BLOCK, 1)
    whole = project(x, w, Precision.FLOAT64)
    changed = x * 1000
    changed[17] = x[17]
    assert torch.equal(project(changed, w, Precision.FLOAT64)[17], whole[17])
    assert torch.equal(project(x[17:18], w, Precision.FLOAT64, first_position=17)[0], whole[17])


def test_bytes_do_not_depend_on_memory_layout() -> None:
    x, w = fine_tensors(70, 2)
    whole = project(x, w, Precision.FLOAT64)
    padded = torch.zeros(70, 385, dtype=torch.float64)
    padded[:, 1:] = x
    shifted = torch.zeros(41, 385, dtype=torch.float64)
    shifted[1:, 1:] = w
    assert not padded[:, 1:].is_contiguous()
    assert torch.equal(project(padded[:, 1:], shifted[1:, 1:], Precision.FLOAT64), whole)


def test_wide_weights_are_cut_without_a_trace() -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(3, 8, generator=g, dtype=torch.float64)
    w = torch.randn(2100, 8, generator=g, dtype=torch.float64)
    torch.testing.assert_close(project(x, w, Precision.FLOAT64), x @ w.t(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_named(value: float) -> None:
    x, w = tensors(4, 4)
    x[2, 7] = value
    with pytest.raises(ValueError, match=r"position 12, dim 7"):
        project(x, w, Precision.FP32, first_position=10)


@pytest.mark.parametrize(
    ("x", "w", "position", "named"),
    [
        (torch.zeros(0, 4), torch.zeros(2, 4), 0, "0 tokens"),
        (torch.zeros(1, 4), torch.zeros(2, 5), 0, r"\(2, 5\)"),
        (torch.zeros(4), torch.zeros(2, 4), 0, r"\(4,\)"),
        (torch.zeros(1, 4), torch.zeros(2, 4), -1, "first_position -1"),
    ],
)
def test_wrong_input(x: Tensor, w: Tensor, position: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        project(x, w, Precision.FP32, first_position=position)
