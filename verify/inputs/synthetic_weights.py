"""How some synthetic kinds change a layer's weights, so that what they are for gets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.inputs.synthetic_draw import Draw

ROPE_DIMS = 64  # every model rotates 64: the first ones at ratio 1, else the last
OUTLIER_DIMS = 3

_Change = Callable[[CompressorWeights], CompressorWeights]


def keep_weights(weights: LayerWeights, draw: Draw) -> LayerWeights:
    """Change nothing."""
    del draw
    return weights


def outlier_weights(weights: LayerWeights, draw: Draw) -> LayerWeights:
    """Make a few unrotated dims of the norm 12 to 40 times larger.

    Outlier channels of the hidden states spread over all dims of the projection; only the norm's
    weight puts outliers into the row that is rotated and stored.
    """

    def change(compressor: CompressorWeights) -> CompressorWeights:
        norm = compressor.norm.clone()
        dims = torch.from_numpy(draw.channels(len(norm) - ROPE_DIMS, OUTLIER_DIMS))
        dims = dims + (0 if compressor.norm_bias is None else ROPE_DIMS)
        gains = draw.integers(12, 40, (OUTLIER_DIMS,)) * draw.signs((OUTLIER_DIMS,))
        norm[dims] = torch.from_numpy(gains).to(torch.float32)
        return replace(compressor, norm=norm)

    return _change_compressors(weights, change)


def tied_weights(weights: LayerWeights, draw: Draw) -> LayerWeights:
    """Make equal windows give equal keys, and all heads agree on the sign of a dot product.

    Without the rotated dims a key does not depend on its position. With one query for all heads,
    ReLU makes a score exactly zero in every head at once, for about half of the keys.
    """
    del draw
    if weights.index is None or weights.index_wq_b is None or weights.weights_proj is None:
        return weights
    norm, bias = weights.index.norm.clone(), weights.index.norm_bias
    if bias is None:
        norm[-ROPE_DIMS:] = 0.0
    else:
        bias = bias.clone()
        norm[:ROPE_DIMS] = bias[:ROPE_DIMS] = 0.0
    heads = len(weights.weights_proj)
    first_head = weights.index_wq_b[: len(weights.index_wq_b) // heads]
    return replace(
        weights,
        index=replace(weights.index, norm=norm, norm_bias=bias),
        index_wq_b=first_head.repeat(heads, 1),
    )


def pow2_weights(weights: LayerWeights, draw: Draw) -> LayerWeights:
    """Pass signed powers of two through projection, pooling and norm.

    Each output of ``wkv`` copies one channel with a sign. Equal logits make pooling an exact mean.
    All magnitudes of a row are equal, so the norm leaves the signs times its weight: groups of 32
    dims whose largest weight is 2^k, 448 * 2^k (E4M3's largest value) and 6 * 2^k (E2M1's) in turn,
    where ``ceil(log2(amax / max))`` steps.
    """

    def change(compressor: CompressorWeights) -> CompressorWeights:
        width, hidden = len(compressor.norm), compressor.wkv.shape[1]
        dims = torch.arange(width)
        one = torch.zeros(width, hidden, dtype=compressor.wkv.dtype)
        one[dims, dims % hidden] = torch.from_numpy(draw.signs((width,))).to(one.dtype)
        # Both halves of overlapping windows copy the same channels with the same signs.
        wkv = one.repeat(len(compressor.wkv) // width, 1)
        return replace(
            compressor,
            wkv=wkv,
            wgate=torch.zeros_like(compressor.wgate),
            ape=torch.zeros_like(compressor.ape),
            norm=_pow2_norm(len(compressor.norm)),
        )

    return _change_compressors(weights, change)


def integer_weights(weights: LayerWeights, draw: Draw) -> LayerWeights:
    """Round the weights that read hidden states to at most 8 of a power-of-two step.

    With hidden states of at most 8, a dot product of ``hidden`` terms is an integer of at most
    ``64 * hidden`` steps: below 2**24 for every width up to 262,144, so fp32 holds every partial
    sum exactly in any order.
    """
    del draw

    def change(compressor: CompressorWeights) -> CompressorWeights:
        return replace(
            compressor, wkv=_to_integers(compressor.wkv), wgate=_to_integers(compressor.wgate)
        )

    proj = weights.weights_proj
    return replace(
        _change_compressors(weights, change),
        weights_proj=None if proj is None else _to_integers(proj),
    )


def _change_compressors(weights: LayerWeights, change: _Change) -> LayerWeights:
    return replace(
        weights,
        index=None if weights.index is None else change(weights.index),
        main=None if weights.main is None else change(weights.main),
    )


def _to_integers(weight: Tensor) -> Tensor:
    wide = weight.to(torch.float64)
    exponent = int(torch.frexp(wide.abs().max()).exponent)
    step = 2.0 ** (exponent - 3)  # the largest weight is 4 to 8 steps
    return (torch.round(wide / step) * step).to(weight.dtype)


def _pow2_norm(width: int) -> Tensor:
    largest = (1.0, 448.0, 6.0)
    weights = [
        largest[group % 3] * 2.0 ** (group % 7 - 3 - dim % 8)
        for dim, group in ((dim, dim // 32) for dim in range(width))
    ]
    return torch.tensor(weights, dtype=torch.float32)
