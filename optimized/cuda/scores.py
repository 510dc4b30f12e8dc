"""Index scores on a CUDA device (S9): fused epilogue, paged or ragged keys, limits per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import score_name
from needlepoint.optimized.cuda.checks import require_same_device, require_tensor
from needlepoint.optimized.cuda.runtime import kernel
from needlepoint.optimized.cuda.score_plan import ScorePlan, keys_of_a_block
from needlepoint.optimized.emulation.pages import LAYOUTS
from needlepoint.optimized.protocol.interface import QueryRows

MIN_PAGE = 8
CODE_BYTES = {"bf16": 256, "fp8": 128, "fp4": 64}
_ALIGN = 4  # columns that the rows of the output are padded to


@dataclass(frozen=True)
class KeyPages:
    """Index keys in pages.

    Attributes
    ----------
    row
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    pages
        uint8 ``[pages, page bytes]``.
    page_size
        Rows a page, a power of two of at least 8.
    table
        int32 ``[requests, pages of a request]``. A key on a page outside the pool scores NaN.
    """

    row: str
    pages: Tensor
    page_size: int
    table: Tensor


@dataclass(frozen=True)
class KeyRows:
    """Index keys of all requests one after the other.

    Attributes
    ----------
    row
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    values
        bf16 ``[keys, 128]``, uint8 ``[keys, 128]`` or uint8 ``[keys, 64]``.
    scales
        fp8: fp32 ``[keys]``; fp4: uint8 ``[keys, 4]``; bf16: None.
    starts
        int64 ``[requests]``, row of each request's first key.
    """

    row: str
    values: Tensor
    scales: Tensor | None
    starts: Tensor


Keys = KeyPages | KeyRows


@dataclass(frozen=True)
class ScoreArguments:
    """Checked arguments, as the launch functions take them."""

    row: str
    device: torch.device
    tensors: tuple[Tensor, ...]  # queries, query scales, weights, limits
    keys: tuple[Tensor, ...]  # keys, key scales, table, starts
    page_shift: int
    columns: int


def scores(
    query: QueryRows,
    limits: Tensor,
    keys: Keys,
    plan: ScorePlan,
    columns: int,
    out: Tensor | None = None,
    *,
    overlap: bool = True,
) -> Tensor:
    """Score every query row against the keys that it sees, and nothing per head in memory.

    Parameters
    ----------
    query
        Stored queries and weights, of :func:`~needlepoint.optimized.cuda.query.store_queries`.
    limits
        int32 ``[rows]``: keys ``[0, limit)`` of its request are seen by a row. On the CPU they are
        checked and copied; on the device they are taken as they are, cut to ``[0, columns]``.
    keys
        :class:`KeyPages` or :class:`KeyRows`, in the format of the queries.
    plan
        From :func:`~needlepoint.optimized.cuda.score_plan.plan_scores`, on the device.
    columns
        Columns of the output, at least the largest limit.
    out
        fp32 ``[rows, columns]``, rows may be strided; None to allocate.
    overlap
        Whether the launches may overlap with their neighbours in the stream.

    Returns
    -------
    Tensor
        fp32 ``[rows, columns]``; columns at or past a row's limit are -inf.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it.
    RuntimeError
        If CUDA refuses a launch; the message names the kernel.
    """
    given = require_scores(query, limits, keys, plan, columns)
    if out is None:
        out = allocate_scores(plan.rows, columns, given.device)
    require_tensor("out", out, (plan.rows, columns), (torch.float32,), align=4, rows_strided=True)
    require_same_device(weights=query.weights, out=out)
    launch_scores(given, plan, out, overlap=overlap)
    return out


def allocate_scores(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return unwritten scores whose rows start at multiples of 16 bytes."""
    padded = -(-max(columns, 1) // _ALIGN) * _ALIGN
    return torch.empty((rows, padded), dtype=torch.float32, device=device)[:, :columns]


def launch_scores(
    given: ScoreArguments, plan: ScorePlan, out: Tensor, *, overlap: bool = True
) -> None:
    """Launch on arguments that :func:`require_scores` has accepted."""
    with torch.cuda.device(given.device):
        count = torch.cuda.get_device_properties(given.device).multi_processor_count
        for tile, groups in plan.groups.items():
            if not groups.shape[0]:
                continue
            span = keys_of_a_block(given.columns, groups.shape[0], tile, count)
            launch = kernel(score_name(plan.heads, given.row, plan.unit, tile), given.device)
            sizes = (given.page_shift, given.columns, span)
            launch(*given.tensors, groups, *given.keys, *sizes, out, overlap)


def require_scores(
    query: QueryRows, limits: Tensor, keys: Keys, plan: ScorePlan, columns: int
) -> ScoreArguments:
    """Check the arguments of :func:`scores` and return them as a launch takes them."""
    row = keys.row
    score_name(plan.heads, row, plan.unit, next(iter(plan.groups)))
    if query.format != row:
        raise ValueError(f"query: {query.format} rows, expected {row} like the keys")
    if not 0 <= columns < 2**31:
        raise ValueError(f"columns {columns}: expected 0 to 2**31 - 1")
    shape = (plan.rows, plan.heads)
    codes = _as_bytes("query.codes", query.codes)
    require_tensor("query.codes", codes, (*shape, CODE_BYTES[row]), (torch.uint8,))
    require_tensor("query.weights", query.weights, shape, (torch.float32,), align=4)
    query_scales = codes.new_empty(0)
    if row == "fp4":
        if query.scales is None:
            raise ValueError("query.scales: None, expected a UE8M0 byte for each 32 dims")
        require_tensor("query.scales", query.scales, (*shape, 4), (torch.uint8,), align=1)
        query_scales = query.scales
    if row == "fp8" and not query.scale_folded:
        raise ValueError("query: fp8 scales are not folded into the weights, expected them folded")
    require_tensor("limits", limits, (plan.rows,), (torch.int32,), align=4)
    key_tensors, shift = _require_keys(keys, plan, columns)
    names = ("keys", "keys.scales", "keys.table", "keys.starts")
    device = require_same_device(
        **{"query.codes": codes, "query.weights": query.weights, "query.scales": query_scales},
        **dict(zip(names, key_tensors, strict=True)),
        plan=plan.row_requests,
    )
    tensors = (codes, query_scales, query.weights, _device_limits(limits, columns, device))
    return ScoreArguments(row, device, tensors, key_tensors, shift, columns)


def _as_bytes(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}, expected contiguous rows")
    return tensor.view(torch.uint8)


def _device_limits(limits: Tensor, columns: int, device: torch.device) -> Tensor:
    if limits.device.type != "cpu":
        require_same_device(limits=limits, keys=torch.empty(0, device=device))
        return limits
    if limits.numel() and not 0 <= int(limits.min()) <= int(limits.max()) <= columns:
        row = int(((limits < 0) | (limits > columns)).nonzero()[0])
        raise ValueError(
            f"limits: row {row} sees {int(limits[row])} keys, expected 0 to {columns}, the columns"
        )
    return limits.to(device)


def _require_keys(keys: Keys, plan: ScorePlan, columns: int) -> tuple[tuple[Tensor, ...], int]:
    """Return keys, scales, table and starts, and log2 of the rows of a page."""
    row = keys.row
    if isinstance(keys, KeyRows):
        byte_rows = _as_bytes("keys.values", keys.values)
        require_tensor("keys.values", byte_rows, (None, CODE_BYTES[row]), (torch.uint8,))
        require_tensor("keys.starts", keys.starts, (plan.requests,), (torch.int64,), align=8)
        scales = byte_rows.new_empty((0, 0))
        if row != "bf16":
            if keys.scales is None:
                raise ValueError(f"keys.scales: None, expected a scale for each {row} key")
            scales = keys.scales.reshape(-1, 1).view(torch.uint8) if row == "fp8" else keys.scales
            require_tensor("keys.scales", scales, (byte_rows.shape[0], 4), (torch.uint8,), align=4)
        table = torch.empty((0, 0), dtype=torch.int32, device=byte_rows.device)
        return (byte_rows, scales, table, keys.starts), 0
    size = keys.page_size
    if size < MIN_PAGE or size & (size - 1):
        raise ValueError(f"keys.page_size {size}: expected a power of two of at least {MIN_PAGE}")
    page_bytes = LAYOUTS[f"index-{row}"].page_bytes(size)
    require_tensor("keys.pages", keys.pages, (None, page_bytes), (torch.uint8,))
    if not keys.pages.shape[0]:
        raise ValueError("keys.pages: no pages, expected at least one")
    require_tensor("keys.table", keys.table, (plan.requests, None), (torch.int32,), align=4)
    if keys.table.shape[1] * size < columns:
        raise ValueError(
            f"keys.table: {keys.table.shape[1]} pages of {size} rows a request, expected at least "
            f"{-(-columns // size)} for {columns} columns"
        )
    starts = torch.empty(0, dtype=torch.int64, device=keys.pages.device)
    scales = keys.pages[:, size * CODE_BYTES[row] :]
    return (keys.pages, scales, keys.table, starts), size.bit_length() - 1
