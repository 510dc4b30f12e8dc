from __future__ import annotations

import math

import pytest
import torch

from needlepoint.verify.numerics.spread import finite, not_finite, spread
from needlepoint.verify.schema.result import Spread


def test_statistics_of_finite_rows() -> None:
    rows = torch.arange(1, 201, dtype=torch.float32)

    assert spread(rows) == Spread(max=200.0, mean=100.5, p99=198.0)


def test_one_row_is_its_own_percentile() -> None:
    assert spread(torch.tensor([0.25])) == Spread(max=0.25, mean=0.25, p99=0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_an_error_never_lowers_a_statistic(bad: float) -> None:
    rows = torch.full((200,), 0.5)
    rows[7] = bad

    assert spread(rows) == Spread(max=None, mean=None, p99=0.5)
    assert not_finite(rows) == 1

    rows[:2] = bad
    assert spread(rows).p99 is None


def test_no_rows_have_no_statistics() -> None:
    assert spread(torch.empty(0)) == Spread(max=None, mean=None, p99=None)


def test_finite_passes_numbers_only() -> None:
    assert [finite(x) for x in (1.5, math.nan, math.inf, -math.inf)] == [1.5, None, None, None]
