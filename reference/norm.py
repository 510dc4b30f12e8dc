"""RMS and layer norm with sums that do not depend on the machine."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sum the last axis as a tree of adjacent pairs (strides 1, 2, 4, ...), padded with zeros.

    Only elementwise additions: the bits do not depend on vector width, threads or the other rows,
    as those of ``torch.sum`` may.

    Parameters
    ----------
    x
        float64 ``[..., n]``, ``n >= 1``.

    Returns
    -------
    Tensor
        float64 ``[...]``.
    """
    width = x.shape[-1]
    padding = (1 << (width - 1).bit_length()) - width
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis, in float64, unrounded.

    Parameters
    ----------
    x
        float64 ``[..., d]``.
    weight
        ``[d]`` of any float dtype, or None for the unweighted norm of main queries.
    eps
        Added to the mean square.

    Returns
    -------
    Tensor
        float64 ``[..., d]``.

    Raises
    ------
    ValueError
        If ``x`` is not float64 or the weight has another width.
    """
    if x.dtype != torch.float64 or (weight is not None and weight.shape != x.shape[-1:]):
        raise ValueError(
            f"rms_norm: values {x.dtype} {tuple(x.shape)}, weight "
            f"{None if weight is None else tuple(weight.shape)}; expected float64 [..., d] and [d]"
        )
    mean = tree_sum(x * x) / x.shape[-1]
    normed = x * (1.0 / (mean + eps).sqrt()).unsqueeze(-1)
    return normed if weight is None else normed * weight.to(torch.float64)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``(x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias``, float64, unrounded.

    Parameters
    ----------
    x
        float64 ``[..., d]``.
    weight, bias
        ``[d]`` of any float dtype.
    eps
        Added to the variance.

    Raises
    ------
    ValueError
        If ``x`` is not float64 or weight or bias have another width.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"layer_norm: bias {tuple(bias.shape)} for rows of {x.shape[-1]}, expected [d]"
        )
    centred = x - (tree_sum(x) / x.shape[-1]).unsqueeze(-1)
    return rms_norm(centred, weight, eps) + bias.to(torch.float64)
