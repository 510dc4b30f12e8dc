from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.verify.base.rows import Rows, Token, stage_rows

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=6).map(tuple)
RATIOS = st.sampled_from([None, 4, 128])


@given(LENGTHS, RATIOS)
def test_rows_enumerate_requests_in_order(lengths: tuple[int, ...], ratio: int | None) -> None:
    expected = [
        Token(request, (entry + 1) * (ratio or 1) - 1, entry if ratio else None)
        for request, length in enumerate(lengths)
        for entry in range(length // (ratio or 1))
    ]

    rows = Rows(lengths, ratio)

    assert rows.total == len(expected)
    assert [rows.token(row) for row in range(rows.total)] == expected


def test_entries_stand_at_the_token_that_completes_them() -> None:
    rows = Rows((7, 3, 8), 4)

    assert rows.counts == (1, 0, 2)
    assert rows.offsets == (0, 1, 1, 3)
    assert rows.span(2) == slice(1, 3)
    assert rows.token(0) == Token(0, 3, 0)
    assert rows.token(1) == Token(2, 3, 0)
    assert rows.token(2) == Token(2, 7, 1)


def test_shape_is_kept() -> None:
    tokens = Rows((5, 5)).tokens(torch.tensor([[0, 4], [5, 9]], dtype=torch.int32))

    assert tokens.request.tolist() == [[0, 0], [1, 1]]
    assert tokens.position.tolist() == [[0, 4], [0, 4]]
    assert tokens.entry is None


def test_stage_rows_pick_the_side() -> None:
    assert stage_rows(("index", "stored"), [9], 4) == Rows((9,), 4)
    assert stage_rows(("index", "topk"), [9], 4) == Rows((9,))


def test_out_of_range_is_named() -> None:
    rows = Rows((7, 3), 4)

    with pytest.raises(ValueError, match="row 1: expected 0 to 0"):
        rows.token(1)
    with pytest.raises(ValueError, match="row 0: there are none"):
        Rows((3,), 4).token(0)
    with pytest.raises(ValueError, match="row -1: expected 0 to 9"):
        Rows((7, 3)).tokens(torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="request 2: expected 0 to 1"):
        rows.span(2)
    with pytest.raises(ValueError, match=r"request lengths \(4, -1\)"):
        Rows((4, -1))
    with pytest.raises(ValueError, match="ratio 0"):
        Rows((4,), 0)
