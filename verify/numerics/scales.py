"""Scales a candidate may store: those that follow from an amax within the radius.

The scale of a block is a monotone function of its amax. If every value is known to within its
radius, so is the amax, and the admissible scales are the rule applied to both ends of that
interval: exactly so for UE8M0, plus the rounding of one division for a plain fp32 scale. The floors
need no case of their own, because they are part of the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.reference.formats import Format, ScaleKind, block_scales, scale_values
from needlepoint.verify.numerics.error_bound import ErrorBound
from needlepoint.verify.numerics.error_model import DIVISION, U


@dataclass(frozen=True)
class ScaleRange:
    """Admissible scales of each block, float64 ``[..., blocks]``."""

    # Scale at the lower end of amax, at the reference amax, and at the upper end.
    low: Tensor
    value: Tensor
    high: Tensor
    amax: Tensor  # Reference amax.
    amax_delta: Tensor  # Its radius.


def admissible_scales(row: ErrorBound, fmt: Format) -> ScaleRange:
    """Return the scales that some admissible amax gives.

    Parameters
    ----------
    row
        [..., n], after the format's own bf16 rounding if it has one.
    fmt
        A format with scales.
    """
    magnitude = in_blocks(row.value.abs(), fmt.block)
    delta = in_blocks(row.delta, fmt.block)
    amax = magnitude.amax(-1)
    above = (magnitude + delta).amax(-1)
    below = (magnitude - delta).amax(-1).clamp(min=0)
    low, value, high = (_rule(end, fmt) for end in (below, amax, above))
    if fmt.scale is ScaleKind.FP32:
        low, high = low * (1 - DIVISION.value * U), high * (1 + DIVISION.value * U)
    return ScaleRange(low, value, high, amax, torch.maximum(above - amax, amax - below))


def _rule(amax: Tensor, fmt: Format) -> Tensor:
    single = replace(fmt, block=1, pre_round_bf16=False)
    return scale_values(block_scales(amax, single), single)


def stored_scales(scales: Tensor, fmt: Format) -> Tensor:
    """Return a candidate's stored scales as float64 factors, whatever slot they came from.

    Power-of-two scales may stand in an fp32 slot (vLLM's 132-byte rows).

    Parameters
    ----------
    scales
        uint8 UE8M0 codes, or float scales.
    fmt
        A format with scales.
    """
    if scales.dtype == torch.uint8:
        return scale_values(scales, replace(fmt, scale=ScaleKind.UE8M0))
    return scales.to(torch.float64)


def scale_errors(found: Tensor, admissible: ScaleRange, fmt: Format) -> Tensor:
    """Return the error of each scale in units of its radius; infinite where none can be right.

    Parameters
    ----------
    found
        float64 [..., blocks] stored scales.
    admissible
        Range from :func:`admissible_scales`.
    fmt
        Format.

    Returns
    -------
    Tensor
        float64 [..., blocks]; at most 1 exactly where the scale is admissible.
    """
    if fmt.scale is ScaleKind.UE8M0:
        return _power_errors(found, admissible, fmt)
    radius = torch.maximum(admissible.high - admissible.value, admissible.value - admissible.low)
    return in_units((found - admissible.value).abs(), radius)


def _power_errors(found: Tensor, admissible: ScaleRange, fmt: Format) -> Tensor:
    # A scale belongs to the amax values in (max_value * s / 2, max_value * s]; the smallest scale
    # that the floor leaves belongs to everything below as well.
    lowest = _rule(torch.zeros(1, dtype=torch.float64), fmt)
    upper = fmt.max_value * found
    lower = torch.where(found <= lowest, 0.0, upper / 2)
    needed = torch.maximum(admissible.amax - upper, lower - admissible.amax).clamp(min=0)
    errors = in_units(needed, admissible.amax_delta)
    # With radius 0 the amax stands on one side of a boundary that the closed cells share.
    known = admissible.amax_delta == 0
    errors = torch.where(known & (found != admissible.value), math.inf, errors)
    possible = (found >= lowest) & (torch.frexp(found).mantissa == 0.5)
    return torch.where(possible, errors, math.inf)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Return ``[..., n]`` as ``[..., n / block, block]``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def in_units(needed: Tensor, radius: Tensor) -> Tensor:
    """Return ``needed / radius`` with 0/0 = 0; NaN becomes infinite, so that it never passes."""
    ratio = torch.where(needed == 0, 0.0, needed / radius)
    return torch.where(torch.isnan(ratio), math.inf, ratio)
