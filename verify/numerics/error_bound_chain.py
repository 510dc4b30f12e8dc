"""From one stage of a key row to the last stage before the store, error bound by error bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.verify.base.stages import NORMED, POOLED, ROPED, ROTATED
from needlepoint.verify.numerics.error_bound import ErrorBound, normed, roped, rotated, rounding
from needlepoint.verify.numerics.error_bound_tokens import layer_normed


@dataclass(frozen=True)
class KeyPath:
    """What the stages behind ``pooled`` need.

    Attributes
    ----------
    norm_weight
        [d] fp32.
    eps
        Epsilon of the norm.
    table
        float64 [rows, 32, 2] cos and sin at the first token of each row's window.
    arithmetic
        Profile.
    rotate
        Whether a Hadamard rotation follows RoPE (index keys of a profile that rotates).
    norm_bias
        [d] fp32: the norm is a LayerNorm (ratio 1); None for an RMS norm.
    layout
        Dims that RoPE rotates.
    """

    norm_weight: Tensor
    eps: float
    table: Tensor
    arithmetic: Arithmetic
    rotate: bool
    norm_bias: Tensor | None = None
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS


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
    order = [POOLED, NORMED, ROPED, *([ROTATED] if path.rotate else [])]
    if stage not in order:
        raise ValueError(f"key chain: no stage {stage!r}, expected one of {', '.join(order)}")
    chain = {stage: row}
    for before, after in pairwise(order):
        if before in chain:
            entering = rounding(chain[before], precision_of(before, path.arithmetic))
            chain[after] = _advance(after, entering, path)
    return chain


def precision_of(stage: str, arithmetic: Arithmetic) -> Precision:
    """Return the rounding point of a dense key stage.

    Raises
    ------
    ValueError
        If the stage is not dense.
    """
    points = {
        POOLED: arithmetic.pooled,
        NORMED: arithmetic.normed,
        ROPED: arithmetic.roped,
        ROTATED: arithmetic.rotated,
    }
    if stage not in points:
        raise ValueError(f"stage {stage!r} has no rounding point, expected {', '.join(points)}")
    return points[stage]


def _advance(stage: str, row: ErrorBound, path: KeyPath) -> ErrorBound:
    if stage == NORMED and path.norm_bias is not None:
        return layer_normed(row, path.norm_weight, path.norm_bias, path.eps)
    if stage == NORMED:
        return normed(row, path.norm_weight, path.eps)
    if stage == ROPED:
        return roped(row, path.table, layout=path.layout)
    return rotated(row)
