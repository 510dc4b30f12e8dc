"""Stored rows of a dump: pages, page tables, and picks that name slots of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows
from needlepoint.verify.diff.files import DumpError
from needlepoint.verify.diff.mapping import Pages
from needlepoint.verify.layout.geometry import geometry


def checked_table(table: Tensor, path: str, base: LayerInputs) -> Tensor:
    """Return a page table as int64 ``[requests, pages]``.

    Raises
    ------
    DumpError
        Where it is not integers of that shape.
    """
    if table.dtype.is_floating_point or table.dim() != 2:
        raise DumpError(
            f"{path} page table: {table.dtype} {list(table.shape)}, expected integers "
            "[requests, pages]"
        )
    if len(table) < len(base.lengths):
        raise DumpError(f"{path} page table: {len(table)} rows for {len(base.lengths)} requests")
    return table.to(torch.int64)


def paged_rows(
    pool: Tensor, table: Tensor, pages: Pages, path: str, base: LayerInputs
) -> PagedRows:
    """Return a pool of pages with one page table a request.

    Parameters
    ----------
    pool
        Pages along the first axis, of any dtype and shape behind it.
    table
        int64 ``[requests, pages]``.
    pages
        Layout and rows a page.
    path
        ``index`` or ``main``, for messages.
    base
        The layer: lengths and ratio.

    Raises
    ------
    DumpError
        Where a page has another number of bytes than its layout, or the table is too short.
    """
    if pool.dim() < 2:
        raise DumpError(f"{path} pages: shape {list(pool.shape)}, expected [pages, ...]")
    flat = pool.reshape(len(pool), -1).contiguous().view(torch.uint8)
    wanted = geometry(pages.layout, pages.page_size).page_stride
    if flat.shape[1] != wanted:
        raise DumpError(
            f"{path} pages: {flat.shape[1]} bytes a page, expected {wanted} for layout "
            f"{pages.layout} with {pages.page_size} rows a page"
        )
    counts = tuple(length // base.ratio for length in base.lengths)
    needed = [-(-count // pages.page_size) for count in counts]
    if max(needed) > table.shape[1]:
        raise DumpError(
            f"{path} page table: {table.shape[1]} pages a request, expected {max(needed)}"
        )
    for request, pages_used in enumerate(needed):
        ids = table[request, :pages_used]
        strange = ids[(ids < 0) | (ids >= len(flat))]
        if len(strange):  # before the narrower type, in which a large id is another page
            raise DumpError(
                f"{path} page table: request {request} has page {int(strange[0])}, expected one of "
                f"the {len(flat)} pages"
            )
    tables = tuple(table[r, :n].to(torch.int32) for r, n in enumerate(needed))
    return PagedRows(pages.layout, flat, pages.page_size, tables, counts)


def entries_of(
    slots: Tensor, table: Tensor, size: int, lengths: tuple[int, ...], ratio: int
) -> Tensor:
    """Turn page slots into entries of each token's request.

    A slot of another request, or of nobody, becomes an entry that does not exist, so that it is
    judged as invalid.

    Parameters
    ----------
    slots
        int64 ``[tokens, k]``: page times page size plus row; negative slots are empty.
    table
        int64 ``[requests, pages]``.
    size
        Rows a page.
    lengths, ratio
        Of the layer.
    """
    out = torch.full(slots.shape, -1, dtype=torch.int32)
    first = 0
    for request, length in enumerate(lengths):
        entries = length // ratio
        pages = -(-entries // size)
        block = slots[first : first + length]
        order = table[request, :pages].sort()
        page = block.div(size, rounding_mode="floor")
        place = torch.searchsorted(order.values, page).clamp(max=max(pages - 1, 0))
        if pages:
            own = order.values[place] == page
            entry = order.indices[place] * size + block % size
        else:
            own, entry = torch.zeros_like(block, dtype=torch.bool), block
        found = torch.where(own, entry, entries)
        out[first : first + length] = torch.where(block < 0, -1, found).to(torch.int32)
        first += length
    return out
