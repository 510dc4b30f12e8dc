from __future__ import annotations

import pytest
import torch

from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_computed, round_to


def test_float64_is_untouched() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    assert round_to(x, Precision.FLOAT64) is x


@pytest.mark.parametrize(
    ("value", "precision", "wanted"),
    [
        (1 + 2**-24, Precision.FP32, 1.0),  # a tie goes to the even neighbour
        (1 + 3 * 2**-24, Precision.FP32, 1 + 2**-22),
        (1 + 2**-8, Precision.BF16, 1.0),
        (1 + 2**-8 + 2**-40, Precision.BF16, 1 + 2**-7),  # no tie: one rounding, not two
        (-(1 + 2**-8 + 2**-40), Precision.BF16, -(1 + 2**-7)),
    ],
)
def test_rounds_once(value: float, precision: Precision, wanted: float) -> None:
    found = round_to(torch.tensor([value], dtype=torch.float64), precision)
    assert found.dtype == torch.float64
    assert found.item() == wanted


def test_rounded_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32"):
        round_to(torch.ones(1), Precision.BF16)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computed_values_are_rounded_once_from_their_own_type(
    dtype: torch.dtype, precision: Precision
) -> None:
    x = torch.tensor([1 + 2**-8 + 2**-20, 1 / 3, -(2.0**-130), 1 + 2**-8], dtype=dtype)
    found = round_computed(x, precision)
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.float64), round_to(x.to(torch.float64), precision))
