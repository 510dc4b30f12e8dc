"""Typed comparisons: dense rows, codes with scales, masked scores. One rule for all of them.

A candidate's stored number is admissible if some number within the radius of the reference rounds
to it. The error of an element is how far the reference would have to move for that, in units of its
radius; the error of a row is that of its worst element, so one wrong row in a million fails by name
whatever the others look like. Every function returns errors; limits are applied elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.reference.formats import BF16, round_to_bf16, rounding_cell
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to
from needlepoint.verify.numerics.error_bound import ErrorBound
from needlepoint.verify.numerics.row_errors import RowErrors, row_blocks, worst_of
from needlepoint.verify.numerics.scales import in_units
from needlepoint.verify.numerics.tally import (
    Tally,
    no_tally,
    plain_tally,
    rounded_tally,
    with_format,
)

BF16_BITS = 8
"""Significand bits of bf16, the leading one among them."""

_NO_DISTANCE = 1 << 32
"""Distance of a NaN: more than any two fp32 numbers are apart."""


def compare_dense(
    candidate: Tensor, reference: ErrorBound, precision: Precision = Precision.FP32
) -> RowErrors:
    """Compare rows of unscaled numbers.

    Parameters
    ----------
    candidate
        [rows, ...] of any float dtype; all axes behind the first belong to one row.
    reference
        Same shape, before the stage's rounding point.
    precision
        Rounding point of the stage. ``BF16`` compares with rounding cells, and a number that bf16
        cannot hold is inadmissible; otherwise the error is ``|c - r|``.

    Returns
    -------
    RowErrors
        Distance in ULP of bf16 or fp32.

    Raises
    ------
    ValueError
        If shapes differ, there are no elements, or the reference or its radius is not finite.
    """
    check_comparable(candidate, reference)
    found = candidate.flatten(1)
    expected = ErrorBound(reference.value.flatten(1), reference.delta.flatten(1))
    compare = _rounded_rows if precision is Precision.BF16 else _plain_rows
    return RowErrors.concatenate(
        [compare(found[rows], expected.rows(rows)) for rows in row_blocks(*found.shape)]
    )


def compare_masked_scores(
    candidate: Tensor,
    reference: Tensor,
    bound: Tensor,
    visible: Tensor,
    *,
    directed: bool = True,
) -> RowErrors:
    """Compare index scores, one row a query; masks first, arithmetic second.

    An entry beyond ``visible`` must be -inf in the candidate, and every entry before it finite. A
    row with a wrong mask has an infinite error whatever its other scores are.

    Parameters
    ----------
    candidate
        [queries, entries] scores of any float dtype.
    reference
        [queries, entries] float64 or float32, -inf exactly from ``visible`` on.
    bound
        [queries, entries] a-priori bound of each score.
    visible
        int [queries] entries that each query may see.
    directed
        Whether directions are counted.

    Returns
    -------
    RowErrors
        Distance in ULP of fp32 at the worst entry only: near zero a ULP says nothing about a sum.

    Raises
    ------
    ValueError
        If shapes differ, there are no scores, or the reference is not masked by ``visible``.
    """
    queries, entries = _check_scores(candidate, reference, bound, visible)
    columns = torch.arange(entries)
    parts = []
    for rows in row_blocks(queries, entries):
        hidden = columns >= visible[rows].unsqueeze(1)
        expected = reference[rows].to(torch.float64)
        if not torch.equal(torch.isneginf(expected), hidden) or bool(
            (torch.isnan(expected) | torch.isposinf(expected)).any()
        ):
            raise ValueError(
                "scores: the reference is not finite up to `visible` and -inf from there on; "
                "mask it with the same visibility"
            )
        found = candidate[rows].to(torch.float64)
        masks_agree = torch.where(hidden, torch.isneginf(found), torch.isfinite(found))
        shown = expected.masked_fill(hidden, 0.0)
        error = (found.masked_fill(hidden, 0.0) - shown).abs()
        ratio = torch.where(masks_agree, in_units(error, bound[rows].to(torch.float64)), math.inf)
        worst = ratio.argmax(1, keepdim=True)
        candidate_worst, reference_worst = found.gather(1, worst), expected.gather(1, worst)
        seen = found.masked_fill(hidden, 0.0)
        reach = bound[rows].masked_fill(hidden, 0.0)
        tally = plain_tally(seen, shown, reach, fp32=False, directed=directed)
        tally[:, Tally.SPREAD] = _spread(expected, hidden)
        row = worst_of(
            ratio, seen, shown, ulps_apart(candidate_worst, reference_worst, drop=0), tally
        )
        parts.append(replace(row, expected=reference_worst[:, 0], found=candidate_worst[:, 0]))
    return RowErrors.concatenate(parts)


def check_comparable(candidate: Tensor, reference: ErrorBound) -> None:
    """Raise ``ValueError`` unless the two have one shape, elements, and a finite reference."""
    if candidate.shape != reference.value.shape or candidate.dim() < 2 or not candidate.numel():
        raise ValueError(
            f"compare: candidate {tuple(candidate.shape)}, reference "
            f"{tuple(reference.value.shape)}; expected the same shape [rows, ...], not empty"
        )
    for name, tensor in (("reference", reference.value), ("radius", reference.delta)):
        if not bool(torch.isfinite(tensor).all()):
            row = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0])
            raise ValueError(
                f"compare: the {name} of row {row} is not finite, so nothing can be judged; check "
                "the input for overflow"
            )


def settle_ties(ratio: Tensor, delta: Tensor, same: Tensor) -> Tensor:
    """Return ratios in which elements of radius 0 pass exactly if they are the reference's own.

    Cells are closed at both ends, so a value exactly between two numbers lies in the cells of both.
    With nothing left open, the tie rule of the profile decides.
    """
    return torch.where(delta == 0, torch.where(same, 0.0, math.inf), ratio)


def ulps_apart(a: Tensor, b: Tensor, drop: int) -> Tensor:
    """Return how many fp32 numbers (``drop`` 0) or bf16 numbers (16) lie between, int64."""
    apart = (_ordered(a, drop) - _ordered(b, drop)).abs()
    return torch.where(torch.isnan(a) | torch.isnan(b), _NO_DISTANCE, apart)


def _ordered(x: Tensor, drop: int) -> Tensor:
    bits = x.to(torch.float32).view(torch.int32).to(torch.int64)
    magnitude = (bits & 0x7FFFFFFF) >> drop
    return torch.where(bits < 0, -magnitude, magnitude)


def _plain_rows(candidate: Tensor, expected: ErrorBound) -> RowErrors:
    found, value, delta = candidate.to(torch.float64), expected.value, expected.delta
    ratio = in_units((found - value).abs(), delta)
    tally = plain_tally(found, value, delta, fp32=candidate.dtype == torch.float32)
    return worst_of(ratio, found, value, ulps_apart(found, value, drop=0), tally)


def _rounded_rows(candidate: Tensor, expected: ErrorBound) -> RowErrors:
    found = candidate.to(torch.float64)
    held = round_to_bf16(found)
    lower, upper = rounding_cell(held, BF16)
    value, delta = expected.value, expected.delta
    needed = torch.maximum(lower - value, value - upper)
    rounded = round_to(value, Precision.BF16)
    tally = rounded_tally(held, rounded, needed, (lower, upper), value, delta, BF16_BITS)
    tally = with_format(tally, value, delta, rounded)
    ratio = settle_ties(in_units(needed.clamp(min=0), delta), delta, rounded == held)
    ratio = torch.where(held == found, ratio, math.inf)
    return worst_of(ratio, found, rounded, ulps_apart(held, rounded, drop=16), tally)


def spread_tally(scores: Tensor, bound: Tensor, visible: Tensor) -> Tensor:
    """Return how far scores are apart beside their bound; nothing else is counted.

    Parameters
    ----------
    scores, bound
        [queries, entries] reference scores and their a-priori bound.
    visible
        int [queries] entries that each query may see.
    """
    tally = no_tally(len(scores))
    if not scores.numel():
        return tally
    for rows in row_blocks(*scores.shape):
        hidden = torch.arange(scores.shape[1]) >= visible[rows].unsqueeze(1)
        tally[rows, Tally.SPREAD] = _spread(scores[rows].to(torch.float64), hidden)
        reach = bound[rows].to(torch.float64).masked_fill(hidden, 0.0)
        tally[rows, Tally.REACH] = reach.amax(1)
    return tally


def _spread(scores: Tensor, hidden: Tensor) -> Tensor:
    """Return how far the visible scores of each row are apart, 0 for fewer than two."""
    highest = scores.masked_fill(hidden, -math.inf).amax(1)
    lowest = scores.masked_fill(hidden, math.inf).amin(1)
    return torch.where((~hidden).sum(1) > 1, highest - lowest, 0.0)


def _check_scores(
    candidate: Tensor, reference: Tensor, bound: Tensor, visible: Tensor
) -> tuple[int, int]:
    shapes = [tuple(x.shape) for x in (candidate, reference, bound)]
    fits = candidate.dim() == 2 and candidate.numel() and len(set(shapes)) == 1
    if not fits or tuple(visible.shape) != candidate.shape[:1]:
        raise ValueError(
            f"scores: candidate {shapes[0]}, reference {shapes[1]}, bound {shapes[2]}, visible "
            f"{tuple(visible.shape)}; expected [queries, entries] three times, not empty, and "
            "[queries]"
        )
    return candidate.shape[0], candidate.shape[1]
