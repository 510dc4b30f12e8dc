"""Error bounds: the reference value of a stage and how far an admissible candidate may be from it.

A stage of the reference is a float64 value ``r``, not yet rounded. A candidate works in fp32, in
whatever order its hardware likes, so before it rounds it holds some number within ``delta`` of
``r``. Each function here pushes value and radius through one stage: the radius that came in, times
what the stage can amplify it by, plus what fp32 can lose in the stage itself (a running error
analysis, constants in ``error_model.py``, derivations in ``docs/limits.md``). The value comes from
the reference's own function, so that there is one definition of what is meant.

``key_chain`` goes from one stage of a key row to the last before the store. ``exact`` starts it at
any observed stage with radius 0: that is a *local* replay. ``pooled`` starts it at the projections:
that is the *accumulated* one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from needlepoint.optimized.protocol.stages import INDEX, REGISTRY, dense_stages
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.hadamard import hadamard
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.rope import apply_rope, from_pairs, in_pairs
from needlepoint.reference.rounding import round_to
from needlepoint.verify.base.stages import NORMED, ROPED, ROTATED
from needlepoint.verify.numerics.error_model import (
    HADAMARD_FACTOR,
    HADAMARD_SUM,
    HEAD_WEIGHT,
    REDUCTION,
    ROTATION,
    RSQRT,
    SCALING,
    TINY,
    U,
)

_SECOND_ORDER = 1.0 + 2.0**-10
"""Pays for the products of two small errors; every radius that uses it is far below 2**-10."""


@dataclass(frozen=True)
class ErrorBound:
    """A float64 value and a radius of the same shape."""

    value: Tensor  # What the reference computes, unrounded.
    # Non-negative; some number within ``delta`` of ``value`` is what an admissible candidate holds
    # before it rounds.
    delta: Tensor

    def __post_init__(self) -> None:
        if self.value.shape != self.delta.shape:
            raise ValueError(
                f"error bound: value {tuple(self.value.shape)} with radius "
                f"{tuple(self.delta.shape)}, expected one radius for each value"
            )

    def rows(self, rows: slice) -> ErrorBound:
        """Return the error bound of some rows (first axis)."""
        return ErrorBound(self.value[rows], self.delta[rows])

    def dims(self, dims: slice) -> ErrorBound:
        """Return the error bound of some dims (last axis)."""
        return ErrorBound(self.value[..., dims], self.delta[..., dims])


def exact(value: Tensor) -> ErrorBound:
    """Return the error bound of observed numbers: float64 of ``value``, radius 0."""
    wide = value.to(torch.float64)
    return ErrorBound(wide, torch.zeros_like(wide))


def rounding(error_bound: ErrorBound, precision: Precision) -> ErrorBound:
    """Return the error bound after a rounding point.

    Rounding to bf16 is judged as a step: where all of ``value ± delta`` rounds to one number the
    radius becomes 0, and where a boundary lies inside, it becomes the step that is left open. fp32
    and float64 points change nothing: their rounding is part of the radius already.

    Parameters
    ----------
    error_bound
        Any shape.
    precision
        Precision of the rounding point.
    """
    if precision is not Precision.BF16:
        return error_bound
    value = round_to(error_bound.value, precision)
    above = round_to(error_bound.value + error_bound.delta, precision)
    below = round_to(error_bound.value - error_bound.delta, precision)
    return ErrorBound(value, torch.maximum(above - value, value - below))


def normed(row: ErrorBound, weight: Tensor, eps: float) -> ErrorBound:
    """Bound RMSNorm, ``x w / sqrt(mean x^2 + eps)``.

    The mean square is bounded first, ends and all, and its reciprocal root read off at both ends.

    Parameters
    ----------
    row
        [..., d].
    weight
        [d] norm weight.
    eps
        Positive.

    Raises
    ------
    ValueError
        If ``eps`` is not positive: a row of zeros would have no norm.
    """
    if not eps > 0:
        raise ValueError(f"normed: eps {eps!r}, expected a positive number")
    x, delta = row.value, row.delta
    size = x.shape[-1]
    scale = weight.to(torch.float64)
    square = x.square().mean(-1, keepdim=True)
    moved = (2 * x.abs() * delta + delta.square()).mean(-1, keepdim=True)
    lost = U * (min(size - 1, int(REDUCTION.value)) + 3)
    high = ((square + moved) * (1 + lost) + eps) * (1 + 2 * U)
    low = ((square - moved).clamp(min=0) * (1 - lost) + eps) * (1 - 2 * U)
    inverse = (square + eps).rsqrt()
    spread = torch.maximum(low.rsqrt() / inverse - 1, 1 - high.rsqrt() / inverse)
    value = rms_norm(x, weight, eps)
    own = value.abs() * (spread + (RSQRT.value + SCALING.value) * U)
    carried = delta * scale.abs() * inverse * (1 + spread)
    return ErrorBound(value, (own + carried) * _SECOND_ORDER + 2 * TINY)


def roped(
    row: ErrorBound,
    table: Tensor,
    table_error: float = 0.0,
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS,
) -> ErrorBound:
    """Bound RoPE on ``2 * pairs`` dims.

    Parameters
    ----------
    row
        [..., d].
    table
        float64 [..., pairs, 2] cos and sin, broadcastable to the rows, as candidates are given.
    table_error
        Largest error of cos and sin for a candidate that makes its own; 0 for the given table.
    layout
        Which dims are rotated.
    """
    pairs = table.shape[-2]
    row = ErrorBound(*(in_pairs(part, layout, pairs) for part in (row.value, row.delta)))
    value = apply_rope(row.value, table)
    cos, sin = table[..., 0].abs(), table[..., 1].abs()
    split = row.value.shape[-1] - 2 * pairs
    by_pair = (*row.value.shape[:-1], pairs, 2)
    magnitude = row.value[..., split:].abs().reshape(by_pair)
    radius = row.delta[..., split:].reshape(by_pair)
    spread = radius + ROTATION.value * U * magnitude
    even = cos * spread[..., 0] + sin * spread[..., 1]
    odd = sin * spread[..., 0] + cos * spread[..., 1]
    turned = torch.stack((even, odd), dim=-1) * _SECOND_ORDER + 2 * TINY
    turned = turned + table_error * magnitude.sum(-1, keepdim=True)
    delta = torch.cat((row.delta[..., :split], turned.flatten(-2)), dim=-1)
    return ErrorBound(*(from_pairs(part, layout, pairs) for part in (value, delta)))


def rotated(row: ErrorBound) -> ErrorBound:
    """Bound the 128-point Hadamard rotation of the last axis.

    Every output is a signed sum of all inputs, so all dims of a row share the sum of the radii.

    Parameters
    ----------
    row
        [..., 128].
    """
    value = hadamard(row.value)
    size = row.value.shape[-1]
    total = row.delta.sum(-1, keepdim=True)
    magnitude = row.value.abs().sum(-1, keepdim=True) + total
    shared = (total + HADAMARD_SUM.value * U * magnitude) * size**-0.5
    delta = (shared + HADAMARD_FACTOR.value * U * value.abs()) * _SECOND_ORDER + size * TINY
    return ErrorBound(value, delta)


def weights(projection: Tensor, scale: float) -> ErrorBound:
    """Bound the head weights, projection times ``scale``, after unfolding a query scale.

    Parameters
    ----------
    projection
        [tokens, heads] given projection.
    scale
        ``index_head_dim**-0.5 * index_n_heads**-0.5``.
    """
    value = projection.to(torch.float64) * scale
    return ErrorBound(value, HEAD_WEIGHT.value * U * value.abs() + TINY)


def query_rotated(
    query: ErrorBound,
    table: Tensor,
    arithmetic: Arithmetic,
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS,
) -> ErrorBound:
    """Bound the query as it goes into its store: RoPE, Hadamard, and the profile's roundings.

    Parameters
    ----------
    query
        [tokens, heads, 128], usually ``exact`` of the given projection.
    table
        float64 [tokens, 1, 32, 2] cos and sin at the positions of the tokens.
    arithmetic
        Profile.
    layout
        Which dims are rotated.
    """
    row = rounding(roped(query, table, layout=layout), arithmetic.roped)
    return rounding(rotated(row), arithmetic.rotated) if arithmetic.hadamard else row


def layer_normed(row: ErrorBound, weight: Tensor, bias: Tensor, eps: float) -> ErrorBound:
    """Bound ``(x - mean) w / sqrt(mean (x - mean)^2 + eps) + b``.

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


