"""Encode and decode rows in a number format, and the values that round to a code."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.formats.cells import code_cell, value_cell
from needlepoint.reference.formats.elements import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    first_index,
    require_float,
    round_to_bf16,
    to_bf16,
)
from needlepoint.reference.formats.scales import (
    UE8M0_BIAS,
    ue8m0_decode,
    ue8m0_exponent,
)
from needlepoint.reference.formats.types import (
    Encoded,
    Floor,
    Format,
    ScaleKind,
)

_FP32_MAX = torch.finfo(torch.float32).max
_FLOOR = torch.tensor(1e-4, dtype=torch.float32).item()  # 0x38D1B717, the fp32 constant of engines
_TINY = 6 * 2.0**-126


def encode(x: Tensor, fmt: Format) -> Encoded:
    """Encode rows: one scale per block of the last axis, one rounding per element.

    An element is the code nearest to the *exact* quotient of value and stored scale. A kernel that
    multiplies by an fp32 inverse may differ where the quotient is within two fp32 steps of a
    midpoint.

    The quotient is formed in float64 and rounded again without harm: with a midpoint ``m`` (at most
    25 bits) and a scale ``s`` (24 bits) ``m * s`` is a float64 number, and a value ``x`` that
    differs from it differs by so much that ``x / s`` never rounds to ``m`` in float64. The same
    holds for ``amax / max_value`` on its way to fp32.

    Parameters
    ----------
    x
        float32 or float64 ``[..., n]``, finite; ``n`` a multiple of the block.
    fmt
        Target format.

    Returns
    -------
    Encoded
        Codes and scales; magnitudes beyond the element's range saturate.

    Raises
    ------
    ValueError
        For another dtype, a wrong ``n``, or a value that is NaN, infinite or (except for
        ``float64``) beyond fp32, naming where it stands.
    """
    _require_finite(x, fmt)
    if fmt.element == "float64":
        return Encoded(x.to(torch.float64))
    if fmt.element == "fp32":
        return Encoded(x.to(torch.float32))
    if fmt.element == "bf16":
        return Encoded(to_bf16(x))
    if fmt.pre_round_bf16:
        x = round_to_bf16(x)
    scales = _scales(x, fmt)
    step = scale_values(scales, fmt)
    step = torch.where(step == 0, 1.0, step).unsqueeze(-1)
    blocks = _blocked(x.to(torch.float64), fmt)
    scaled = blocks / step
    to_codes = e4m3_encode if fmt.element == "e4m3" else e2m1_encode
    return Encoded(to_codes(scaled.flatten(-2), fmt.ties), scales)


def decode(encoded: Encoded, fmt: Format) -> Tensor:
    """Return the float64 values ``[..., n]`` of stored numbers; the product is exact.

    Raises
    ------
    ValueError
        If codes or scales do not have the dtype or shape of the format.
    """
    codes, scales = encoded.codes, encoded.scales
    if fmt.scale is ScaleKind.NONE:
        wanted = {"float64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
        if codes.dtype != wanted[fmt.element] or scales is not None:
            raise ValueError(
                f"decode {fmt.name}: got codes of {codes.dtype} and scales "
                f"{None if scales is None else scales.dtype}, expected "
                f"{wanted[fmt.element]} and no scales"
            )
        return codes.to(torch.float64)
    expected = (*codes.shape[:-1], codes.shape[-1] // fmt.block)
    if scales is None or tuple(scales.shape) != expected or codes.shape[-1] % fmt.block:
        raise ValueError(
            f"decode {fmt.name}: codes {tuple(codes.shape)} with scales "
            f"{None if scales is None else tuple(scales.shape)}, expected one scale for each "
            f"{fmt.block} codes of the last axis"
        )
    values = e4m3_decode(codes) if fmt.element == "e4m3" else e2m1_decode(codes)
    steps = scale_values(scales, fmt).unsqueeze(-1)
    return (_blocked(values, fmt) * steps).flatten(-2)


def block_scales(x: Tensor, fmt: Format) -> Tensor:
    """Return the scales ``[..., n / block]`` that :func:`encode` stores for ``x``.

    Raises
    ------
    ValueError
        As :func:`encode`, or if the format has no scales.
    """
    if fmt.scale is ScaleKind.NONE:
        raise ValueError(f"block_scales: format {fmt.name!r} has no scales")
    _require_finite(x, fmt)
    return _scales(round_to_bf16(x) if fmt.pre_round_bf16 else x, fmt)


def scale_values(scales: Tensor, fmt: Format) -> Tensor:
    """Return stored scales as float64 factors.

    Raises
    ------
    ValueError
        If the dtype is not the format's: float32 for plain scales, uint8 for UE8M0.
    """
    if fmt.scale is ScaleKind.UE8M0:
        return ue8m0_decode(scales)
    if fmt.scale is ScaleKind.NONE or scales.dtype != torch.float32:
        raise ValueError(
            f"scale_values: {scales.dtype} scales for format {fmt.name!r}, expected torch.float32 "
            f"for {ScaleKind.FP32.value!r} scales (this format has {fmt.scale.value!r})"
        )
    return scales.to(torch.float64)


def rounding_cell(codes: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the closed interval of scaled values that round to each code.

    Parameters
    ----------
    codes
        uint8 codes of a scaled format, or the numbers themselves of an unscaled one.
    fmt
        Format of the codes. Only its element matters: ends are midpoints to the neighbouring codes
        under either tie rule.

    Returns
    -------
    tuple of Tensor
        Lower and upper end, float64, in units of the scale. A float64 number is its own cell.

    Raises
    ------
    ValueError
        If a code is not one of the format.
    """
    if fmt.element == "float64":
        return codes.to(torch.float64), codes.to(torch.float64)
    if fmt.scale is ScaleKind.NONE:
        return value_cell(codes, fmt.element)
    return code_cell(codes, fmt.element)


