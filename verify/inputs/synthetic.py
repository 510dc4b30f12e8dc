"""Synthetic inputs: each kind is there to reach one thing that plain random data does not.

A kind draws hidden states and may adjust a layer's weights, because some cases exist only behind
the projection or the norm: exact ties of scores need keys that RoPE leaves alone, and rows of
powers of two need a projection that passes them on. ``reaches`` says what a kind promises at the
stored rows, scores or projections; the tests hold it to that.

Numbers come from the raw output of PCG64, whose stream NumPy guarantees, through exact arithmetic
and one rounding to bf16: the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.base.rows import Tokens
from needlepoint.verify.inputs.draw import Draw, Values, fill

DEFAULT_LENGTHS = (2051, 130, 123)
"""2,304 tokens; lengths leave 3, 2 and 3 tokens past a multiple of 4, and 3, 2 and 123 of 128."""

CONSTANT = "constant"
"""The kind of which every stage is constant."""

TIE_PERIOD = 384
"""Tokens of ``ties`` repeat after three windows of 128, which are 96 of 4."""

SMALL_EXPONENTS = (0, -16, -18, -20, -22, -24, -27, None)
"""Scale of each block of 128 tokens of ``small``, as a power of two; None is exactly zero.

The norm divides by ``sqrt(mean square + 1e-6)``, so a pooled row far below 1e-3 leaves it about a
thousand times larger: these steps put the amax of stored groups above, between and below 0.0273,
3.7e-4 and 1e-4, where the four floor rules part.
"""

POW2_EXPONENTS = tuple(range(10, 17))
"""Magnitudes of ``pow2``: so large that the norm's epsilon vanishes beside the mean square."""

# Largest exponent field of a row of `bits`, cyclic: up to 2**12, around 1, tiny, subnormal alone.
_BITS_CEILINGS = (139, 134, 127, 100, 60, 20, 1, 0)

# Changes of weights, so that what a kind is for gets through projection and norm.

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


@dataclass(frozen=True)
class SyntheticKind:
    """One kind of synthetic input."""

    name: str  # As in ``synthetic:NAME``.
    reaches: str  # What the kind is for.
    # ``(lengths, width, draw)`` -> bf16 ``[sum(lengths), width]``.
    hidden: Callable[[Sequence[int], int, Draw], Tensor]
    # ``(weights, draw)`` -> the layer's weights, changed where the kind needs it.
    adjust: Callable[[LayerWeights, Draw], LayerWeights] = keep_weights
    constant: bool = False  # Whether all rows of a stage may be alike, which is refused elsewhere.


def synthetic_hidden(kind: str, lengths: Sequence[int], width: int, seed: int) -> Tensor:
    """Return the hidden states of a kind: bf16 ``[sum(lengths), width]``.

    Parameters
    ----------
    kind
        Name of a kind.
    lengths
        Tokens of each request.
    width
        ``hidden_size`` of the model.
    seed
        Non-negative.

    Raises
    ------
    ValueError
        Where the kind is unknown; the message lists the kinds.
    """
    return synthetic_kind(kind).hidden(lengths, width, Draw(seed, f"{kind}.hidden"))


def synthetic_weights(kind: str, weights: LayerWeights, seed: int) -> LayerWeights:
    """Return a layer's weights as a kind needs them; most kinds change nothing."""
    return synthetic_kind(kind).adjust(weights, Draw(seed, f"{kind}.weights"))


def declares_constant(kind: str) -> bool:
    """Return whether a kind's rows are meant to be alike; false for what is no kind."""
    return kind in KINDS and KINDS[kind].constant


def synthetic_kind(name: str) -> SyntheticKind:
    """Return a kind by name.

    Raises
    ------
    ValueError
        Where there is no such kind.
    """
    if name not in KINDS:
        raise ValueError(f"synthetic kind {name!r}: expected one of {', '.join(KINDS)}")
    return KINDS[name]


