"""The emulated fused multiply-add against exact rationals."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from needlepoint.optimized.emulation.exact32 import fma, pair_tree

F32 = npt.NDArray[np.float32]
SMALLEST = Fraction(1, 2**149)


def nearest_fp32(value: Fraction) -> np.float32:
    """Round a rational to fp32, ties to even, from the definition."""
    quantum = SMALLEST
    if value:
        exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
        if abs(value) < Fraction(2) ** exponent:
            exponent -= 1
        quantum = max(quantum, Fraction(2) ** (exponent - 23))
    rounded = round(value / quantum) * quantum
    if abs(rounded) >= 2**128:
        return np.float32(np.inf if rounded > 0 else -np.inf)
    return np.float32(float(rounded))


def exact_fma(a: float, b: float, c: float) -> np.float32:
    return nearest_fp32(Fraction(a) * Fraction(b) + Fraction(c))


def assert_fma_exact(a: F32, b: F32, c: F32) -> None:
    got = fma(a, b, c)
    expected = np.array(
        [exact_fma(*map(float, abc)) for abc in zip(a, b, c, strict=True)], np.float32
    )
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, (
        f"{wrong.size} wrong, first: fma({a[wrong[0]]!r}, {b[wrong[0]]!r}, {c[wrong[0]]!r}) = "
        f"{got[wrong[0]]!r}, expected {expected[wrong[0]]!r}"
    )


def random_bits(rng: np.random.Generator, count: int, exponents: tuple[int, int]) -> F32:
    """Return floats with uniform mantissas and biased exponents in a range."""
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    exponent = rng.integers(*exponents, count, dtype=np.uint32) << np.uint32(23)
    return (sign | exponent | rng.integers(0, 2**23, count, dtype=np.uint32)).view(np.float32)


@pytest.mark.parametrize("exponents", [(0, 255), (100, 154), (120, 134), (1, 70), (0, 64)])
def test_random_bits(exponents: tuple[int, int]) -> None:
    rng = np.random.default_rng(exponents[1])
    a, b, c = (random_bits(rng, 3000, exponents) for _ in range(3))
    assert_fma_exact(a, b, c)


def halfway_cases() -> tuple[F32, F32, F32]:
    """Return sums whose float64 rounding lands on, or beside, the midpoint of two fp32 numbers.

    (1 + i 2**-12) (1 + j 2**-12) has bits down to 2**-24, half an fp32 step; with an addend far
    below, float64 drops the addend and leaves a tie.
    """
    i, j = np.meshgrid(np.arange(1, 33), np.arange(1, 33))
    base = (1 + i.ravel() * 2.0**-12).astype(np.float32)
    other = (1 + j.ravel() * 2.0**-12).astype(np.float32)
    addends = [s * 2.0**-e for s in (1, -1) for e in (25, 30, 53, 54, 60, 80, 100, 149)]
    a, b, c = [], [], []
    for addend in [0.0, *addends]:
        a.append(base)
        b.append(other)
        c.append(np.full_like(base, addend))
    return np.concatenate(a), np.concatenate(b), np.concatenate(c)


def test_halfway() -> None:
    a, b, c = halfway_cases()
    assert_fma_exact(a, b, c)


def test_halfway_cases_defeat_double_rounding() -> None:
    a, b, c = halfway_cases()
    twice = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    assert np.count_nonzero(twice != fma(a, b, c)) > 100


def test_cancellation() -> None:
    rng = np.random.default_rng(3)
    a, b = random_bits(rng, 3000, (110, 140)), random_bits(rng, 3000, (110, 140))
    product = -(a * b)
    for c in (
        product,
        np.nextafter(product, np.float32(0)),
        -np.nextafter(-product, np.float32(9)),
    ):
        assert_fma_exact(a, b, c)


def test_subnormal_results_round_once() -> None:
    # 2**-127 plus half of the last subnormal bit, less or more a rest below float64's reach:
    # (1 + s 2**-22) (1 + t 2**-22) differs from 1 by as little as 2**-44.
    a, b, c = [], [], []
    for s, t, odd in itertools.product((1, -1), (1, -1), (0, 1)):
        a.append((1 + s * 2.0**-22) * 2.0**-75)
        b.append((1 + t * 2.0**-22) * 2.0**-75)
        c.append(2.0**-127 + odd * 2.0**-149)
    # (1 + i 2**-23) (1 - 2 i 2**-24) = 1 - i*i 2**-46 leaves the float64 sum one odd step below
    # the midpoint: a step up from there would land on it.
    for i, odd in itertools.product(range(200, 400), (0, 1)):
        a.append((1 + i * 2.0**-23) * 2.0**-75)
        b.append((1 - 2 * i * 2.0**-24) * 2.0**-75)
        c.append(2.0**-127 + odd * 2.0**-149)
    assert_fma_exact(*(np.array(x, np.float32) for x in (a, b, c)))


def test_subnormal_random() -> None:
    rng = np.random.default_rng(4)
    a, b = random_bits(rng, 4000, (45, 60)), random_bits(rng, 4000, (40, 66))
    c = random_bits(rng, 4000, (0, 4))
    assert_fma_exact(a, b, c)


def test_overflow_is_infinite_and_the_last_finite_is_kept() -> None:
    biggest = np.finfo(np.float32).max
    a = np.array([biggest, biggest, biggest, -biggest], np.float32)
    b = np.array([2, 1, 1, 1], np.float32)
    c = np.array([0, 2.0**103, 2.0**102, -(2.0**103)], np.float32)
    assert fma(a, b, c).tolist() == [np.inf, np.inf, float(biggest), -np.inf]


def test_signed_zeros() -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    for a, c in itertools.product(zeros, zeros):
        expected = a * np.float32(1) + c
        got = fma(a, np.float32(1), c)
        assert np.signbit(got) == np.signbit(expected)
    underflow = fma(np.float32(-(2.0**-100)), np.float32(2.0**-100), np.float32(0))
    assert underflow == 0
    assert np.signbit(underflow)


def test_broadcast_and_empty() -> None:
    a = np.ones((3, 1), np.float32)
    assert fma(a, np.ones((1, 4), np.float32), np.float32(1)).shape == (3, 4)
    assert fma(a, a, np.ones((5, 1, 1), np.float32)).shape == (5, 3, 1)
    assert fma(np.float32(2), np.float32(3), np.float32(4)).shape == ()
    assert fma(np.empty((0, 4), np.float32), np.float32(1), np.float32(1)).shape == (0, 4)


def test_pair_tree_adds_adjacent_pairs_first() -> None:
    # 2**24 + 1 = 2**24 in fp32, so the order shows.
    x = np.array([2.0**24, 1, 1, 1], np.float32)
    assert pair_tree(x) == np.float32(2.0**24 + 2)  # (2**24 + 1) + (1 + 1)
    assert ((x[0] + x[1]) + x[2]) + x[3] == np.float32(2.0**24)  # one after the other
    swapped = np.array([1, 2.0**24, 1, 1], np.float32)
    assert pair_tree(swapped[[0, 2, 1, 3]]) == np.float32(2.0**24 + 2)
