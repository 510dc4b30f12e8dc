"""Strips: no bad token may vanish in the pooling, however many rows a bin has."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.verify.report.html_strips import (
    BYTES_A_BIN,
    HEIGHT,
    LEAST_BINS,
    LIMIT_Y,
    MOST_BINS,
    Strip,
    Strips,
    bins_for,
    height,
    pooled,
    strip,
)

LIMIT = HEIGHT - LIMIT_Y


def bars(found: Strip) -> list[int]:
    """Return the height of every bin, read back from the paths."""
    out = [0] * found.bins
    for path in (found.within, found.beyond):
        for start, high, wide in re.findall(rf"M(\d+) {HEIGHT}v-(\d+)h(\d+)V{HEIGHT}", path):
            for at in range(int(start), int(start) + int(wide)):
                out[at] = max(out[at], int(high))
    return out


@given(rows=st.integers(1, 5000), seed=st.integers(0, 2**31), bins=st.integers(1, 300))
def test_one_bad_row_stays_visible(rows: int, seed: int, bins: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    errors = torch.rand(rows, generator=generator) * 0.9
    bad = int(torch.randint(rows, (1,), generator=generator))
    errors[bad] = 1.0001
    found = strip(errors, bins)
    assert found is not None
    assert found.bins == min(bins, rows)
    high = bars(found)
    assert high[bad * found.bins // rows] > LIMIT
    assert sum(bar > LIMIT for bar in high) == 1
    assert found.beyond


def test_bins_hold_the_largest_error_of_their_rows() -> None:
    errors = torch.arange(10, dtype=torch.float32)
    assert pooled(errors, 3).tolist() == [3.0, 6.0, 9.0]
    assert pooled(errors, 20).tolist() == errors.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_as_high_as_can_be(value: float) -> None:
    found = strip(torch.tensor([0.1, value, 0.1]), 1)
    assert found is not None
    assert bars(found) == [HEIGHT]


def test_heights_keep_order_and_the_limit() -> None:
    errors = [0.0, 1e-9, 1e-3, 0.5, 1.0, 1.0000001, 3.0, 1e4, 1e8, 1e30, math.inf]
    high = [height(error) for error in errors]
    assert high == sorted(high)
    assert high[0] == 0
    assert high[1] >= 1
    assert high[errors.index(1.0)] == LIMIT
    assert high[errors.index(1.0000001)] >= LIMIT + 2
    assert high[-1] == HEIGHT


def test_no_rows_are_no_strip() -> None:
    assert strip(torch.empty(0), 10) is None


def test_strips_share_a_budget() -> None:
    assert bins_for(1, 10**9) == MOST_BINS
    assert bins_for(10**9, 10**6) == LEAST_BINS
    assert 100 * bins_for(100, 64_000) * BYTES_A_BIN <= 64_000


def test_what_differs_shows_everything_while_it_is_little() -> None:
    stage = "one/layer0/index/stored"
    rows = {f"{stage}/{kind}": torch.full((512,), 2.0) for kind in ("local", "accumulated")}
    few, many = Strips.of_report(rows, 3), Strips.of_report(rows, 2000)
    for kind in ("local", "accumulated"):
        found = few.of(stage, kind, differs=True)
        assert found is not None
        assert found.bins == MOST_BINS
    found = many.of(stage, "local", differs=True)
    assert found is not None
    assert (found.bins, found.rows) == (LEAST_BINS, 512)
    assert many.of(stage, "accumulated", differs=True) is None
    # One stage that matches among them keeps what a small report has.
    assert many.of(stage, "accumulated", differs=False) is not None
