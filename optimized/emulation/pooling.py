"""S1 to S3: prescaled scores, base-2 softmax weights, sums in a stated order, one division."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from needlepoint.optimized.emulation.exact32 import F32, fma, pair_tree, round_sum
from needlepoint.optimized.emulation.specification import (
    EXP2_COEFFICIENTS,
    GROUP,
    LOG2_E,
    LOWEST_EXPONENT,
    MAGIC,
)


def exp2(t: F32) -> F32:
    """Return the specification's 2**t (S2) for t in [-126, 0].

    The integer part comes from adding and subtracting 1.5 * 2**23, the fraction in [-1/2, 1/2] goes
    through a polynomial, and the exponent is added to the bits.

    Parameters
    ----------
    t
        float32, any shape, at least -126 and at most 0.

    Returns
    -------
    ndarray
        float32; the relative error is at most 1.5645e-7 over every fraction that can occur.
    """
    shifted = t + MAGIC
    fraction = (t - (shifted - MAGIC)).astype(np.float64)
    highest, *rest = EXP2_COEFFICIENTS
    p = round_sum(fraction * np.float64(highest), rest[0])
    for coefficient in (*rest[1:], np.float32(1.0)):
        p = round_sum(fraction * p, coefficient)
    exponent = np.left_shift(shifted.view(np.int32), 23)  # wraps modulo 2**32, as meant
    return (p.view(np.int32) + exponent).view(np.float32)


def scaled_ape(ape: F32) -> F32:
    """Return A = fl(ape * L), the position embedding in base-2 units (S1)."""
    return ape * LOG2_E


def softmax_weights(score: F32, ape: F32, masked: npt.NDArray[np.bool_] | None) -> F32:
    """Return the unnormalised weight of every slot (S1, S2).

    Parameters
    ----------
    score
        float32 ``[slots, ...]``, slots in time order.
    ape
        :func:`scaled_ape` of each slot, broadcast to ``score``.
    masked
        Slots at a negative position, broadcast to ``score``; None if there are none.

    Returns
    -------
    ndarray
        float32 ``[slots, ...]``; exactly 1 at the maximum, exactly +0 at masked slots.
    """
    z = fma(score, LOG2_E, ape)
    if masked is not None:
        z = np.where(masked, np.float32(-np.inf), z)
    t = np.maximum(z - z.max(axis=0), LOWEST_EXPONENT)
    e = exp2(t)
    return e if masked is None else np.where(masked, np.float32(0.0), e)


def pool(kv: F32, score: F32, ape: F32, masked: npt.NDArray[np.bool_] | None = None) -> F32:
    """Return pooled rows: sum of weight * kv over the sum of weights (S3).

    Parameters
    ----------
    kv, score
        float32 ``[slots, ...]`` in time order; 8 slots (ratio 4) or 128 (ratio 128).
    ape
        :func:`scaled_ape` of each slot, broadcast to ``score``.
    masked
        As in :func:`softmax_weights`; the kv of a masked slot counts as +0.

    Returns
    -------
    ndarray
        float32, the shape of one slot.
    """
    e = softmax_weights(score, ape, masked)
    if masked is not None:
        kv = np.where(masked, np.float32(0.0), kv)
    grouped = (kv.shape[0] // GROUP, GROUP, *kv.shape[1:])
    weights = e.reshape(grouped)
    products = np.multiply(e, kv, dtype=np.float64).reshape(grouped)
    s = weights[:, 0]
    v = (products[:, 0] + 0.0).astype(np.float32)  # exact products: one rounding, never -0
    for slot in range(1, GROUP):
        s = s + weights[:, slot]
        v = round_sum(products[:, slot], v)
    return pair_tree(v) / pair_tree(s)
