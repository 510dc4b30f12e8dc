"""Projections whose rows do not depend on how many are computed together.

A matrix product of a library may add up the terms of a row in another order when the number of rows
or threads changes, and then prefill and decode of one token differ in their last bits. Here each
token has a fixed place: position ``p`` is row ``p % BLOCK`` of a block of constant shape, the rest
of the block is zero or other tokens, and each block is one single-threaded float64 product. Threads
share blocks, never a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.parallel import for_each_block, sized
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to

BLOCK = 64
"""Rows of a block. Smaller wastes less on a one-token call, larger is faster on a prompt."""

_COLUMNS = 1024  # output columns of one product: bounds the float64 copy of the weight
_CARD_COLUMNS = 1 << 15  # the same on a card


def project(x: Tensor, weight: Tensor, precision: Precision, *, first_position: int = 0) -> Tensor:
    """Return ``x @ weight.T``, accumulated in float64 and rounded once.

    The bytes of a row depend on its own values, its position and the weight alone: not on the
    other rows, on splits of the request into calls or on the number of threads.

    Parameters
    ----------
    x
        ``[n, in]`` of any float dtype: consecutive tokens of one request.
    weight
        ``[out, in]`` of any float dtype.
    precision
        Precision of the one rounding; ``FLOAT64`` leaves the sums as they are.
    first_position
        Position of ``x[0]`` in its request.

    Returns
    -------
    Tensor
        float64 ``[n, out]``.

    Raises
    ------
    ValueError
        If there are no tokens, the shapes do not fit, the position is negative, or ``x`` holds NaN
        or infinity (naming position and dim).
    """
    _check(x, weight, first_position)
    offset = first_position % BLOCK
    blocks = -(-(offset + len(x)) // BLOCK)
    padded = torch.zeros(blocks * BLOCK, x.shape[1], dtype=torch.float64)
    padded[offset : offset + len(x)] = x
    out = torch.empty(blocks * BLOCK, len(weight), dtype=torch.float64)
    step = sized(_COLUMNS, _CARD_COLUMNS)
    for start in range(0, len(weight), step):
        columns = slice(start, start + step)
        factor = torch.empty(weight[columns].shape, dtype=torch.float64)  # aligned, contiguous
        factor.copy_(weight[columns])

        def block(index: int, columns: slice = columns, factor: Tensor = factor) -> None:
            rows = slice(index * BLOCK, (index + 1) * BLOCK)
            out[rows, columns] = torch.mm(padded[rows], factor.t())

        for_each_block(block, blocks)
    return round_to(out[offset : offset + len(x)], precision)


def _check(x: Tensor, weight: Tensor, first_position: int) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"project: tokens {tuple(x.shape)} and weight {tuple(weight.shape)}, expected "
            "[n, in] and [out, in]"
        )
    if len(x) == 0:
        raise ValueError("project: 0 tokens, expected at least 1")
    if first_position < 0:
        raise ValueError(f"project: first_position {first_position}, expected 0 or more")
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        row, dim = (int(i) for i in (~finite).nonzero()[0])
        raise ValueError(
            f"project: value {float(x[row, dim])} at position {first_position + row}, dim {dim}; "
            "expected finite inputs"
        )
