"""Index scores on a CUDA device (S9): fused epilogue, paged or ragged keys, a context a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import ScoreArguments
from needlepoint.optimized.build.score_variants import score_name
from needlepoint.optimized.cuda.checks import require_same_device, require_tensor
from needlepoint.optimized.cuda.runtime import launch
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


class KeyArguments(TypedDict):
    """Keys as a launch takes them."""

    keys: Tensor
    key_scales: Tensor
    table: Tensor
    starts: Tensor
    page_shift: int


class ScoreInputs(KeyArguments):
    """What every launch over a batch is given, by the names of its arguments."""

    queries: Tensor
    query_scales: Tensor
    weights: Tensor
    context_lens: Tensor
    columns: int


@dataclass(frozen=True)
class CheckedScores:
    """Checked arguments of :func:`scores`."""

    row: str
    device: torch.device
    inputs: ScoreInputs


def scores(
    query: QueryRows,
    context_lens: Tensor,
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
    context_lens
        int32 ``[rows]``: keys ``[0, context_len)`` of its request are seen by a row. On the CPU
        they are checked and copied; on the device they are taken as they are, cut to
        ``[0, columns]``.
    keys
        :class:`KeyPages` or :class:`KeyRows`, in the format of the queries.
    plan
        From :func:`~needlepoint.optimized.cuda.score_plan.plan_scores`, on the device.
    columns
        Columns of the output, at least the longest context.
    out
        fp32 ``[rows, columns]``, rows may be strided; None to allocate.
    overlap
        Whether the launches may overlap with their neighbours in the stream.

    Returns
    -------
    Tensor
        fp32 ``[rows, columns]``; columns at or past a row's context are -inf.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it.
    RuntimeError
        If CUDA refuses a launch; the message names the kernel.
    """
    checked = require_scores(query, context_lens, keys, plan, columns)
    if out is None:
        out = allocate_scores(plan.rows, columns, checked.device)
    require_tensor("out", out, (plan.rows, columns), (torch.float32,), align=4, rows_strided=True)
    require_same_device(weights=query.weights, out=out)
    launch_scores(checked, plan, out, overlap=overlap)
    return out


def allocate_scores(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return unwritten scores whose rows start at multiples of 16 bytes."""
    padded = -(-max(columns, 1) // _ALIGN) * _ALIGN
    return torch.empty((rows, padded), dtype=torch.float32, device=device)[:, :columns]


def launch_scores(
    checked: CheckedScores, plan: ScorePlan, out: Tensor, *, overlap: bool = True
) -> None:
    """Launch on arguments that :func:`require_scores` has accepted."""
    count = torch.cuda.get_device_properties(checked.device).multi_processor_count
    for tile, groups in plan.groups.items():
        if not groups.shape[0]:
            continue
        span = keys_of_a_block(checked.inputs["columns"], groups.shape[0], tile, count)
        arguments = ScoreArguments(
            **checked.inputs, groups=groups, span=span, out=out, overlap=overlap
        )
        launch(score_name(plan.heads, checked.row, plan.unit, tile), arguments, checked.device)


def require_scores(
    query: QueryRows, context_lens: Tensor, keys: Keys, plan: ScorePlan, columns: int
) -> CheckedScores:
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
    require_tensor("context_lens", context_lens, (plan.rows,), (torch.int32,), align=4)
    held = _require_keys(keys, plan, columns)
    device = require_same_device(
        **{"query.codes": codes, "query.weights": query.weights, "query.scales": query_scales},
        **{"keys": held["keys"], "keys.scales": held["key_scales"]},
        **{"keys.table": held["table"], "keys.starts": held["starts"]},
        plan=plan.row_requests,
    )
    inputs = ScoreInputs(
        **held,
        queries=codes,
        query_scales=query_scales,
        weights=query.weights,
        context_lens=_on_device(context_lens, columns, device),
        columns=columns,
    )
    return CheckedScores(row, device, inputs)


def _as_bytes(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}, expected contiguous rows")
    return tensor.view(torch.uint8)


def _on_device(context_lens: Tensor, columns: int, device: torch.device) -> Tensor:
    """Return visible columns of each row on the device; those of the CPU are checked."""
    if context_lens.device.type != "cpu":
        require_same_device(context_lens=context_lens, keys=torch.empty(0, device=device))
        return context_lens
    outside = (context_lens < 0) | (context_lens > columns)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"context_lens: row {row} sees {int(context_lens[row])} keys, expected 0 to "
            f"{columns}, the columns"
        )
    return context_lens.to(device)


def _require_keys(keys: Keys, plan: ScorePlan, columns: int) -> KeyArguments:
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
        return KeyArguments(
            keys=byte_rows, key_scales=scales, table=table, starts=keys.starts, page_shift=0
        )
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
    return KeyArguments(
        keys=keys.pages,
        key_scales=scales,
        table=keys.table,
        starts=starts,
        page_shift=size.bit_length() - 1,
    )
