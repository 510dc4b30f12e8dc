"""Rounding cells: the values that round to a given code.

The judge knows the exact value only within a radius. It asks whether some value within the radius
rounds to the code that it found. For this it needs the cell of the code, closed at both ends: a
midpoint belongs to both neighbours, because the tie rule is judged by the profile's own encoder.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from needlepoint.reference.formats.elements import ELEMENTS, Element, require_codes

_FP32_STEP = {"fp32": 1, "bf16": 1 << 16}  # fp32 bit patterns from one number to the next
_OVERFLOW = 2.0**128  # the number that follows the largest finite one


def _cell_table(element: Element) -> tuple[Tensor, Tensor]:
    half = element.sign_bit
    values = [element.magnitude(code) for code in range(half)]
    values = [v for v in values if v <= element.max_value]
    middle = [(a + b) / 2 for a, b in pairwise(values)]
    lower = [-middle[0], *middle]
    upper = [*middle, math.inf]
    missing = [math.nan] * (half - len(values))
    lower, upper = lower + missing, upper + missing
    return (
        torch.tensor(lower + [-v for v in upper], dtype=torch.float64),
        torch.tensor(upper + [-v for v in lower], dtype=torch.float64),
    )


_TABLES = {e.name: _cell_table(e) for e in ELEMENTS.values()}


def code_cell(codes: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return lower and upper end of the cells of E4M3 or E2M1 codes, float64.

    +0 and -0 share one cell; the largest codes reach to infinity, because encoding saturates; the
    cell of a NaN code is NaN at both ends, so that no comparison with it holds.

    Raises
    ------
    ValueError
        If the codes are not uint8 or not of the element.
    """
    require_codes(codes, ELEMENTS[element])
    lower, upper = _TABLES[element]
    index = codes.to(torch.int64)
    return lower.to(codes.device)[index], upper.to(codes.device)[index]


def value_cell(values: Tensor, element: str) -> tuple[Tensor, Tensor]:
    """Return lower and upper end of the cells of bf16 or fp32 numbers, float64.

    The cell of an infinity starts where rounding overflows; NaN has a NaN cell.

    Raises
    ------
    ValueError
        If a value is not a number of the format.
    """
    step = _FP32_STEP[element]
    narrow = values.to(torch.float32)
    bits = narrow.view(torch.int32)
    known = torch.isnan(values) | ((narrow.to(torch.float64) == values) & (bits % step == 0))
    if not bool(known.all()):
        raise ValueError(
            f"rounding_cell: {float(values[~known][0])!r} is not a {element} number; round it first"
        )
    magnitude = bits & 0x7FFFFFFF
    here, above, below = (_number(b) for b in (magnitude, magnitude + step, magnitude - step))
    outer = torch.where(torch.isinf(narrow), math.inf, (here + above) / 2)
    inner = torch.where(magnitude == 0, -outer, (here + below) / 2)
    negative = torch.signbit(narrow)
    nan = torch.isnan(values)
    lower = torch.where(negative, -outer, inner).masked_fill(nan, math.nan)
    upper = torch.where(negative, -inner, outer).masked_fill(nan, math.nan)
    return lower, upper


def _number(bits: Tensor) -> Tensor:
    number = bits.view(torch.float32).to(torch.float64)
    return torch.where(number == math.inf, _OVERFLOW, number)
