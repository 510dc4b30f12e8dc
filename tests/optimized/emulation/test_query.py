"""The query path: position, rotation, scales a head row, folded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from needlepoint.optimized.emulation import query as query_module
from needlepoint.optimized.emulation import rows
from needlepoint.optimized.emulation.query import store_queries
from needlepoint.optimized.emulation.readback import read_queries
from needlepoint.optimized.protocol.interface import LayerInputs, QueryRows
from needlepoint.reference import formats

F32 = npt.NDArray[np.float32]
Make = Callable[..., LayerInputs]
FORMATS = {"bf16": formats.BF16, "fp8": formats.FP8_PLAIN, "fp4": formats.FP4_OFFICIAL}


def stored(inputs: LayerInputs, key_format: str) -> QueryRows:
    assert inputs.query is not None
    return store_queries(inputs.query, inputs, key_format)


def rotated(inputs: LayerInputs) -> F32:
    """Return rotated queries [tokens, heads, 128], one token at a time."""
    assert inputs.query is not None
    q = inputs.query.q.float().numpy()
    out = np.empty_like(q)
    positions = [p for length in inputs.lengths for p in range(length)]
    for token, position in enumerate(positions):
        cos, sin = (inputs.rope_table[position, :, i].numpy()[:, None] for i in (0, 1))
        out[token] = rows.hadamard(rows.rope(q[token].T.copy(), cos, sin)).T
    return out


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_of_every_head_row(
    make_inputs: Make, key_format: str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(4, (70, 3), dtype, heads=3)
    got = stored(inputs, key_format)
    expected = formats.encode(torch.from_numpy(rotated(inputs)), FORMATS[key_format])
    if key_format == "bf16":
        assert got.codes.dtype == torch.bfloat16
        assert torch.equal(got.codes, expected.codes)
        assert got.scales is None
    elif key_format == "fp8":
        # One plain scale a head row; the inverse product and the quotient rarely differ.
        assert got.scales is not None
        assert expected.scales is not None
        assert torch.equal(got.scales, expected.scales[..., 0])
        assert (got.codes != expected.codes).float().mean() < 1e-3
    else:
        assert torch.equal(got.codes, formats.pack_e2m1(expected.codes))
        assert expected.scales is not None
        assert got.scales is not None
        assert torch.equal(got.scales, expected.scales)


def test_weights_are_scaled_once_and_fp8_folds_the_query_scale(make_inputs: Make) -> None:
    inputs = replace(make_inputs(4, (40,), heads=3), weight_scale=128**-0.5 * 3**-0.5)
    assert inputs.query is not None
    w = inputs.query.weights.numpy()
    plain = w * np.float32(inputs.weight_scale)
    for key_format in ("bf16", "fp4"):
        got = stored(inputs, key_format)
        assert np.array_equal(got.weights.numpy(), plain)
        assert not got.scale_folded
    got = stored(inputs, "fp8")
    assert got.scale_folded
    assert got.scales is not None
    assert np.array_equal(got.weights.numpy(), plain * got.scales.numpy())
    # Another association differs in bits, so the order is pinned.
    other = w * (np.float32(inputs.weight_scale) * got.scales.numpy())
    assert not np.array_equal(got.weights.numpy(), other)


@pytest.mark.parametrize("key_format", FORMATS)
def test_a_query_does_not_depend_on_its_block(
    make_inputs: Make, key_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(4, (70, 3), heads=3)
    whole = stored(inputs, key_format)
    monkeypatch.setattr(query_module, "_ROWS", 1)
    single = stored(inputs, key_format)
    assert torch.equal(whole.codes.view(torch.uint8), single.codes.view(torch.uint8))
    assert torch.equal(whole.weights, single.weights)


@pytest.mark.parametrize("key_format", FORMATS)
def test_read_back_is_the_decoded_query(make_inputs: Make, key_format: str) -> None:
    inputs = make_inputs(4, (9,), heads=2)
    got = stored(inputs, key_format)
    values = read_queries(got, slice(2, 7)).double()
    if key_format == "fp8":
        assert got.scales is not None
        values *= got.scales[2:7, :, None].double()
    fmt = FORMATS[key_format]
    expected = formats.decode(formats.encode(torch.from_numpy(rotated(inputs)[2:7]), fmt), fmt)
    assert torch.allclose(values, expected, rtol=0.07, atol=1e-3)
    if key_format != "fp8":
        assert torch.equal(values, expected)
