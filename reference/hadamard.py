"""The 128-point Hadamard rotation of index keys and queries.

It spreads an outlier channel over all 128 dims, so that a coarse format loses less; being
symmetric and orthonormal it leaves ``q . k`` unchanged when both sides are rotated. Natural
(Sylvester) order, ``y_i = sum_j (-1)**popcount(i & j) x_j``, and no random signs.
"""

from __future__ import annotations

import torch
from torch import Tensor

POINTS = 128
SCALE_FP32 = float.fromhex("0x1.6a09e6p-4")  # fp32 0x3DB504F3, the factor that kernels multiply by
SCALE_EXACT = 128**-0.5


def hadamard(x: Tensor, scale: float = SCALE_FP32) -> Tensor:
    """Rotate the last axis by the normalised 128-point Hadamard matrix.

    Seven butterfly stages with ascending strides 1, 2, 4, ..., 64, then one multiplication: the
    order of the published kernel (Dao-AILab ``fast-hadamard-transform``), which matters for bits
    once the stages round.

    Parameters
    ----------
    x
        float64 ``[..., 128]``.
    scale
        The factor: the fp32 number that kernels use, or :data:`SCALE_EXACT` for the ``exact``
        contract. They differ by 2e-8, less than half a step of fp32.

    Returns
    -------
    Tensor
        float64 ``[..., 128]``, unrounded.

    Raises
    ------
    ValueError
        If ``x`` is not float64 or its last axis is not 128 wide.
    """
    if x.dtype != torch.float64 or x.dim() == 0 or x.shape[-1] != POINTS:
        raise ValueError(
            f"hadamard: got {x.dtype} {tuple(x.shape)}, expected torch.float64 [..., {POINTS}]"
        )
    y = x
    stride = 1
    while stride < POINTS:
        pairs = y.reshape(*x.shape[:-1], POINTS // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return y * scale
