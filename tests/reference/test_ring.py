from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.reference.profile import Precision
from needlepoint.reference.ring import PositionRing


def rows(start: int, stop: int) -> torch.Tensor:
    """Row of position p holds p + 1/3."""
    return torch.arange(start, stop, dtype=torch.float64).unsqueeze(1) + 1 / 3


@given(slots=st.integers(1, 9), parts=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_holds_the_last_rows_however_they_came(slots: int, parts: list[int]) -> None:
    ring = PositionRing(slots, 1, Precision.FLOAT64)
    start = 0
    for part in parts:
        ring.write(start, rows(start, start + part))
        start += part
    first = max(0, start - slots)
    assert torch.equal(ring.read(first, start), rows(first, start))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FLOAT64, torch.float64),
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
    ],
)
def test_writing_rounds(precision: Precision, dtype: torch.dtype) -> None:
    ring = PositionRing(4, 1, precision)
    ring.write(0, rows(0, 4))
    assert ring.rows.dtype == dtype
    assert torch.equal(ring.read(0, 4), rows(0, 4).to(dtype).double())


@pytest.mark.parametrize(("start", "stop", "named"), [(-1, 2, "-1"), (0, 2, "0"), (5, 7, "6")])
def test_absent_positions_are_named(start: int, stop: int, named: str) -> None:
    ring = PositionRing(4, 1, Precision.FP32)
    ring.write(0, rows(0, 6))  # 2, 3, 4, 5 remain
    with pytest.raises(ValueError, match=rf"expected {named};"):
        ring.read(start, stop)


def test_reading_nothing() -> None:
    assert PositionRing(4, 3, Precision.FP32).read(0, 0).shape == (0, 3)
