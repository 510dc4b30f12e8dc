"""Exact, deterministic top-k on a CUDA device, and scores that go into it without a matrix.

The picks of a row are the k largest of its first ``context_len`` scores, equal scores to the lower
column, in ascending order, then -1. A row that sees at most k columns picks them all, whatever they
hold. -0 equals +0, -inf is a number like others, NaN counts as larger than every number and NaNs as
equal. Columns at or past it are never read. A context below 0 is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import TopkArguments
from needlepoint.optimized.build.score_variants import (
    TOPK_LIMITS,
    topk_name,
)
from needlepoint.optimized.cuda.checks import require_same_device, require_tensor
from needlepoint.optimized.cuda.runtime import launch
from needlepoint.optimized.cuda.score_plan import ScorePlan, plan_scores
from needlepoint.optimized.cuda.scores import (
    Keys,
    allocate_scores,
    require_scores,
    scores,
)
from needlepoint.optimized.protocol.interface import QueryRows

MAX_COLUMNS = 2**20
BUDGET_BYTES = 2**30
"""Default budget of scores that wait for selection."""
_MAX_COLUMNS = {"rows": 65536, "few": 32768}  # longer rows overflow what a block gathers or reads
_ROUND = 8192  # columns that a block reads at once
_MANY_ROWS = 132  # fewer rows than this are given more than one small block each


@dataclass(frozen=True)
class PageTable:
    """How picks become slots of the paged pool.

    Attributes
    ----------
    table
        int32 ``[requests, pages of a request]``.
    page_size
        Rows a page, a power of two.
    row_requests
        int32 ``[rows]``, row of the table for each row of scores.
    """

    table: Tensor
    page_size: int
    row_requests: Tensor


def topk(
    values: Tensor,
    context_lens: Tensor,
    k: int,
    pages: PageTable | None = None,
    *,
    overlap: bool = True,
) -> Tensor:
    """Return the picks of every row.

    Parameters
    ----------
    values
        fp32 ``[rows, columns]``, at most 2**20 columns; rows start at multiples of 16 bytes and may
        be strided.
    context_lens
        int32 ``[rows]`` on the device, columns that count.
    k
        Picks a row, at most 2,048.
    pages
        Translates picks into slots of a paged pool; None keeps columns.
    overlap
        Whether the launch may overlap with its neighbours in the stream.

    Returns
    -------
    Tensor
        int32 ``[rows, k]``.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it.
    """
    require_topk(values, context_lens, k, pages)
    topk_indices = torch.empty((values.shape[0], k), dtype=torch.int32, device=values.device)
    launch_topk(values, context_lens, topk_indices, pages, overlap=overlap)
    return topk_indices


def require_topk(
    values: Tensor,
    context_lens: Tensor,
    k: int,
    pages: PageTable | None,
    columns: int | None = None,
) -> None:
    """Check the arguments of :func:`topk`; picks are below ``columns``, by default the values'."""
    require_tensor("values", values, (None, None), (torch.float32,), rows_strided=True)
    if values.shape[1] > MAX_COLUMNS:
        raise ValueError(f"values: {values.shape[1]} columns, expected at most {MAX_COLUMNS}")
    require_tensor("context_lens", context_lens, (values.shape[0],), (torch.int32,), align=4)
    reach = values.shape[1] if columns is None else columns
    translation = require_picks(k, pages, values.shape[0], reach)
    require_same_device(values=values, context_lens=context_lens, **translation)


def require_picks(k: int, pages: PageTable | None, rows: int, columns: int) -> dict[str, Tensor]:
    """Check what is picked of ``columns`` scores a row; return the page table's tensors by name."""
    if not 1 <= k <= TOPK_LIMITS["long"]:
        raise ValueError(f"k {k}: expected 1 to {TOPK_LIMITS['long']}")
    if pages is None:
        return {}
    size = pages.page_size
    if size < 1 or size & (size - 1):
        raise ValueError(f"pages.page_size {size}: expected a power of two")
    require_tensor("pages.table", pages.table, (None, None), (torch.int32,), align=4)
    if pages.table.shape[1] * size < columns:
        raise ValueError(
            f"pages.table: {pages.table.shape[1]} pages of {size} rows a request, expected at "
            f"least {-(-columns // size)} for {columns} columns"
        )
    require_tensor("pages.row_requests", pages.row_requests, (rows,), (torch.int32,), align=4)
    return {"pages.table": pages.table, "pages.row_requests": pages.row_requests}


