"""Writers of the five page layouts: rows of bytes into a pool, through a page table.

Entry ``e`` of a request is row ``e % page_size`` of page ``page_table[e // page_size]``. A page is
planar: the value bytes of all its rows, then their scale bytes, then padding. The pool starts
filled with 0xFF (NaN in every format that has one), so a reader that touches a byte nobody wrote
shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from needlepoint.optimized.emulation.narrow import U8, StoredRows
from needlepoint.optimized.emulation.specification import PAGE_TOKENS
from needlepoint.optimized.protocol.interface import PagedRows

UNWRITTEN = 0xFF
SPARE_PAGES = 3


@dataclass(frozen=True)
class PageLayout:
    """Bytes of one row and of one page.

    Attributes
    ----------
    name
        Layout name as it stands in :class:`~needlepoint.optimized.protocol.interface.PagedRows`.
    value_bytes, scale_bytes
        Bytes of one row in the first and second part of the page.
    alignment
        The page is padded to a multiple of this many bytes.
    """

    name: str
    value_bytes: int
    scale_bytes: int = 0
    alignment: int = 1

    def page_bytes(self, page_size: int) -> int:
        """Return the distance from one page to the next, in bytes."""
        used = page_size * (self.value_bytes + self.scale_bytes)
        return -(-used // self.alignment) * self.alignment


LAYOUTS: dict[str, PageLayout] = {
    layout.name: layout
    for layout in (
        PageLayout("index-fp8", value_bytes=128, scale_bytes=4),
        PageLayout("index-bf16", value_bytes=256),
        PageLayout("index-fp4", value_bytes=64, scale_bytes=4),
        PageLayout("main-584", value_bytes=576, scale_bytes=8, alignment=576),
        PageLayout("main-bf16", value_bytes=1024),
    )
}


def page_rows(ratio: int) -> int:
    """Return the rows of one page: a page covers 256 tokens, so 64 rows at ratio 4, 2 at 128.

    This is what serving engines do with a block of 256 tokens, and it is why 2-row pages exist.
    """
    return PAGE_TOKENS // ratio


def allocate(layout: str, page_size: int, entries: Sequence[int], seed: int) -> PagedRows:
    """Return an unwritten pool with a shuffled page table for every request.

    Parameters
    ----------
    layout
        Key of :data:`LAYOUTS`.
    page_size
        Rows a page.
    entries
        Rows of each request.
    seed
        Seed of the permutation of pages; three pages belong to nobody.
    """
    counts = [-(-n // page_size) for n in entries]
    pages = sum(counts) + SPARE_PAGES
    order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    tables = np.split(order, np.cumsum(counts))[:-1]
    pool = torch.full((pages, LAYOUTS[layout].page_bytes(page_size)), UNWRITTEN, dtype=torch.uint8)
    return PagedRows(
        layout=layout,
        pool=pool,
        page_size=page_size,
        page_table=tuple(torch.from_numpy(table.copy()) for table in tables),
        entries=tuple(entries),
    )


def write_rows(paged: PagedRows, request: int, first: int, rows: StoredRows) -> None:
    """Write consecutive entries of one request; no byte of another entry is touched.

    Parameters
    ----------
    paged
        Pool and page tables from :func:`allocate`; its pool is written in place.
    request
        Index of the request.
    first
        Entry of the first row.
    rows
        Bytes of entries ``first, first + 1, ..``.

    Raises
    ------
    ValueError
        If the rows do not have the layout's widths or reach past the request's entries.
    """
    layout = LAYOUTS[paged.layout]
    count = rows.values.shape[0]
    widths = (rows.values.shape[1], rows.scales.shape[1])
    if widths != (layout.value_bytes, layout.scale_bytes):
        raise ValueError(
            f"layout {layout.name}: rows of {widths[0]} value and {widths[1]} scale bytes, "
            f"expected {layout.value_bytes} and {layout.scale_bytes}"
        )
    if first < 0 or first + count > paged.entries[request]:
        raise ValueError(
            f"request {request}: entries {first} .. {first + count - 1} written, but it owns "
            f"{paged.entries[request]}"
        )
    entry = np.arange(first, first + count)
    page = paged.page_table[request].numpy()[entry // paged.page_size]
    slot = entry % paged.page_size
    values, scales = planes(paged)
    values[page, slot] = rows.values
    scales[page, slot] = rows.scales


def planes(paged: PagedRows) -> tuple[U8, U8]:
    """Return views of the pool: value bytes and scale bytes, each ``[pages, page_size, bytes]``."""
    layout, size = LAYOUTS[paged.layout], paged.page_size
    pool = paged.pool.numpy()
    split = size * layout.value_bytes
    end = split + size * layout.scale_bytes
    return (
        pool[:, :split].reshape(len(pool), size, layout.value_bytes),
        pool[:, split:end].reshape(len(pool), size, layout.scale_bytes),
    )
