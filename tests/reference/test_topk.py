from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.topk import select_topk, visible_entries


def by_sorting(row: list[float], k: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda e: (-row[e], e))
    picks = sorted(e for e in order[:k] if row[e] != -math.inf)
    return picks + [-1] * (k - len(picks))


def rows_of(kind: str, rows: int, width: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g, dtype=torch.float64)
    if kind == "relu":
        x = (x - 1).clamp(min=0)
    elif kind == "coarse":
        x = (2 * x).round()
    elif kind == "constant":
        x = torch.ones_like(x)
    elif kind == "signed-zeros":
        x = torch.copysign(torch.zeros_like(x), x)
    visible = torch.randint(0, width + 1, (rows, 1), generator=g)
    return x.masked_fill(torch.arange(width) >= visible, -math.inf)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["normal", "relu", "coarse", "constant", "signed-zeros"]),
    rows=st.integers(1, 6),
    width=st.integers(0, 40),
    k=st.integers(1, 45),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_a_stable_sort(
    kind: str, rows: int, width: int, k: int, seed: int, dtype: torch.dtype
) -> None:
    scores = rows_of(kind, rows, width, seed).to(dtype)
    picks = select_topk(scores, k)
    assert picks.dtype == torch.int32
    assert picks.tolist() == [by_sorting(row, k) for row in scores.tolist()]


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64])
def test_lengths_around_k(length: int) -> None:
    k = 32
    scores = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    picks = select_topk(scores, k)
    assert picks.shape == (3, k)
    assert ((picks >= 0).sum(dim=1) == min(k, length)).all()
    assert picks.tolist() == [by_sorting(row, k) for row in scores.tolist()]


def test_plateau_of_thousands_of_zeros() -> None:
    """8,320 scores, 100 of them positive: a cap on ties leaves slots at -1."""
    g = torch.Generator().manual_seed(0)
    positive = torch.randperm(8320, generator=g)[:100]
    scores = torch.zeros(1, 8320)
    scores[0, positive] = torch.rand(100, generator=g) + 0.1
    picks = select_topk(scores, 2048)[0]
    assert (picks >= 0).all()
    assert len(set(picks.tolist())) == 2048
    assert set(positive.tolist()) <= set(picks.tolist())
    zeros = [e for e in picks.tolist() if scores[0, e] == 0]
    assert zeros == [e for e in range(8320) if scores[0, e] == 0][:1948]


def test_masked_entries_are_never_picked() -> None:
    scores = torch.full((1, 6), -math.inf)
    assert select_topk(scores, 3).tolist() == [[-1, -1, -1]]
    scores[0, 4] = -1e30
    assert select_topk(scores, 3).tolist() == [[4, -1, -1]]


def test_neighbouring_numbers_are_told_apart() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    above = torch.nextafter(one, 2 * one)
    scores = torch.stack([one, above, one]).unsqueeze(0)
    assert select_topk(scores, 1).tolist() == [[1]]


def test_scores_are_not_changed() -> None:
    scores = rows_of("relu", 4, 30, 1)
    before = scores.clone()
    select_topk(scores, 3)
    assert torch.equal(scores, before)


def test_nan_is_named() -> None:
    scores = torch.zeros(3, 5)
    scores[2, 1] = math.nan
    with pytest.raises(ValueError, match="row 2, entry 1"):
        select_topk(scores, 2)


@pytest.mark.parametrize(("k", "shape"), [(0, (1, 4)), (-1, (1, 4)), (2, (4,))])
def test_wrong_input(k: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"k {k}"):
        select_topk(torch.zeros(shape), k)


def test_an_entry_is_visible_from_the_token_that_completes_it() -> None:
    positions = torch.arange(10)
    assert visible_entries(positions, 4).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert visible_entries(torch.tensor([126, 127, 254, 255]), 128).tolist() == [0, 1, 1, 2]
    assert visible_entries(positions, 0).tolist() == [0] * 10
