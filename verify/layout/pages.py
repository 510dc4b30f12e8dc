"""Pools of pages: reading rows through a page table, and who owns each byte.

A pool must be opened with its geometry (``geometry.py``): page size, bytes
a page and dtype have to agree, and nothing is reshaped to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from needlepoint.verify.layout.decode import Bytes, DecodedRows, decode_fields
from needlepoint.verify.layout.geometry import (
    LAYOUTS,
    ROWS_F64,
    PoolGeometry,
    geometry,
    page_size_of,
)

__all__ = [
    "LAYOUTS",
    "ROWS_F64",
    "DecodedRows",
    "PageTable",
    "Pool",
    "PoolGeometry",
    "geometry",
    "open_pool",
]

PageTable = torch.Tensor | NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True)
class Pool:
    """An opened pool: bytes ``[pages, page_stride]`` and their geometry. Use :func:`open_pool`."""

    data: Bytes
    geometry: PoolGeometry

    def read(self, page_table: PageTable, entries: int) -> DecodedRows:
        """Decode the rows of one request.

        Parameters
        ----------
        page_table
            Integer ``[>= ceil(entries / page_size)]``; entry ``e`` lives in page
            ``page_table[e // page_size]`` at slot ``e % page_size``. Ids past the last needed page
            are not looked at.
        entries
            Rows to read.

        Raises
        ------
        ValueError
            If the table is too short, holds a page id below 0 or past the pool, or maps one page
            twice.
        """
        pages = self._pages(page_table, entries, "page table")
        block = self.data[pages]
        size = self.geometry.page_size
        fields: dict[str, Bytes] = {}
        for offset, plane in self.geometry.planes:
            rows = block[:, offset : offset + size * plane.row_bytes]
            rows = rows.reshape(len(pages) * size, plane.row_bytes)[:entries]
            start = 0
            for name, width in plane.fields:
                fields[name] = rows[:, start : start + width]
                start += width
        return decode_fields(self.geometry.layout, fields)

    def raw_rows(self, page_table: PageTable, entries: int) -> Bytes:
        """Return the bytes that the rows of one request own: uint8 ``[entries, bytes]``.

        Fields follow one another plane by plane; row padding is left out.

        Raises
        ------
        ValueError
            As :meth:`read`.
        """
        pages = self._pages(page_table, entries, "page table")
        block = self.data[pages]
        size = self.geometry.page_size
        parts = []
        for offset, plane in self.geometry.planes:
            rows = block[:, offset : offset + size * plane.row_bytes]
            rows = rows.reshape(len(pages) * size, plane.row_bytes)[:entries]
            parts.append(rows[:, : sum(width for _, width in plane.fields)])
        return np.concatenate(parts, axis=1)

    def read_requests(
        self, page_tables: Sequence[PageTable], entries: Sequence[int]
    ) -> list[DecodedRows]:
        """Decode the rows of every request, as :meth:`read`.

        Raises
        ------
        ValueError
            As :meth:`read`, also if tables and requests differ in number or two requests map one
            page: one of them would read rows of the other.
        """
        self._requests(page_tables, entries)
        return [self.read(table, n) for table, n in zip(page_tables, entries, strict=True)]

    def owned_mask(
        self, page_tables: Sequence[PageTable], entries: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Return which bytes belong to an entry: bool ``[pages, page_stride]``.

        Row padding, page padding, unfilled slots and unmapped pages are unowned.

        Raises
        ------
        ValueError
            As :meth:`read`, also if two requests map one page.
        """
        size = self.geometry.page_size
        filled = np.zeros((self.data.shape[0], size), dtype=bool)
        for pages, count in self._requests(page_tables, entries):
            slots = np.zeros(len(pages) * size, dtype=bool)
            slots[:count] = True
            filled[pages] = slots.reshape(len(pages), size)
        mask = np.zeros(self.data.shape, dtype=bool)
        for offset, plane in self.geometry.planes:
            used = np.arange(plane.row_bytes) < sum(width for _, width in plane.fields)
            rows = filled[:, :, None] & used
            mask[:, offset : offset + size * plane.row_bytes] = rows.reshape(len(filled), -1)
        return mask

    def _requests(
        self, page_tables: Sequence[PageTable], entries: Sequence[int]
    ) -> list[tuple[NDArray[np.int64], int]]:
        if len(page_tables) != len(entries):
            raise ValueError(
                f"{len(page_tables)} page tables for {len(entries)} requests; expected one each"
            )
        found = [
            (self._pages(table, count, f"page table of request {request}"), count)
            for request, (table, count) in enumerate(zip(page_tables, entries, strict=True))
        ]
        holder: dict[int, int] = {}
        for request, (pages, _) in enumerate(found):
            for page in pages.tolist():
                if page in holder:
                    raise ValueError(
                        f"page {page} is mapped by request {holder[page]} and request {request}; "
                        "expected every page to belong to one request"
                    )
                holder[page] = request
        return found

    def _pages(self, page_table: PageTable, entries: int, what: str) -> NDArray[np.int64]:
        table = np.asarray(
            page_table.cpu().numpy() if isinstance(page_table, torch.Tensor) else page_table
        )
        if table.size == 0:
            table = table.astype(np.int64)
        if table.ndim != 1 or table.dtype.kind not in "iu":
            raise ValueError(
                f"{what}: {table.dtype} of shape {table.shape}, expected a list of integer page ids"
            )
        if entries < 0:
            raise ValueError(f"{what}: {entries} entries, expected 0 or more")
        size, n_pages = self.geometry.page_size, self.data.shape[0]
        needed = -(-entries // size)
        if len(table) < needed:
            raise ValueError(
                f"{what}: {len(table)} pages for {entries} entries, expected at least {needed} at "
                f"{size} rows a page"
            )
        pages: NDArray[np.int64] = table[:needed].astype(np.int64)
        for index, page in enumerate(pages.tolist()):
            if not 0 <= page < n_pages:
                raise ValueError(
                    f"{what}: page id {page} at position {index}, expected 0 .. {n_pages - 1}: "
                    f"the pool has {n_pages} pages"
                )
        ids, first = np.unique(pages, return_index=True)
        if len(ids) < needed:
            again = next(i for i in range(needed) if i not in first)
            raise ValueError(
                f"{what}: page id {int(pages[again])} at position {again} is mapped twice; "
                "expected every page once"
            )
        return pages


def open_pool(
    pool: torch.Tensor | NDArray[np.uint8],
    layout: str,
    page_size: int,
    *,
    row_width: int | None = None,
    page_stride: int | None = None,
) -> Pool:
    """Open a pool of pages.

    Parameters
    ----------
    pool
        uint8 ``[pages, page_stride]``, torch or NumPy; may be a strided view. Read, never written.
    layout, page_size, row_width, page_stride
        As :func:`geometry`.

    Raises
    ------
    ValueError
        If dtype, rank or bytes a page are not those of the geometry, or as :func:`geometry`.
    """
    wanted = geometry(layout, page_size, row_width=row_width, page_stride=page_stride)
    if str(pool.dtype).removeprefix("torch.") != "uint8":
        raise ValueError(
            f"{layout} pool: dtype {pool.dtype}, expected uint8; pass the bytes, "
            "pool.view(torch.uint8)"
        )
    shape = tuple(pool.shape)
    if len(shape) != 2:
        raise ValueError(
            f"{layout} pool: shape {shape}, expected [pages, {wanted.page_stride}]; values and "
            "scales of a page are planes, so per-row axes have no meaning: flatten each page"
        )
    if shape[1] != wanted.page_stride:
        fits = page_size_of(layout, shape[1], row_width)
        came = f"{shape[1]} bytes" + (f" (page size {fits})" if fits else "")
        raise ValueError(
            f"{layout} pool: pages of {came}, expected "
            f"{wanted.page_stride} bytes for page size {page_size} (rows of "
            f"{wanted.row_bytes} bytes); open it with its own page size, layout or page_stride"
        )
    data = pool.detach().cpu().numpy() if isinstance(pool, torch.Tensor) else pool
    return Pool(data, wanted)
