"""Bytes of stored rows to numbers, in NumPy, from the definition of each bit.

Nothing here comes from ``reference.formats``: a mistake there must show as a difference, not cancel
against the same mistake in the reader. All multi-byte numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class DecodedRows:
    """Stored rows of one request, decoded."""

    # ``[entries, n]`` as stored: uint8 E4M3 codes (n = 128, or 448 for main-584), uint8 E2M1 codes
    # one a byte (n = 128), uint16 bf16 bits, uint64 float64 bits.
    codes: NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint64]
    # ``[entries, blocks]``: float32 (index-fp8, one block), uint8 UE8M0 exponent codes (index-fp4:
    # 4, main-584: 7), None for unscaled layouts.
    scales: NDArray[np.float32] | NDArray[np.uint8] | None
    # float64 ``[entries, d]``, scales applied; all 512 dims for main-584. A NaN code or scale gives
    # NaN.
    values: Values
    # uint16 bf16 bits ``[entries, 64]`` of the RoPE dims of main-584, else None; their values are
    # the last 64 columns of ``values``.
    rope_codes: NDArray[np.uint16] | None = None


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


def _e8m0_value(code: int) -> float:
    return float("nan") if code == 0xFF else float(2.0 ** (code - 127))


E4M3_VALUES: Values = np.array([_e4m3_value(code) for code in range(256)])
E2M1_VALUES: Values = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
E8M0_VALUES: Values = np.array([_e8m0_value(code) for code in range(256)])


def bf16_values(bits: NDArray[np.uint16]) -> Values:
    """Return the float64 values of bf16 bit patterns: the upper half of an fp32 number."""
    with np.errstate(invalid="ignore"):  # a signalling NaN in poisoned bytes is still only a NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def decode_fields(layout: str, fields: Mapping[str, Bytes]) -> DecodedRows:
    """Decode the byte fields of rows.

    Parameters
    ----------
    layout
        Layout name of :data:`needlepoint.verify.layout.pages.LAYOUTS`.
    fields
        uint8 ``[entries, width]`` by field name: ``values``, and ``scales`` and ``rope`` where the
        layout has them.

    Raises
    ------
    ValueError
        For an unknown layout.
    """
    if layout not in _DECODERS:
        raise ValueError(f"layout {layout!r}: expected one of {sorted(_DECODERS)}")
    with np.errstate(invalid="ignore", over="ignore"):
        return _DECODERS[layout](fields)


def _index_fp8(fields: Mapping[str, Bytes]) -> DecodedRows:
    codes = fields["values"]
    scales = np.ascontiguousarray(fields["scales"]).view("<f4").astype(np.float32)
    return DecodedRows(codes, scales, E4M3_VALUES[codes] * scales.astype(np.float64))


def _index_fp4(fields: Mapping[str, Bytes]) -> DecodedRows:
    packed, scales = fields["values"], fields["scales"]
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & 0xF  # the even dim sits in the low nibble
    codes[:, 1::2] = packed >> 4
    values = E2M1_VALUES[codes] * np.repeat(E8M0_VALUES[scales], 32, axis=1)
    return DecodedRows(codes, scales, values)


def _main_584(fields: Mapping[str, Bytes]) -> DecodedRows:
    codes, scales = fields["values"], fields["scales"]
    rope = _words(fields["rope"])
    nope = E4M3_VALUES[codes] * np.repeat(E8M0_VALUES[scales], 64, axis=1)
    values = np.concatenate([nope, bf16_values(rope)], axis=1)
    return DecodedRows(codes, scales, values, rope)


def _bf16_rows(fields: Mapping[str, Bytes]) -> DecodedRows:
    bits = _words(fields["values"])
    return DecodedRows(bits, None, bf16_values(bits))


def _float64_rows(fields: Mapping[str, Bytes]) -> DecodedRows:
    raw = np.ascontiguousarray(fields["values"])
    return DecodedRows(raw.view("<u8").astype(np.uint64), None, raw.view("<f8").astype(np.float64))


def _words(raw: Bytes) -> NDArray[np.uint16]:
    return np.ascontiguousarray(raw).view("<u2").astype(np.uint16)


_DECODERS = {
    "index-fp8": _index_fp8,
    "index-bf16": _bf16_rows,
    "index-fp4": _index_fp4,
    "main-584": _main_584,
    "main-bf16": _bf16_rows,
    "rows-f64": _float64_rows,
}