def _gaussian(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    return fill(lengths, width, lambda at: draw.normal((len(at.position), width)))


def _outlier(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    gain = np.ones(width)
    gain[draw.channels(width, max(2, width // 96))] = draw.integers(12, 40, (max(2, width // 96),))
    return fill(lengths, width, lambda at: draw.normal((len(at.position), width)) * gain)


def _anisotropic(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    mean = 2.0 * draw.normal((1, width))
    directions = draw.normal((4, width))

    def rows(at: Tokens) -> Values:
        count = len(at.position)
        values: Values = mean + draw.normal((count, width)) / 4
        for direction in directions:  # no matrix product: its order of sums is the library's
            values += draw.normal((count, 1)) * direction / 2
        return values

    return fill(lengths, width, rows)


def _small(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    scales = np.array([0.0 if e is None else 2.0**e for e in SMALL_EXPONENTS])

    def rows(at: Tokens) -> Values:
        # Each request starts at another step of the cycle, so short ones are not all alike.
        block = at.position.numpy() // 128 + at.request.numpy()
        values: Values = draw.normal((len(block), width)) * scales[block % len(scales), None]
        return values

    return fill(lengths, width, rows)


def _ties(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    base = draw.normal((TIE_PERIOD, width))
    return fill(lengths, width, lambda at: base[at.position.numpy() % TIE_PERIOD])


def _pow2(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    blocks = len(lengths) + sum(length // 128 for length in lengths)
    signs = draw.signs((blocks, width))
    first = np.cumsum([0, *(1 + length // 128 for length in lengths)])
    exponents = np.array(POW2_EXPONENTS)

    def rows(at: Tokens) -> Values:
        block = first[at.request.numpy()] + at.position.numpy() // 128
        values: Values = np.ldexp(signs[block], exponents[block % len(exponents), None])
        return values

    return fill(lengths, width, rows)


def _integer(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    def rows(at: Tokens) -> Values:
        values: Values = draw.integers(-8, 8, (len(at.position), width)).astype(np.float64)
        return values

    return fill(lengths, width, rows)


def _bits(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    ceilings = np.array(_BITS_CEILINGS)

    def rows(at: Tokens) -> Values:
        shape = (len(at.position), width)
        bits = draw.integers(0, 0xFF, shape)  # sign and mantissa
        ceiling = ceilings[at.position.numpy() // 8 % len(ceilings), None]
        exponent = draw.integers(0, 0xFFFF, shape) * (ceiling + 1) >> 16
        pattern = (bits & 0x80) << 8 | exponent << 7 | bits & 0x7F
        # One in sixteen is a zero of either sign.
        pattern = np.where(draw.integers(0, 15, shape) == 0, pattern & 0x8000, pattern)
        values: Values = (pattern << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        return values

    return fill(lengths, width, rows)


def _constant(lengths: Sequence[int], width: int, draw: Draw) -> Tensor:
    token = draw.normal((1, width))
    return fill(lengths, width, lambda at: np.repeat(token, len(at.position), axis=0))


KINDS: dict[str, SyntheticKind] = {
    kind.name: kind
    for kind in (
        SyntheticKind("gaussian", "independent normal values, the plain case", _gaussian),
        SyntheticKind(
            "outlier",
            "channels 12 to 40 times the others, in hidden states and in normed rows",
            _outlier,
            outlier_weights,
        ),
        SyntheticKind(
            "anisotropic",
            "a mean and a few directions carry the rows, so keys are alike and scores close",
            _anisotropic,
        ),
        SyntheticKind(
            "small",
            "stored groups of amax under 0.0273, under 3.7e-4, under 1e-4 and exactly zero",
            _small,
        ),
        SyntheticKind(
            "ties",
            "exact ties of scores across the selection border, and ReLU plateaus at zero",
            _ties,
            tied_weights,
            constant=True,  # requests of one window of 128 each have all the same
        ),
        SyntheticKind(
            "pow2",
            "rows of signed powers of two; group amax exactly 2^k, 448 * 2^k and 6 * 2^k",
            _pow2,
            pow2_weights,
            constant=True,  # a request of up to 128 tokens is one row throughout
        ),
        SyntheticKind(
            "integer",
            "integer-valued projections whose sums are exact in fp32 in any order",
            _integer,
            integer_weights,
        ),
        SyntheticKind(
            "bits",
            "random finite bf16 bit patterns: subnormals, both zeros, every mantissa",
            _bits,
        ),
        SyntheticKind(
            CONSTANT,
            "one token throughout: all scores but the first tie, and the tie rule alone picks",
            _constant,
            tied_weights,
            constant=True,
        ),
    )
}

VARIED = tuple(name for name in KINDS if name != CONSTANT)
"""Kinds that sweeps of many inputs draw from."""
