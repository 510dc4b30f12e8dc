"""A kernel of your own, judged in its own test suite by the pytest plugin of needlepoint."""

from collections.abc import Callable

import pytest
from my_candidate import MyKernel


@pytest.mark.needlepoint(tokens=600, layers=0)
def test_my_kernel(needlepoint_judge: Callable[..., object]) -> None:
    """Every row of every declared stage is within its limit."""
    needlepoint_judge(MyKernel)