def topk_kind(rows: int, columns: int, k: int) -> str:
    """Return which kernel selects: a small block, a pair of them for few rows, or a large one."""
    kind = "rows" if rows >= _MANY_ROWS or columns <= _ROUND else "few"
    return kind if k <= TOPK_LIMITS[kind] and columns <= _MAX_COLUMNS[kind] else "long"


@dataclass(frozen=True)
class Lists:
    """Best scores of every span of columns, and the columns that they are of."""

    columns: Tensor
    span: int
    slots: int
    seen: int  # columns of the scores themselves


def launch_topk(
    values: Tensor,
    context_lens: Tensor,
    topk_indices: Tensor,
    pages: PageTable | None = None,
    lists: Lists | None = None,
    *,
    overlap: bool = True,
) -> None:
    """Launch on arguments that :func:`require_topk` has accepted."""
    none = torch.empty((0, 0), dtype=torch.int32, device=values.device)
    columns = values.shape[1] if lists is None else lists.seen
    arguments = TopkArguments(
        scores=values,
        context_lens=context_lens,
        list=none if lists is None else lists.columns,
        requests=none if pages is None else pages.row_requests,
        table=none if pages is None else pages.table,
        topk_indices=topk_indices,
        columns=columns,
        page_shift=0 if pages is None else pages.page_size.bit_length() - 1,
        span=0 if lists is None else lists.span,
        slots=0 if lists is None else lists.slots,
        overlap=overlap,
    )
    name = topk_name(topk_kind(topk_indices.shape[0], columns, topk_indices.shape[1]))
    launch(name, arguments, values.device)


def score_topk(
    query: QueryRows,
    context_lens: Tensor,
    keys: Keys,
    plan: ScorePlan,
    columns: int,
    k: int,
    pages: PageTable | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """Score and select; scores wait for selection in chunks of rows within a budget.

    Arguments are those of :func:`~needlepoint.optimized.cuda.scores.scores` and :func:`topk`; the
    picks are the same for every budget.

    Parameters
    ----------
    budget_bytes
        Bytes of scores at a time, at least one row's.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it.
    """
    require_scores(query, context_lens, keys, plan, columns)
    device = query.weights.device
    translation = require_picks(k, pages, plan.rows, columns)
    if translation:
        require_same_device(weights=query.weights, **translation)
    topk_indices = torch.empty((plan.rows, k), dtype=torch.int32, device=device)
    buffer: Tensor | None = None
    for first, stop, part in _chunks(plan, columns, budget_bytes):
        rows = slice(first, stop)
        seen = context_lens[rows]
        if buffer is None:
            buffer = allocate_scores(stop - first, columns, device)
        values = scores(query_slice(query, rows), seen, keys, part, columns, buffer[: stop - first])
        on_device = seen.to(device)
        translate = None
        if pages is not None:
            translate = PageTable(pages.table, pages.page_size, pages.row_requests[rows])
        require_topk(values, on_device, k, translate)
        launch_topk(values, on_device, topk_indices[rows], translate)
    return topk_indices


def query_slice(query: QueryRows, rows: slice) -> QueryRows:
    """Return some rows of stored queries, without a copy."""
    scales = None if query.scales is None else query.scales[rows]
    return QueryRows(
        query.format, query.codes[rows], scales, query.weights[rows], query.scale_folded
    )


def _chunks(plan: ScorePlan, columns: int, budget_bytes: int) -> list[tuple[int, int, ScorePlan]]:
    """Return first row, end and plan of each chunk of rows; the largest comes first."""
    most = budget_bytes // (4 * max(columns, 1) + 16)
    if most < 1:
        raise ValueError(
            f"budget of {budget_bytes} bytes: expected at least {4 * columns + 16}, one row of "
            f"{columns} scores"
        )
    if most >= plan.rows:
        return [(0, plan.rows, plan)] if plan.rows else []
    owners, device = plan.row_requests.cpu(), plan.row_requests.device
    out = []
    for first in range(0, plan.rows, most):
        stop = min(first + most, plan.rows)
        counts = torch.bincount(owners[first:stop], minlength=plan.requests).tolist()
        part = plan_scores(counts, plan.heads, plan.unit).to(device)
        out.append((first, stop, part))
    return out