@dataclass(frozen=True)
class KeyPath:
    """What the stages behind ``pooled`` need."""

    norm_weight: Tensor  # [d] fp32.
    eps: float  # Epsilon of the norm.
    table: Tensor  # float64 [rows, 32, 2] cos and sin at the first token of each row's window.
    arithmetic: Arithmetic  # Profile.
    rotate: bool  # Whether a Hadamard rotation follows RoPE (index keys of a profile that rotates).
    # [d] fp32: the norm is a LayerNorm (ratio 1); None for an RMS norm.
    norm_bias: Tensor | None = None
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS  # Dims that RoPE rotates.
    name: str = INDEX  # ``index`` or ``main``.

    @property
    def stages(self) -> tuple[str, ...]:
        """Its stages before the store, in order; nothing rotates where ``rotate`` is not set."""
        return tuple(s for s in dense_stages(self.name) if s != ROTATED or self.rotate)


def key_chain(stage: str, row: ErrorBound, path: KeyPath) -> Mapping[str, ErrorBound]:
    """Push a row from one stage to the last stage before the store.

    Parameters
    ----------
    stage
        Stage of ``row``: ``pooled``, ``normed``, ``roped`` or ``rotated``.
    row
        [rows, d]: ``pooled(...)`` for an accumulated comparison, ``exact(observed)`` for a local
        one.
    path
        Weights, table and profile.

    Returns
    -------
    Mapping
        Stage to error bound *before* that stage's rounding point, from ``stage`` on. Apply
        :func:`rounding` to the last one to get what the store receives.

    Raises
    ------
    ValueError
        If the path has no such stage.
    """
    order = path.stages
    if stage not in order:
        raise ValueError(f"key chain: no stage {stage!r}, expected one of {', '.join(order)}")
    chain = {stage: row}
    for before, after in pairwise(order):
        if before in chain:
            entering = rounding(chain[before], precision_of(before, path.arithmetic))
            chain[after] = STEPS[after](entering, path)
    return chain


def precision_of(stage: str, arithmetic: Arithmetic) -> Precision:
    """Return the rounding point of a dense key stage.

    Raises
    ------
    ValueError
        If the stage is not dense.
    """
    points = {entry.name: entry.rounding or entry.name for entry in REGISTRY if entry.dense}
    if stage not in points:
        raise ValueError(f"stage {stage!r} has no rounding point, expected {', '.join(points)}")
    found: Precision = getattr(arithmetic, points[stage])
    return found


def _norm(row: ErrorBound, path: KeyPath) -> ErrorBound:
    if path.norm_bias is not None:
        return layer_normed(row, path.norm_weight, path.norm_bias, path.eps)
    return normed(row, path.norm_weight, path.eps)


STEPS: dict[str, Callable[[ErrorBound, KeyPath], ErrorBound]] = {
    NORMED: _norm,
    ROPED: lambda row, path: roped(row, path.table, layout=path.layout),
    ROTATED: lambda row, path: rotated(row),
}
"""Arithmetic of each dense stage behind ``pooled``, from what the stage before it holds."""
