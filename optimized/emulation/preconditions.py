"""Preconditions of the specification, checked; every failure names the token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import widen
from needlepoint.optimized.emulation.exact32 import fma
from needlepoint.optimized.emulation.pooling import scaled_ape
from needlepoint.optimized.emulation.specification import (
    EPS_LIMIT,
    LOG2_E,
    ROPE_DIMS,
    SCORE_LIMIT,
    TABLE_LIMIT,
    VALUE_LIMIT,
)
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs
from needlepoint.reference.formats.names import PER_TOKEN

RATIOS = (4, 128)
"""Ratios of layers with a compressor."""


def require_preconditions(inputs: LayerInputs) -> None:
    """Check shapes, dtypes and the specification's preconditions for one layer.

    Raises
    ------
    ValueError
        Naming the tensor and, where a value is at fault, its request, position and column.
    """
    if inputs.ratio not in RATIOS:
        raise ValueError(f"layer {inputs.layer}: ratio {inputs.ratio}, expected one of {RATIOS}")
    if (inputs.index is None, inputs.query is None) != (inputs.ratio != 4,) * 2:
        raise ValueError(
            f"layer {inputs.layer}, ratio {inputs.ratio}: index projections and query are "
            f"{'absent' if inputs.index is None else 'given'} and "
            f"{'absent' if inputs.query is None else 'given'}, expected both at ratio 4 alone"
        )
    _require_common(inputs)
    _require_compressor("main", inputs.main, inputs, 512)
    if inputs.index is not None:
        _require_compressor("index", inputs.index, inputs, 128)
    _require_query(inputs)


def require_token_preconditions(inputs: LayerInputs) -> None:
    """Check shapes, dtypes and magnitudes for a layer of one index key a token.

    Raises
    ------
    ValueError
        Naming the tensor and, where a value is at fault, its request, position and column.
    """
    index, tokens = inputs.index, sum(inputs.lengths)
    if inputs.ratio != PER_TOKEN or index is None or index.norm_bias is None:
        raise ValueError(
            f"layer {inputs.layer}, ratio {inputs.ratio}: expected ratio 1 with an index "
            "projection and the bias of its norm"
        )
    _require_common(inputs)
    _require_shape("index.kv", index.kv, (tokens, 128))
    _require_below("index.kv", index.kv, VALUE_LIMIT, inputs.lengths)
    for name in ("norm_weight", "norm_bias"):
        _require_shape(f"index.{name}", getattr(index, name), (128,))
        _require_below(f"index.{name}", getattr(index, name), VALUE_LIMIT, None)
    _require_query(inputs)


def _require_common(inputs: LayerInputs) -> None:
    if not inputs.lengths or min(inputs.lengths) < 1:
        raise ValueError(f"lengths {inputs.lengths}: expected at least 1 token in each request")
    if not EPS_LIMIT <= inputs.norm_eps < float("inf"):
        raise ValueError(f"norm_eps {inputs.norm_eps!r}: expected finite and at least 2**-126")
    _require_shape("rope_table", inputs.rope_table, (None, ROPE_DIMS // 2, 2))
    if inputs.rope_table.shape[0] < max(inputs.lengths):
        raise ValueError(
            f"rope_table has {inputs.rope_table.shape[0]} positions, expected at least "
            f"{max(inputs.lengths)}"
        )
    _require_below("rope_table", inputs.rope_table, TABLE_LIMIT, None)


def _require_query(inputs: LayerInputs) -> None:
    if inputs.query is not None:
        q, weights = inputs.query.q, inputs.query.weights
        tokens = sum(inputs.lengths)
        _require_shape("query.q", q, (tokens, None, 128))
        _require_shape("query.weights", weights, (tokens, q.shape[1]))
        if not q.shape[1]:
            raise ValueError("query.q: 0 heads, expected at least 1")
        _require_below("query.q", q, VALUE_LIMIT, inputs.lengths)
        _require_below("query.weights", weights, VALUE_LIMIT, inputs.lengths)


def _require_compressor(name: str, given: CompressorInputs, inputs: LayerInputs, d: int) -> None:
    columns = d * (2 if inputs.ratio == 4 else 1)
    tokens = sum(inputs.lengths)
    _require_shape(f"{name}.kv", given.kv, (tokens, columns))
    _require_shape(f"{name}.score", given.score, (tokens, columns))
    _require_shape(f"{name}.ape", given.ape, (inputs.ratio, columns))
    _require_shape(f"{name}.norm_weight", given.norm_weight, (d,))
    _require_below(f"{name}.norm_weight", given.norm_weight, VALUE_LIMIT, None)
    _require_below(f"{name}.ape", given.ape, VALUE_LIMIT, None)
    _require_below(f"{name}.kv", given.kv, VALUE_LIMIT, inputs.lengths)
    _require_below(f"{name}.score", given.score, VALUE_LIMIT, inputs.lengths)
    # A bound over all tokens settles almost every layer; only then is each score prescaled.
    bound = _largest(given.score) * float(LOG2_E) + _largest(given.ape) * float(LOG2_E)
    if bound < SCORE_LIMIT * (1 - 2.0**-20):
        return
    ape = scaled_ape(widen(given.ape))
    start = 0
    for request, length in enumerate(inputs.lengths):
        score = widen(given.score[start : start + length])
        z = fma(score, LOG2_E, ape[np.arange(length) % inputs.ratio])
        bad = np.argwhere(~(np.abs(z) < SCORE_LIMIT))
        if bad.size:
            position, column = (int(i) for i in bad[0])
            raise ValueError(
                f"{name}.score: request {request}, position {position}, column {column} prescales "
                f"to {float(z[position, column])!r}, expected a magnitude below 2**22; scores this "
                "large have no softmax in fp32"
            )
        start += length


def _require_shape(name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    wanted = tuple(expected)
    got = tuple(tensor.shape)
    if len(got) != len(wanted) or any(w not in (None, g) for g, w in zip(got, wanted, strict=True)):
        shape = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name}: shape {got}, expected ({shape})")
    if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: {tensor.dtype} on {tensor.device}, expected float32 or bfloat16 on the CPU"
        )


def _largest(tensor: Tensor) -> float:
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def _require_below(name: str, tensor: Tensor, limit: float, lengths: Sequence[int] | None) -> None:
    if _largest(tensor) < limit:
        return
    row, *rest = (int(i) for i in (~(tensor.abs() < limit)).nonzero()[0])
    value = float(tensor[(row, *rest)])
    where = f"index {(row, *rest)}"
    if lengths is not None:
        request, position = locate(row, lengths)
        where = f"request {request}, position {position}, index {tuple(rest)}"
    raise ValueError(
        f"{name}: {value!r} at {where}, expected a finite number of magnitude below {limit!r}"
    )


def locate(row: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Return (request, position) of a row of a token-side tensor."""
    for request, length in enumerate(lengths):
        if row < length:
            return request, row
        row -= length
    raise ValueError(f"row {row} lies {row} rows past the last of {len(lengths)} requests")
