"""S8: the index query and the head weights as they are stored for the score kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import widen
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import U8, StoredRows, store_bf16, store_fp4, store_fp8
from needlepoint.optimized.emulation.parallel import over_blocks
from needlepoint.optimized.emulation.rows import hadamard, rope
from needlepoint.optimized.protocol.interface import LayerInputs, QueryInputs, QueryRows
from needlepoint.reference.formats.names import RopeLayout

_ROWS = 128  # head rows of one block

STORES = {"bf16": store_bf16, "fp8": store_fp8, "fp4": store_fp4}
"""Store of a 128-wide row by format; index keys and queries share it."""


def store_queries(given: QueryInputs, inputs: LayerInputs, key_format: str) -> QueryRows:
    """Rotate and store every query head row, and scale the head weights.

    Parameters
    ----------
    given
        Queries and weights of one layer.
    inputs
        The layer: lengths, RoPE table, weight scale.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.

    Returns
    -------
    QueryRows
        Codes and scales of every head row; fp8 weights already hold the query scale.
    """
    positions = np.concatenate([np.arange(n) for n in inputs.lengths])
    return store_queries_at(
        given,
        positions,
        inputs.rope_table,
        inputs.weight_scale,
        key_format,
        inputs.index_rope,
    )


def store_queries_at(
    given: QueryInputs,
    positions: npt.NDArray[np.int64],
    rope_table: Tensor,
    weight_scale: float,
    key_format: str,
    layout: RopeLayout = RopeLayout.TRAILING_PAIRS,
) -> QueryRows:
    """Do what :func:`store_queries` does for tokens at any positions, int64 ``[tokens]``."""
    tokens, heads, _ = given.q.shape
    table = widen(rope_table)
    q = widen(given.q)
    step = max(1, _ROWS // heads)

    def store(token: int) -> StoredRows:
        rows = slice(token, token + step)
        return _store_block(q[rows], table[positions[rows]], key_format, layout)

    parts = over_blocks(store, range(0, tokens, step))
    values = np.concatenate([p.values for p in parts]).reshape(tokens, heads, -1)
    scales = np.concatenate([p.scales for p in parts]).reshape(tokens, heads, -1)
    weights = widen(given.weights) * np.float32(weight_scale)
    if key_format == "bf16":
        codes = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return QueryRows("bf16", codes, None, torch.from_numpy(weights), False)
    if key_format == "fp4":
        stored, steps = torch.from_numpy(values), torch.from_numpy(scales)
        return QueryRows("fp4", stored, steps, torch.from_numpy(weights), False)
    scale = _plain_scales(scales)
    folded = torch.from_numpy(weights * scale)
    return QueryRows("fp8", torch.from_numpy(values), torch.from_numpy(scale), folded, True)


def _store_block(q: F32, table: F32, key_format: str, layout: RopeLayout) -> StoredRows:
    """Store ``q`` float32 ``[n, heads, 128]``, rotated by table rows ``[n, 32, 2]``."""
    channels = np.ascontiguousarray(np.moveaxis(q, -1, 0))
    cos = np.ascontiguousarray(table[..., 0].T)[..., None]
    sin = np.ascontiguousarray(table[..., 1].T)[..., None]
    rotated = hadamard(rope(channels, cos, sin, layout))
    return STORES[key_format](rotated.reshape(rotated.shape[0], -1))


def _plain_scales(scale_bytes: U8) -> F32:
    return scale_bytes.view("<f4")[..., 0].astype(np.float32)
