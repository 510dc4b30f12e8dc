"""The readers' own tables, against ml-dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from needlepoint.verify.layout.decode import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_VALUES,
    bf16_values,
    decode_fields,
)

CODES = np.arange(256, dtype=np.uint8)


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours, theirs)
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))


def test_every_e4m3_code() -> None:
    assert_same(E4M3_VALUES, CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def test_every_e2m1_code() -> None:
    assert_same(E2M1_VALUES, CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64))


def test_every_ue8m0_code() -> None:
    with np.errstate(all="ignore"):
        assert_same(E8M0_VALUES, CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def test_every_bf16_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        theirs = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    assert_same(bf16_values(bits), theirs)


def test_poisoned_bytes_decode_to_nan_without_a_warning() -> None:
    poison = np.full((2, 128), 0xFF, dtype=np.uint8)
    signalling = np.array([[0x01, 0x00, 0x80, 0x7F]] * 2, dtype=np.uint8)

    for scale in (poison[:, :4], signalling):
        rows = decode_fields("index-fp8", {"values": np.zeros_like(poison), "scales": scale})
        assert np.isnan(rows.values).all()
    rows = decode_fields("index-fp4", {"values": poison[:, :64], "scales": poison[:, :4]})
    assert np.isnan(rows.values).all()
    assert np.isnan(decode_fields("main-bf16", {"values": poison}).values).all()


def test_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match=r"layout 'index-int8': expected one of \['index-bf16'"):
        decode_fields("index-int8", {})