def _blocked(x: Tensor, fmt: Format) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // fmt.block, fmt.block)


def _require_finite(x: Tensor, fmt: Format) -> None:
    require_float(x, f"encode {fmt.name}")
    if fmt.block and (x.dim() == 0 or x.shape[-1] % fmt.block):
        raise ValueError(
            f"encode {fmt.name}: shape {tuple(x.shape)}, expected a last axis that is a multiple "
            f"of the block {fmt.block}"
        )
    limit = torch.finfo(x.dtype).max if fmt.element == "float64" else _FP32_MAX
    low, high = torch.aminmax(x) if x.numel() else (torch.zeros(()), torch.zeros(()))
    if not (-limit <= float(low) and float(high) <= limit):
        where = first_index(~(x.abs() <= limit))
        raise ValueError(
            f"encode {fmt.name}: value {float(x[where])!r} at index {where}, expected a finite "
            f"number of magnitude at most {limit!r}"
        )


def _scales(x: Tensor, fmt: Format) -> Tensor:
    amax = _blocked(x, fmt).abs().amax(-1).to(torch.float64)
    if fmt.floor is Floor.AMAX_1E4:
        amax = amax.clamp(min=_FLOOR)
    elif fmt.floor is Floor.AMAX_TINY:
        amax = amax.clamp(min=_TINY)
    if fmt.scale is ScaleKind.UE8M0:
        exponent = ue8m0_exponent(amax, fmt.max_value)
        if fmt.floor is Floor.SCALE_1E4:
            exponent = exponent.clamp(min=int(ue8m0_exponent(torch.tensor(_FLOOR), 1.0)))
        return (exponent + UE8M0_BIAS).to(torch.uint8)
    plain = (amax / fmt.max_value).to(torch.float32)
    return plain.clamp(min=_FLOOR) if fmt.floor is Floor.SCALE_1E4 else plain
