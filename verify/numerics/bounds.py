"""The a-priori bound of index scores: how far an admissible score may be from the reference.

A score is ``S = sum_h w_h relu(q_h . k)``. ReLU moves no further than its argument, so with keys
within ``A`` of the reference's stored keys, queries within ``B`` and weights within ``dw``

    |S' - S| <= sum_d A_d Q_d (1 + c) + sum_d |k_d| (R_d + c Q_d)
    Q_d = sum_h (|w_h| + dw_h) (|q_hd| + B_hd)
    R_d = sum_h (|w_h| + dw_h) B_hd + dw_h |q_hd|

where ``c`` is what the accumulators lose. That is one product of width 2 d instead of one per head.
Locally ``A``, ``B`` and ``dw`` are 0: the reference scores the candidate's own stored numbers.
Accumulated, they are the code steps that the radii of keys and queries leave open.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.formats import (
    Format,
    ScaleKind,
    decode,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    encode,
)
from needlepoint.reference.profile import Accumulator, Arithmetic, Precision
from needlepoint.verify.numerics.error_bound import ErrorBound, rounding
from needlepoint.verify.numerics.error_model import ACCUMULATORS, BF16_STEP, DIVISION, SCORE_TINY, U
from needlepoint.verify.numerics.scales import admissible_scales, in_blocks

_CODECS = {"e4m3": (e4m3_encode, e4m3_decode), "e2m1": (e2m1_encode, e2m1_decode)}

_SUMS = 1.0 + 2.0**-10
"""Pays for evaluating the bound itself in fp32: sums of at most a few hundred positive terms."""


def stored_error_bound(row: ErrorBound, fmt: Format) -> ErrorBound:
    """Bound what a store may hold: the reference's stored values and the steps left open.

    Parameters
    ----------
    row
        [..., n], what the store receives.
    fmt
        Storage format.

    Returns
    -------
    ErrorBound
        float64 [..., n]: decoded reference rows, and the largest distance to the decoded value of
        an admissible row, over every admissible scale.
    """
    if fmt.scale is ScaleKind.NONE:
        return rounding(row, Precision.BF16 if fmt.element == "bf16" else Precision.FP32)
    if fmt.pre_round_bf16:
        row = rounding(row, Precision.BF16)
    stored = decode(encode(row.value, fmt), fmt)
    scales = admissible_scales(row, fmt)
    value, delta, held = (in_blocks(x, fmt.block) for x in (row.value, row.delta, stored))
    low, middle, high = (x.unsqueeze(-1) for x in (scales.low, scales.value, scales.high))
    if fmt.scale is ScaleKind.UE8M0:
        reach = _reach(value, delta, held, low, fmt)
        open_blocks = (scales.low < scales.high).nonzero(as_tuple=True)
        value, delta, held, low, high = (x[open_blocks] for x in (value, delta, held, low, high))
        reach[open_blocks] = _reach_of_powers(value, delta, held, low, high, fmt)
        return ErrorBound(stored, reach.flatten(-2))
    # A plain scale moves in its last bits only: that shifts quotients, and codes near a midpoint.
    spread = torch.where(middle > 0, torch.maximum(high - middle, middle - low) / middle, 1.0)
    settled = spread < 0.25
    spread = torch.where(settled, spread, 0.0)
    shifted = (delta + value.abs() * (spread + DIVISION.value * U)) / (1 - spread)
    reach = _reach(value, shifted, held, middle, fmt)
    reach = reach + (held.abs() + reach) * spread
    # Where the radius is as large as the block itself, any scale goes: a code is at most 2 |x|.
    anything = held.abs() + 2 * (value.abs() + delta)
    return ErrorBound(stored, torch.where(settled, reach, anything).flatten(-2))


def _reach_of_powers(
    value: Tensor, delta: Tensor, held: Tensor, low: Tensor, high: Tensor, fmt: Format
) -> Tensor:
    reach = torch.zeros_like(value)
    scale = low
    while True:
        reach = torch.maximum(reach, _reach(value, delta, held, scale, fmt))
        if torch.equal(scale, high):
            return reach
        scale = torch.minimum(2 * scale, high)


def _reach(value: Tensor, delta: Tensor, held: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return how far the decoded ends of ``value ± delta`` are from the reference's ``held``."""
    step = torch.where(scale > 0, scale, 1.0)
    to_codes, to_values = _CODECS[fmt.element]
    below, above = (
        to_values(to_codes((value + shift) / step, fmt.ties)) * step for shift in (-delta, delta)
    )
    return torch.maximum((above - held).abs(), (below - held).abs())


@dataclass(frozen=True)
class ScoreBound:
    """Bound of the scores of many queries against one set of keys."""

    right: Tensor  # float32 [2 d, keys]: radii of the keys over their magnitudes.
    lost: float  # What the sums of both sides lose, in units of the sum of magnitudes.

    @classmethod
    def of_keys(
        cls,
        keys: ErrorBound,
        arithmetic: Arithmetic | None = None,
        compute: torch.dtype = torch.float64,
    ) -> ScoreBound:
        """Prepare the key side.

        Parameters
        ----------
        keys
            [keys, d]: ``exact`` of the candidate's decoded rows for a local comparison,
            :func:`stored_error_bound` for an accumulated one.
        arithmetic
            Profile: its ``accumulator`` is paid for, and each of ``dot``, ``weighted`` and
            ``head_sum`` that rounds to bf16 adds a step. None for a chain in fp32.
        compute
            What the reference sums in; ``torch.float32`` for long runs pays a second time.
        """
        accumulator = Accumulator.FP32 if arithmetic is None else arithmetic.accumulator
        right = torch.cat((keys.delta, keys.value.abs()), dim=-1).T
        own = ACCUMULATORS[Accumulator.FP32].value if compute == torch.float32 else 0.0
        lost = ACCUMULATORS[accumulator].value + own
        if arithmetic is not None:
            chain = (arithmetic.dot, arithmetic.weighted, arithmetic.head_sum)
            lost += BF16_STEP.value * chain.count(Precision.BF16)
        return cls(right.to(torch.float32).contiguous(), lost)

    def of_queries(
        self, query: ErrorBound, weights: ErrorBound, columns: int | None = None
    ) -> Tensor:
        """Return the bound of each score.

        Parameters
        ----------
        query
            [queries, heads, d], as the keys.
        weights
            [queries, heads], scales unfolded; ``exact`` of the candidate's for a local comparison.
        columns
            Only the first so many keys.

        Returns
        -------
        Tensor
            float32 [queries, keys], positive.
        """
        heaviest = (weights.value.abs() + weights.delta).unsqueeze(-1)
        magnitude = query.value.abs()
        reach = (heaviest * (magnitude + query.delta)).sum(1)
        moved = (heaviest * query.delta + weights.delta.unsqueeze(-1) * magnitude).sum(1)
        c = self.lost
        left = torch.cat((reach * (1 + c), moved + c * reach), dim=-1).to(torch.float32)
        return (left @ self.right[:, :columns]).mul_(_SUMS).add_(SCORE_TINY)
