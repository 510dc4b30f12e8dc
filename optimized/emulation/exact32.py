"""Binary32 arithmetic on the CPU, exact to the last bit: fused multiply-add and trees.

NumPy's float32 ``+ - * /`` and ``sqrt`` are correctly rounded, so only the fused multiply-add needs
work. A product of two fp32 numbers is exact in float64; the sum with the addend is rounded to
float64 and then again to fp32. The second rounding errs only where the first one *lands* on the
midpoint of two fp32 numbers, because a midpoint is itself a float64 number and rounding is
monotone. There, and in the subnormal range, the float64 sum is first rounded to odd (Boldo and
Melquiond, "Emulation of FMA and correctly rounded sums", 2008), after which the second rounding is
the correct one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_MIDPOINT_SHIFT = 35  # leaves the 29 bits that fp32 drops, at the top of the word
_MIDPOINT = np.iinfo(np.int64).min  # 0x10000000 after that shift
_SMALLEST_NORMAL = np.float32(2.0**-126)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """Return fl(a * b + c) with one rounding.

    Parameters
    ----------
    a, b, c
        float32 arrays or scalars (or float64 holding fp32 values), broadcast together.

    Returns
    -------
    ndarray
        float32, of the broadcast shape.
    """
    product = np.asarray(np.multiply(a, b, dtype=np.float64))
    if product.ndim:
        return round_sum(product, c)
    return round_sum(product[None], c).reshape(np.shape(c))


def round_sum(product: F64, addend: npt.ArrayLike) -> F32:
    """Return fl32(product + addend), one rounding.

    Parameters
    ----------
    product
        float64, exact products of two fp32 numbers.
    addend
        fp32 values (float32 or float64), broadcast with ``product``.
    """
    total = np.add(product, addend, dtype=np.float64)
    narrow = _narrow(total)
    if total.size == 0:
        return narrow
    dropped = np.left_shift(total.view(np.int64), _MIDPOINT_SHIFT)
    size = np.abs(narrow)
    if size.min() <= _SMALLEST_NORMAL:
        unsafe = (dropped == _MIDPOINT) | ((size <= _SMALLEST_NORMAL) & (total != 0))
        _repair(narrow, total, product, addend, unsafe)
    elif dropped.min() == _MIDPOINT:
        _repair(narrow, total, product, addend, dropped == _MIDPOINT)
    return narrow


def pair_tree(x: F32) -> F32:
    """Return ``tree`` of the specification over the first axis (a power of two long)."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    total: F32 = x[0]
    return total


def _repair(
    narrow: F32,
    total: F64,
    product: F64,
    addend: npt.ArrayLike,
    unsafe: npt.NDArray[np.bool_],
) -> None:
    """Round again, from the sum made odd, where ``unsafe`` and the float64 sum was inexact."""
    where = np.flatnonzero(unsafe)
    s, p, c = (_taken(x, total.shape, where) for x in (total, product, addend))
    with np.errstate(invalid="ignore"):
        rest = s - p
        error = (p - (s - rest)) + (c - rest)  # exact: Knuth's two-sum
    if error.any():  # most sums of few bits are exact, midpoints among them
        narrow.put(where, _narrow(_made_odd(s, error)))


def _taken(x: npt.ArrayLike, shape: tuple[int, ...], where: npt.NDArray[np.intp]) -> F64:
    whole = np.asarray(x)
    if whole.shape != shape:
        whole = np.broadcast_to(whole, shape)
    return whole.take(where).astype(np.float64)


def _narrow(x: F64) -> F32:
    with np.errstate(over="ignore"):  # beyond fp32 is infinity, as in IEEE
        return x.astype(np.float32)


def _made_odd(s: F64, error: F64) -> F64:
    """Make a sum odd in its last bit where it is inexact, by the error that it lacks."""
    bits = s.view(np.int64)
    step = np.where((error > 0) == (s > 0), 1, -1)  # away from zero or towards it
    even = (bits & 1) == 0
    inexact = (error != 0) & np.isfinite(error)
    return (bits + np.where(even & inexact, step, 0)).view(np.float64)
