"""Exact selection, ties to the lower entry, against sorting by definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.optimized.emulation.select import select_topk


def by_definition(scores: Tensor, visible: Tensor, k: int) -> list[list[int]]:
    out = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        order = sorted(range(seen), key=lambda entry: (-row[entry], entry))
        picks = sorted(order[:k])
        out.append(picks + [-1] * (k - len(picks)))
    return out


@given(
    entries=st.integers(0, 90),
    rows=st.integers(1, 5),
    k=st.integers(1, 100),
    distinct=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(entries: int, rows: int, k: int, distinct: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-distinct, distinct + 1, (rows, entries), generator=generator) / 8
    visible = torch.randint(0, entries + 1, (rows,), generator=generator)
    hidden = torch.arange(entries) >= visible[:, None]
    masked = scores.masked_fill(hidden, -torch.inf)
    got = select_topk(masked, visible, k)
    assert got.dtype == torch.int32
    assert got.tolist() == by_definition(scores, visible, k)


def test_zeros_of_both_signs_tie() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 1.0]])
    assert select_topk(scores, torch.tensor([4]), 3).tolist() == [[0, 1, 3]]


def test_plateau_goes_to_the_lowest_entries() -> None:
    scores = torch.zeros(1, 3000)
    scores[0, 2990:] = 1
    picks = select_topk(scores, torch.tensor([3000]), 512)[0]
    assert picks.tolist() == [*range(502), *range(2990, 3000)]


@pytest.mark.parametrize("hidden", [1e30, float("inf"), float("nan")])
def test_invisible_entries_are_never_picked(hidden: float) -> None:
    scores = torch.tensor([[-3.0, -2.0, hidden, hidden]])
    assert select_topk(scores, torch.tensor([2]), 4).tolist() == [[0, 1, -1, -1]]


def test_extreme_scores_keep_their_order() -> None:
    big = torch.finfo(torch.float32).max
    scores = torch.tensor([[-big, big, 1e-45, -1e-45, 0.0, -torch.inf]])
    seen = torch.tensor([6])
    assert select_topk(scores, seen, 1).tolist() == [[1]]
    assert select_topk(scores, seen, 2).tolist() == [[1, 2]]
    assert select_topk(scores, seen, 3).tolist() == [[1, 2, 4]]
    assert select_topk(scores, seen, 5).tolist() == [[0, 1, 2, 3, 4]]


def test_scores_are_not_modified() -> None:
    scores = torch.tensor([[-0.0, 1.0]])
    before = scores.clone()
    select_topk(scores, torch.tensor([1]), 2)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))
