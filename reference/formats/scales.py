"""UE8M0 scales: powers of two stored as exponent + 127, found and checked by bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needlepoint.reference.formats.elements import first_index, require_float

UE8M0_BIAS = 127
UE8M0_NAN = 255


def ue8m0_exponent(amax: Tensor, max_value: float) -> Tensor:
    """Return ``ceil(log2(amax / max_value))`` exactly.

    With ``amax = m * 2**e`` and ``max_value = n * 2**f``, ``m`` and ``n`` in [1/2, 1), the answer
    is ``e - f``, plus one exactly when ``m > n``. No logarithm is involved: near a power of two a
    rounded ``log2`` returns the integer itself and the scale comes out an octave low.

    Parameters
    ----------
    amax
        float32 or float64, any shape, positive and finite; zero gives the exponent of the
        smallest UE8M0 code, -127.
    max_value
        Largest magnitude of the element (448 for E4M3, 6 for E2M1).

    Returns
    -------
    Tensor
        int64 of ``amax``'s shape, at least -127.

    Raises
    ------
    ValueError
        For another dtype.
    """
    require_float(amax, "ue8m0_exponent")
    target, offset = math.frexp(max_value)
    mantissa, exponent = torch.frexp(amax)
    result = exponent.to(torch.int64) - offset + (mantissa > target)
    return torch.where(amax > 0, result, -UE8M0_BIAS).clamp_(min=-UE8M0_BIAS)


def ue8m0_encode(scale: Tensor) -> Tensor:
    """Return the UE8M0 codes (exponent + 127) of scales that are powers of two already.

    Raises
    ------
    ValueError
        If a scale is not a power of two in ``2**-127 .. 2**127``: its bits must not be cut to an
        exponent silently.
    """
    require_float(scale, "ue8m0_encode")
    mantissa, exponent = torch.frexp(scale)
    codes = exponent.to(torch.int64) - 1 + UE8M0_BIAS
    bad = ~((mantissa == 0.5) & (codes >= 0) & (codes < UE8M0_NAN))
    if bool(bad.any()):
        where = first_index(bad)
        raise ValueError(
            f"ue8m0_encode: scale {float(scale[where])!r} at index {where} is not a power of two "
            "in 2**-127 .. 2**127; quantise again with a power-of-two scale"
        )
    return codes.to(torch.uint8)


def ue8m0_decode(codes: Tensor) -> Tensor:
    """Return ``2**(code - 127)`` as float64 for uint8 codes; code 255 is NaN."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"ue8m0_decode: got dtype {codes.dtype}, expected torch.uint8")
    wide = codes.to(torch.int64)
    values = ((wide - UE8M0_BIAS + 1023) << 52).view(torch.float64)
    return values.masked_fill(wide == UE8M0_NAN, float("nan"))
