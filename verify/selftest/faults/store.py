"""Faults of the store: scale rule, floor, rounding, truncation, the layout of one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from needlepoint.optimized.emulation import narrow
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import U8, StoredRows
from needlepoint.optimized.emulation.specification import AMAX_FLOOR_FP4, INVERSE_6, INVERSE_448
from needlepoint.optimized.protocol.interface import MAIN
from needlepoint.verify.selftest.faults.fault import Case, Setting, fault
from needlepoint.verify.selftest.faults.plant import stored

f32 = np.float32
_BF16, _FP4 = Setting("bf16"), Setting("fp4")
_INDEX, _MAIN = "index.stored", "main.stored"
_MAX, _FLOOR = f32(448.0), f32(1e-4)
_BLOCK = 64


def _plain(y: F32, scale: F32, codes: U8 | None = None) -> StoredRows:
    """Return E4M3 rows of ``y [d, n]`` under one fp32 scale a row."""
    codes = narrow.to_e4m3((y / scale).astype(f32)) if codes is None else codes
    as_bytes = np.ascontiguousarray(scale.astype("<f4")).view(np.uint8).reshape(-1, 4)
    return StoredRows(np.ascontiguousarray(codes.T), as_bytes)


def _scale(y: F32, floor: f32 = _FLOOR, top: f32 = _MAX) -> F32:
    scale: F32 = (np.maximum(np.abs(y).max(axis=0), floor) / top).astype(f32)
    return scale


def gained(factor: float) -> Callable[[F32], StoredRows]:
    """Return the fp8 store of rows times a factor."""
    return lambda y: narrow.store_fp8(y * f32(factor))


def _neighbour_scale(y: F32) -> StoredRows:
    rows = narrow.store_fp8(y)
    return replace(rows, scales=np.roll(rows.scales, 1, axis=0))


def raw_codes_rounded_scale(y: F32) -> StoredRows:
    """Divide by the raw scale and store the power of two above it."""
    raw = _scale(y)
    return _plain(
        y, np.exp2(np.ceil(np.log2(raw))).astype(f32), narrow.to_e4m3((y / raw).astype(f32))
    )


def _transposed_scale_bytes(y: F32) -> StoredRows:
    rows = narrow.store_fp8(y)
    return replace(rows, scales=np.ascontiguousarray(rows.scales[:, ::-1]))


def truncated_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Return bf16 bits cut off instead of rounded."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _twice_rounded(x: F32) -> npt.NDArray[np.uint16]:
    """Return bf16 bits of values that were rounded to 11 bits before: ties that were none."""
    once = ((x.view(np.uint32) + 0x0FFF + ((x.view(np.uint32) >> 13) & 1)) & 0xFFFFE000).view(f32)
    return narrow.to_bf16(once)


def bf16_rows(to_bf16: Callable[[F32], npt.NDArray[np.uint16]]) -> Callable[[F32], StoredRows]:
    """Return a bf16 store with another rounding."""

    def store(y: F32) -> StoredRows:
        rows = np.ascontiguousarray(to_bf16(np.ascontiguousarray(y)).T)
        return StoredRows(rows.view(np.uint8), np.empty((y.shape[1], 0), np.uint8))

    return store


def _towards_zero(x: F32) -> U8:
    """Return E4M3 codes cut off instead of rounded."""
    codes = narrow.to_e4m3(x)
    value = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    away = (np.abs(value) > np.abs(x)).astype(np.uint8)
    towards: U8 = np.subtract(codes, away, dtype=np.uint8)
    return towards


def _truncated_fp8(y: F32) -> StoredRows:
    scale = _scale(y)
    return _plain(y, scale, _towards_zero((y * (f32(1) / scale)).astype(f32)))


def _clipped(y: F32) -> StoredRows:
    """Take the scale of the mean magnitude and clip what is larger."""
    scale = (np.abs(y).mean(axis=0, dtype=f32) * f32(2) / _MAX).astype(f32)
    return _plain(y, np.maximum(scale, _FLOOR / _MAX))


def _fp4(
    y: F32,
    exponent: Callable[[F32], npt.NDArray[np.uint32]] = narrow.ceil_exponent,
    codes: Callable[[F32], U8] = narrow.to_e2m1,
) -> StoredRows:
    blocks = y.reshape(-1, narrow.FP4_BLOCK, y.shape[1])
    amax = np.maximum(np.abs(blocks).max(axis=1), AMAX_FLOOR_FP4)
    steps = exponent(amax * INVERSE_6)
    inverse = ((254 - steps) << 23).astype(np.uint32).view(f32)
    found = codes(blocks * inverse[:, None]).reshape(y.shape)
    packed = found[0::2] | (found[1::2] << 4)
    return StoredRows(
        np.ascontiguousarray(packed.T), np.ascontiguousarray(steps.T.astype(np.uint8))
    )


def floored_exponent(g: F32) -> npt.NDArray[np.uint32]:
    """Return floor(log2 g) + 127."""
    return np.right_shift(g.view(np.uint32), 23, dtype=np.uint32)


def _truncated_e2m1(x: F32) -> U8:
    steps = np.floor(np.minimum(np.abs(x), f32(6)) * f32(2)).astype(f32)
    return narrow.to_e2m1(np.copysign(steps * f32(0.5), x))


def _swapped_nibbles(y: F32) -> StoredRows:
    rows = narrow.store_fp4(y)
    return replace(rows, values=((rows.values >> 4) | (rows.values << 4)).astype(np.uint8))


def _neighbour_block(y: F32) -> StoredRows:
    rows = narrow.store_fp4(y)
    return replace(rows, scales=np.ascontiguousarray(np.roll(rows.scales, 1, axis=1)))


def _shifted_bits(y: F32) -> StoredRows:
    """Write the exponent bits of a scale that is no power of two as if it were one."""
    blocks = y.reshape(-1, narrow.FP4_BLOCK, y.shape[1])
    plain = (np.abs(blocks).max(axis=1) / f32(6)).astype(f32)
    codes = narrow.to_e2m1((blocks / plain[:, None]).astype(f32)).reshape(y.shape)
    return StoredRows(
        np.ascontiguousarray((codes[0::2] | (codes[1::2] << 4)).T),
        np.ascontiguousarray((plain.view(np.uint32) >> 23).astype(np.uint8).T),
    )


def _main(
    y: F32,
    exponent: Callable[[F32], npt.NDArray[np.uint32]] = narrow.ceil_exponent,
    nope: Callable[[F32], F32] = lambda x: narrow.widen_bf16(narrow.to_bf16(x)),
    codes_of: Callable[[F32], U8] = narrow.to_e4m3,
) -> StoredRows:
    rows = nope(y[:-64])
    blocks = rows.reshape(-1, _BLOCK, y.shape[1])
    amax = np.maximum(np.abs(blocks).max(axis=1), _FLOOR)
    steps = exponent((amax * INVERSE_448).astype(f32))
    inverse = ((254 - steps) << 23).astype(np.uint32).view(f32)
    codes = codes_of((blocks * inverse[:, None]).astype(f32)).reshape(rows.shape)
    rope = np.ascontiguousarray(narrow.to_bf16(y[-64:]).T).view(np.uint8)
    scales = np.zeros((y.shape[1], 8), np.uint8)
    scales[:, : len(steps)] = steps.T
    return StoredRows(np.concatenate((codes.T, rope), axis=1), scales)


def _rope_in_fp8(y: F32) -> StoredRows:
    """Send the RoPE dims of a 584-byte row through E4M3 under the last scale."""
    rows = narrow.store_main_fp8(y)
    step = np.exp2(rows.scales[:, 6].astype(np.float64) - 127).astype(f32)
    codes = torch.from_numpy(narrow.to_e4m3((y[-64:] / step).astype(f32)))
    back = codes.view(torch.float8_e4m3fn).to(torch.float32).numpy() * step
    values = rows.values.copy()
    values[:, 448:] = np.ascontiguousarray(narrow.to_bf16(back.astype(f32)).T).view(np.uint8)
    return StoredRows(values, rows.scales)


def _log2_exponent(g: F32) -> npt.NDArray[np.uint32]:
    """Round a power-of-two scale up through a log2 that is good to 1/32."""
    return (np.ceil(np.round(np.log2(g) * 32) / 32) + 127).astype(np.uint32)


def _ties_away(x: F32) -> U8:
    return narrow.to_e4m3(np.nextafter(x, np.copysign(f32(np.inf), x)))


def _rope_truncated(y: F32) -> StoredRows:
    rows = narrow.store_main_fp8(y)
    values = rows.values.copy()
    values[:, 448:] = np.ascontiguousarray(truncated_bf16(y[-64:]).T).view(np.uint8)
    return StoredRows(values, rows.scales)


FAULTS: tuple[Case, ...] = (
    fault("store-gain-0.4%", "H", "stored keys 0.4 % too large", stored(gained(1.004)), _INDEX),
    fault("store-gain-2%", "H", "stored keys 2 % too large", stored(gained(1.02)), _INDEX),
    fault("store-bf16-first", "H", "keys rounded to bf16 before fp8",
          stored(lambda y: narrow.store_fp8(narrow.widen_bf16(narrow.to_bf16(y)))), _INDEX,
          log="F10"),
    fault("scale-of-the-neighbour", "D", "every key with the scale of the token before it",
          stored(_neighbour_scale), _INDEX, log="D16"),
    fault("scale-a-power-of-two", "H", "power-of-two scale where a plain one is meant",
          stored(lambda y: _plain(y, np.exp2(np.ceil(np.log2(_scale(y)))).astype(f32))), _INDEX,
          log="H03 H06"),
    fault("scale-rounded-codes-not", "H",
          "codes under the raw scale, the power of two above it stored",
          stored(raw_codes_rounded_scale), _INDEX, log="H01"),
    fault("scale-of-240", "H", "scale for a largest number of 240",
          stored(lambda y: _plain(y, _scale(y, top=f32(240.0)))), _INDEX),
    fault("e4m3-of-another-bias", "H", "codes of the E4M3 with exponent bias 8",
          stored(lambda y:
                 _plain(y, _scale(y), narrow.to_e4m3((y / _scale(y) * f32(2)).astype(f32)))),
          _INDEX),
    fault("scale-bytes-reversed", "D", "scale bytes in the other order",
          stored(_transposed_scale_bytes), _INDEX),
    fault("scale-clips", "H", "scale of twice the mean magnitude, larger values clipped",
          stored(_clipped), _INDEX),
    fault("floor-missing", "H", "no floor under the amax of small rows and of zeros",
          stored(lambda y: _plain(y, _scale(y, f32(1e-30)))), _INDEX, on=Setting(kind="small")),
    fault("floor-of-another-rule", "H", "floor 1e-2 under the amax",
          stored(lambda y: _plain(y, _scale(y, f32(1e-2)))), _INDEX, on=Setting(kind="small")),
    fault("bf16-gain-0.4%", "H", "bf16 keys 0.4 % too large",
          stored(lambda y: narrow.store_bf16(np.ascontiguousarray(y * f32(1.004)))), _INDEX,
          on=_BF16),
    fault("bf16-truncated", "H", "bf16 keys cut off instead of rounded",
          stored(bf16_rows(truncated_bf16)), _INDEX, on=_BF16),
    fault("bf16-truncated-main", "H", "bf16 main rows cut off instead of rounded",
          stored(bf16_rows(truncated_bf16), MAIN), _MAIN, on=_BF16),
    fault("bf16-rounded-twice", "H", "bf16 main rows rounded to 11 bits before",
          stored(bf16_rows(_twice_rounded), MAIN), _MAIN, on=_BF16),
    fault("fp8-truncated", "H", "fp8 codes cut off instead of rounded", stored(_truncated_fp8),
          _INDEX),
    fault("fp8-ties-away", "H", "fp8 codes of values exactly between two numbers rounded up",
          stored(lambda y: _main(y, codes_of=_ties_away), MAIN),
          _MAIN, log="F10"),
    fault("fp4-truncated", "H", "fp4 codes cut off instead of rounded",
          stored(lambda y: _fp4(y, codes=_truncated_e2m1)), _INDEX, on=_FP4),
    fault("fp4-scale-floored", "H", "fp4 scale rounded down",
          stored(lambda y: _fp4(y, floored_exponent)), _INDEX, log="H06", on=_FP4),
    fault("fp4-nibbles-swapped", "H", "two codes of a byte in the other order",
          stored(_swapped_nibbles), _INDEX, log="H11", on=_FP4),
    fault("fp4-scale-of-the-next-block", "D", "scales of the four blocks of a row moved by one",
          stored(_neighbour_block), _INDEX, log="D11", on=_FP4),
    fault("fp4-scale-bits-shifted", "H", "exponent bits of a plain scale stored as a power of two",
          stored(_shifted_bits), _INDEX, log="H03", on=_FP4),
    fault("main-rope-in-fp8", "H", "RoPE dims of a 584-byte row quantised too",
          stored(_rope_in_fp8, MAIN), _MAIN, log="H10"),
    fault("main-rope-truncated", "H", "RoPE dims of a 584-byte row cut off instead of rounded",
          stored(_rope_truncated, MAIN), _MAIN),
    fault("main-scale-floored", "H", "scales of a 584-byte row rounded down",
          stored(lambda y: _main(y, floored_exponent), MAIN), _MAIN, log="H06"),
    fault("main-scale-by-log2", "H", "power-of-two scales through a log2 of few bits",
          stored(lambda y: _main(y, _log2_exponent), MAIN), _MAIN, log="H02"),
    fault("main-not-rounded-first", "H", "448 dims quantised from fp32 instead of bf16",
          stored(lambda y: _main(y, nope=lambda x: x), MAIN), _MAIN),
)  # fmt: skip
