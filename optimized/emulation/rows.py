"""S4 to S6: norm, RoPE and Hadamard of rows, channels on the first axis.

A block of rows is held as ``[d, ...]``: every step then runs over contiguous rows, whatever the
distance of the channels it combines.
"""

from __future__ import annotations

import numpy as np

from needlepoint.optimized.emulation.exact32 import F32, fma, pair_tree
from needlepoint.optimized.emulation.specification import HADAMARD_SCALE, ROPE_DIMS
from needlepoint.reference.formats.names import RopeLayout

_PAIRS = {
    RopeLayout.TRAILING_PAIRS: (slice(-ROPE_DIMS, None, 2), slice(1 - ROPE_DIMS, None, 2)),
    RopeLayout.LEADING_PAIRS: (slice(0, ROPE_DIMS, 2), slice(1, ROPE_DIMS, 2)),
    RopeLayout.LEADING_HALVES: (slice(0, ROPE_DIMS // 2), slice(ROPE_DIMS // 2, ROPE_DIMS)),
}
"""Dims of the first and of the second number of each pair."""


def norm(x: F32, weight: F32, eps: np.float32) -> F32:
    """Return the RMS-normalised rows (S4).

    Parameters
    ----------
    x
        float32 ``[d, n]``, d a power of two.
    weight
        float32 ``[d]``.
    eps
        Added to the mean square, at least 2**-126.
    """
    half_sums = fma(x[1::2], x[1::2], x[0::2] * x[0::2])
    mean = fma(pair_tree(half_sums), np.float32(1.0 / x.shape[0]), eps)
    root: F32 = np.sqrt(mean)
    inverse: F32 = np.divide(np.float32(1.0), root, dtype=np.float32)
    return (x * inverse) * weight[:, None]


def layer_norm(x: F32, weight: F32, bias: F32, eps: np.float32) -> F32:
    """Return rows with mean and size normalised, then scaled and shifted.

    Parameters
    ----------
    x
        float32 ``[d, n]``, d a power of two.
    weight, bias
        float32 ``[d]``.
    eps
        Added to the variance, at least 2**-126.
    """
    mean = pair_tree(x) * np.float32(1.0 / x.shape[0])
    return norm(x - mean, weight, eps) + bias[:, None]


def rope(x: F32, cos: F32, sin: F32, layout: RopeLayout = RopeLayout.TRAILING_PAIRS) -> F32:
    """Return rows with 64 dims rotated: the last ones in adjacent pairs (S5), or as laid out.

    Parameters
    ----------
    x
        float32 ``[d, ...]``.
    cos, sin
        float32 ``[32, ...]``, broadcast to the pairs.
    layout
        Which dims are rotated.
    """
    out = x.copy()
    first, second = _PAIRS[layout]
    even, odd = x[first], x[second]
    out[first] = fma(-odd, sin, even * cos)
    out[second] = fma(odd, cos, even * sin)
    return out


def hadamard(x: F32) -> F32:
    """Return the scaled 128-point Hadamard transform over the first axis (S6)."""
    stride = 1
    while stride < x.shape[0]:
        pairs = x.reshape(x.shape[0] // (2 * stride), 2, stride, *x.shape[1:])
        out = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        x = out.reshape(x.shape)
        stride *= 2
    return x * HADAMARD_SCALE
