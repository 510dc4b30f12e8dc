"""Comparison of stored codes and scales.

The scale is judged first: it must follow from an amax within the radius (``scales.py``). The codes
are then judged under the candidate's own scale, so that an admissible scale that is off in its last
bit does not condemn its codes, and a scale taken from the neighbour is named as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.reference.formats import (
    Encoded,
    Format,
    ScaleKind,
    decode,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    encode,
    rounding_cell,
)
from needlepoint.reference.profile import Precision
from needlepoint.verify.numerics.compare import check_comparable, compare_dense, settle_ties
from needlepoint.verify.numerics.error_bound import ErrorBound, rounding
from needlepoint.verify.numerics.error_model import DIVISION, U
from needlepoint.verify.numerics.row_errors import RowErrors, row_blocks, worst_of
from needlepoint.verify.numerics.scales import (
    admissible_scales,
    in_units,
    scale_errors,
    stored_scales,
)
from needlepoint.verify.numerics.tally import rounded_tally, with_format

_DENSE = {"float64": Precision.FLOAT64, "fp32": Precision.FP32, "bf16": Precision.BF16}
_BITS = {"e4m3": 4, "e2m1": 2}
"""Significand bits, the leading one among them."""

_CODECS = {"e4m3": (e4m3_encode, e4m3_decode, 0x80), "e2m1": (e2m1_encode, e2m1_decode, 0x8)}


def compare_encoded(candidate: Encoded, reference: ErrorBound, fmt: Format) -> RowErrors:
    """Compare stored rows: scales against the admissible range, codes under the candidate's scale.

    Parameters
    ----------
    candidate
        Codes [rows, ..., n], one a byte (or numbers of an unscaled format), and scales
        [rows, ..., n / block] as uint8 UE8M0 codes or floats.
    reference
        [rows, ..., n], what the store receives: before the roundings of the format itself.
    fmt
        Format of the profile.

    Returns
    -------
    RowErrors
        Distance in codes for E4M3 and E2M1 (under the candidate's scale), in ULP otherwise.

    Raises
    ------
    ValueError
        As ``compare_dense``; also if scales are missing or do not fit the codes.
    """
    codes, scales = candidate.codes, candidate.scales
    if fmt.scale is ScaleKind.NONE:
        return compare_dense(codes, reference, _DENSE[fmt.element])
    check_comparable(codes, reference)
    wanted = (*codes.shape[:-1], codes.shape[-1] // fmt.block)
    if scales is None or tuple(scales.shape) != wanted or codes.shape[-1] % fmt.block:
        raise ValueError(
            f"compare {fmt.name}: codes {tuple(codes.shape)} with scales "
            f"{None if scales is None else tuple(scales.shape)}, expected scales {wanted} of "
            f"blocks of {fmt.block}"
        )
    # Blocks divide the last axis, so a row may be laid out flat, the heads of a query in turn.
    flat, steps = codes.flatten(1), stored_scales(scales, fmt).flatten(1)
    row = ErrorBound(reference.value.flatten(1), reference.delta.flatten(1))
    return RowErrors.concatenate(
        [
            _compare_block(flat[rows], steps[rows], row.rows(rows), fmt)
            for rows in row_blocks(*flat.shape)
        ]
    )


def _compare_block(codes: Tensor, scales: Tensor, reference: ErrorBound, fmt: Format) -> RowErrors:
    if fmt.pre_round_bf16:
        reference = rounding(reference, Precision.BF16)
    encode_element, decode_element, sign = _CODECS[fmt.element]
    usable = torch.isfinite(scales) & (scales > 0)
    # Scale 0 means "undivided" (no floor); other unusable scales fail as scales.
    step = torch.where(usable, scales, 1.0).repeat_interleave(fmt.block, dim=1)
    scaled, delta = reference.value / step, reference.delta / step
    if fmt.scale is ScaleKind.FP32:
        delta = delta + DIVISION.value * U * scaled.abs()

    value = decode_element(codes)
    nearest = encode_element(scaled, fmt.ties)
    lower, upper = rounding_cell(codes, fmt)
    needed = torch.maximum(lower - scaled, scaled - upper)
    expected = decode_element(nearest)
    tally = rounded_tally(
        value, expected, needed, (lower, upper), scaled, delta, _BITS[fmt.element]
    )
    ratio = settle_ties(in_units(needed.clamp(min=0), delta), delta, value == expected)
    distance = (_ordered(codes, sign) - _ordered(nearest, sign)).abs()
    stored = decode(encode(reference.value, fmt), fmt)
    tally = with_format(tally, reference.value, reference.delta, stored)
    of_codes = worst_of(ratio, value * step, stored, distance, tally)
    return _blame(of_codes, _scale_rows(scales, reference, fmt))


@dataclass(frozen=True)
class _ScaleRows:
    """The worst scale of each row: its error, the first dim of its block, and both scales."""

    ratio: Tensor
    dim: Tensor
    expected: Tensor
    found: Tensor


def _scale_rows(scales: Tensor, reference: ErrorBound, fmt: Format) -> _ScaleRows:
    admissible = admissible_scales(reference, fmt)
    ratio = scale_errors(scales, admissible, fmt)
    block = ratio.argmax(1, keepdim=True)
    ratio, expected, found = (x.gather(1, block)[:, 0] for x in (ratio, admissible.value, scales))
    return _ScaleRows(ratio, block[:, 0] * fmt.block, expected, found)


def _blame(codes: RowErrors, scale: _ScaleRows) -> RowErrors:
    """Name the scale where it cannot be right: the codes under it are then wrong in consequence."""
    at_fault = (scale.ratio > 1) | (scale.ratio > codes.ratio)
    return replace(
        codes,
        ratio=torch.maximum(codes.ratio, scale.ratio),
        dim=torch.where(at_fault, scale.dim, codes.dim),
        expected=torch.where(at_fault, scale.expected, codes.expected),
        found=torch.where(at_fault, scale.found, codes.found),
        scale_fault=at_fault,
    )


def _ordered(codes: Tensor, sign: int) -> Tensor:
    magnitude = (codes & (sign - 1)).to(torch.int64)
    return torch.where((codes & sign) != 0, -magnitude, magnitude)
