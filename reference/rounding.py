"""One rounding: from float64 to the precision of a rounding point."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.formats import round_to_bf16
from needlepoint.reference.profile import Precision


def round_to(x: Tensor, precision: Precision) -> Tensor:
    """Round float64 values once, to nearest with ties to even, and return them as float64.

    Parameters
    ----------
    x
        float64, any shape.
    precision
        Target precision; ``FLOAT64`` returns ``x`` itself.

    Returns
    -------
    Tensor
        float64 values that the target precision represents.

    Raises
    ------
    ValueError
        If ``x`` is not float64: a value that was rounded before cannot be rounded *once*.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"round_to: got {x.dtype}, expected torch.float64 (unrounded) values")
    if precision is Precision.FLOAT64:
        return x
    if precision is Precision.FP32:
        return x.to(torch.float32).to(torch.float64)
    return round_to_bf16(x)


def round_computed(x: Tensor, precision: Precision) -> Tensor:
    """Round values in the type they were computed in; each is rounded once from that type.

    Parameters
    ----------
    x
        float32 or float64, any shape.
    precision
        Target precision; one at least as wide as ``x`` returns ``x`` itself.

    Returns
    -------
    Tensor
        Values of ``x``'s shape and dtype.
    """
    if precision is Precision.BF16:
        return round_to_bf16(x)
    if precision is Precision.FP32 and x.dtype == torch.float64:
        return x.to(torch.float32).to(x.dtype)
    return x
