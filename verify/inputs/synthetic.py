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
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from needlepoint.reference.weights import LayerWeights
from needlepoint.verify.base.rows import Tokens
from needlepoint.verify.inputs.synthetic_draw import Draw, Values, fill
from needlepoint.verify.inputs.synthetic_weights import (
    integer_weights,
    keep_weights,
    outlier_weights,
    pow2_weights,
    tied_weights,
)

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


@dataclass(frozen=True)
class SyntheticKind:
    """One kind of synthetic input.

    Attributes
    ----------
    name
        As in ``synthetic:NAME``.
    reaches
        What the kind is for.
    hidden
        ``(lengths, width, draw)`` -> bf16 ``[sum(lengths), width]``.
    adjust
        ``(weights, draw)`` -> the layer's weights, changed where the kind needs it.
    constant
        Whether all rows of a stage may be alike, which is refused elsewhere.
    """

    name: str
    reaches: str
    hidden: Callable[[Sequence[int], int, Draw], Tensor]
    adjust: Callable[[LayerWeights, Draw], LayerWeights] = keep_weights
    constant: bool = False


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
