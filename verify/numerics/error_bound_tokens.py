"""ErrorBound of the LayerNorm with bias that index keys of single tokens pass (ratio 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.verify.numerics.error_bound import ErrorBound, normed
from needlepoint.verify.numerics.error_model import REDUCTION, TINY, U


def layer_normed(row: ErrorBound, weight: Tensor, bias: Tensor, eps: float) -> ErrorBound:
    """Enclose ``(x - mean) w / sqrt(mean (x - mean)^2 + eps) + b``.

    The mean moves by at most the mean radius and what a sum in any order and one division lose;
    ``x - mean`` is then one more rounded sum, and normalised as an RMS norm does. A variance formed
    as a difference of two mean squares is not admitted: it loses all digits where the mean is
    large.

    Parameters
    ----------
    row
        [..., d].
    weight, bias
        [d].
    eps
        Positive.
    """
    x, delta = row.value, row.delta
    adds = min(x.shape[-1] - 1, int(REDUCTION.value)) + 2
    mean = x.mean(-1, keepdim=True)
    lost = U * adds * x.abs().mean(-1, keepdim=True) + delta.mean(-1, keepdim=True)
    # 2 U: the difference itself, and x and mean scaled one by one before they are subtracted.
    radius = delta + lost + 2 * U * (x.abs() + mean.abs()) + TINY
    found = normed(ErrorBound(x - mean, radius), weight, eps)
    shift = bias.to(torch.float64)
    value = found.value + shift
    added = 2 * U * (found.value.abs() + shift.abs()) + TINY
    return ErrorBound(value, found.delta + added)
