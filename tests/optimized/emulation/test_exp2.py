"""The base-2 exponential: error over every fraction that can occur, and its exact points."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from needlepoint.optimized.emulation.pooling import exp2

F32 = npt.NDArray[np.float32]
BOUND = 1.5645e-7  # docs/specification.md, S2
BLOCK = 1 << 16


def worst_error(t: F32) -> tuple[float, float]:
    """Return the largest relative error and where it stands."""
    error = np.abs(exp2(t) / np.exp2(t.astype(np.float64)) - 1)
    at = int(error.argmax())
    return float(error[at]), float(t[at])


def floats_between(low: float, high: float) -> tuple[int, int]:
    """Return the bit range of the fp32 numbers in [low, high], both negative."""
    bits = np.array([high, low], np.float32).view(np.uint32)
    return int(bits[0]), int(bits[1])


def test_every_positive_fraction() -> None:
    # t in [-1, -1/2] gives n = -1 and f = t + 1 = k 2**-24, all fractions above zero there are.
    worst = max(
        worst_error(-(np.arange(s, s + BLOCK) / np.float32(2.0**24)).astype(np.float32))[0]
        for s in range(2**23, 2**24, BLOCK)
    )
    assert 1.4e-7 < worst <= BOUND


def test_every_negative_fraction_of_the_outer_binades() -> None:
    first, last = floats_between(-0.5, -(2.0**-5))
    worst = max(
        worst_error(np.arange(s, min(s + BLOCK, last + 1), dtype=np.uint32).view(np.float32))
        for s in range(first, last + 1, BLOCK)
    )
    assert worst[0] <= BOUND
    assert worst[0] > BOUND - 1e-11  # the page states this very figure and place
    assert worst[1] == pytest.approx(-0.4999677, abs=1e-7)


def test_smaller_fractions_in_steps() -> None:
    first, last = floats_between(-(2.0**-5), -(2.0**-27))
    bits = np.arange(first, last, 61, dtype=np.uint32)
    for s in range(0, bits.size, BLOCK):
        assert worst_error(bits[s : s + BLOCK].view(np.float32))[0] <= BOUND


def test_whole_range_and_exact_powers() -> None:
    rng = np.random.default_rng(0)
    t = -(rng.random(200_000) * 126).astype(np.float32)
    assert worst_error(t)[0] <= BOUND
    integers = -np.arange(127, dtype=np.float32)
    assert np.array_equal(exp2(integers), np.exp2(integers.astype(np.float64)))
    assert exp2(np.array([-0.0], np.float32))[0] == 1


def test_result_is_never_subnormal() -> None:
    t = np.nextafter(np.float32(-126), np.float32(0), dtype=np.float32)
    lowest = np.array([-126.0, t, -125.75, -125.5], np.float32)
    assert (exp2(lowest) >= np.float32(2.0**-126)).all()


def test_not_the_vendor_exponential() -> None:
    t = -(np.arange(1, 4097) / 4096).astype(np.float32)
    assert (exp2(t) != np.exp2(t)).mean() > 0.2
