"""The one-launch query path: RoPE, Hadamard, format and head weights, on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import QueryArguments
from needlepoint.optimized.build.variants import query_name
from needlepoint.optimized.cuda.checks import (
    INPUT_DTYPES,
    require_same_device,
    require_same_dtype,
    require_tensor,
)
from needlepoint.optimized.cuda.faults import new_faults, require_no_query_faults
from needlepoint.optimized.cuda.runtime import launch
from needlepoint.optimized.emulation.specification import ROPE_DIMS
from needlepoint.optimized.protocol.interface import QueryRows

_CODE_BYTES = {"bf16": 256, "fp8": 128, "fp4": 64}


def store_queries(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    weight_scale: float,
    row: str,
    *,
    faults: Tensor | None = None,
    overlap: bool = True,
) -> QueryRows:
    """Store every query head row and fold the head weights (S8), in one launch.

    Parameters
    ----------
    q
        ``[tokens, heads, 128]``, fp32 or bf16, before RoPE; tokens may be strided.
    weights
        ``[tokens, heads]``, same dtype; tokens may be strided.
    positions
        int32 ``[tokens]``, rows of ``rope_table``; the caller vouches for their range.
    rope_table
        fp32 ``[positions, 32, 2]``.
    weight_scale
        Constant of the head weights.
    row
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    faults
        As in :func:`~needlepoint.optimized.cuda.store.store`.
    overlap
        Whether the launch may overlap with its neighbours in the stream.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it. After it, without
        ``faults``, if a query row or a head weight is not finite.
    """
    name = require_query(q, weights, positions, rope_table, row)
    device = require_same_device(q=q, weights=weights, positions=positions, rope_table=rope_table)
    tokens, heads, _ = q.shape
    out = allocate_queries(tokens, heads, row, device)
    found = new_faults(device) if faults is None else faults
    launch_query(name, q, weights, positions, rope_table, weight_scale, out, found, overlap=overlap)
    if faults is None:
        require_no_query_faults(found)
    return out


def allocate_queries(tokens: int, heads: int, row: str, device: torch.device) -> QueryRows:
    """Return unwritten query rows of a format."""
    codes = torch.empty((tokens, heads, _CODE_BYTES[row]), dtype=torch.uint8, device=device)
    scales = None
    if row == "fp8":
        scales = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    elif row == "fp4":
        scales = torch.empty((tokens, heads, 4), dtype=torch.uint8, device=device)
    folded = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    stored = codes.view(torch.bfloat16) if row == "bf16" else codes
    return QueryRows(row, stored, scales, folded, row == "fp8")


def launch_query(
    name: str,
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    weight_scale: float,
    out: QueryRows,
    faults: Tensor,
    *,
    overlap: bool = True,
) -> None:
    """Launch a variant on arguments that :func:`require_query` has accepted."""
    codes = out.codes.view(torch.uint8)
    arguments = QueryArguments(
        q=q,
        weights=weights,
        positions=positions,
        rope=rope_table,
        codes=codes,
        scales=codes if out.scales is None else out.scales,
        folded=out.weights,
        weight_scale=weight_scale,
        faults=faults,
        overlap=overlap,
    )
    launch(name, arguments, q.device)


def require_query(
    q: Tensor, weights: Tensor, positions: Tensor, rope_table: Tensor, row: str
) -> str:
    """Check the arguments of :func:`store_queries` and return the variant's name."""
    require_tensor("q", q, (None, None, 128), INPUT_DTYPES, rows_strided=True)
    tokens, heads, _ = q.shape
    if heads < 1:
        raise ValueError(f"q: shape {tuple(q.shape)}, expected at least one head")
    align = q.element_size()
    require_tensor(
        "weights", weights, (tokens, heads), INPUT_DTYPES, align=align, rows_strided=True
    )
    require_tensor("positions", positions, (tokens,), (torch.int32,), align=4)
    require_tensor("rope_table", rope_table, (None, ROPE_DIMS // 2, 2), (torch.float32,))
    return query_name(require_same_dtype("q", q, "weights", weights), row)
