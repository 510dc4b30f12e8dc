"""Row errors of two sides that must be equal to the bit: one specification, one set of given bytes.

Nothing is left open between two recordings of one exact arithmetic, so a row either has the same
bytes or an infinite error.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.interface import PagedRows
from needlepoint.verify.compare import ulps_apart
from needlepoint.verify.pages import open_pool
from needlepoint.verify.row_errors import RowErrors, worst_of
from needlepoint.verify.stored_rows import read_stored


def equal_rows(found: Tensor, expected: Tensor) -> RowErrors:
    """Compare rows of numbers bit by bit.

    Parameters
    ----------
    found, expected
        ``[rows, ...]`` of one dtype.

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"rows {found.dtype} {tuple(found.shape)} against {expected.dtype} "
            f"{tuple(expected.shape)}; expected the same dtype and shape on both sides"
        )
    f, e = found.flatten(1), expected.flatten(1)
    changed = (_bytes(f) != _bytes(e)).reshape(len(f), f.shape[1], -1).any(2)
    return _rows(changed, f.to(torch.float64), e.to(torch.float64))


def equal_stored(found: PagedRows, expected: PagedRows, row_width: int) -> RowErrors:
    """Compare stored rows byte by byte, wherever their pages lie.

    Parameters
    ----------
    found, expected
        Pools of one layout; page tables and page sizes may differ.
    row_width
        Elements of a row.

    Raises
    ------
    ValueError
        If layouts or entries differ, or a pool cannot be read.
    """
    if found.layout != expected.layout or found.entries != expected.entries:
        raise ValueError(
            f"stored rows {found.layout} {list(found.entries)} against {expected.layout} "
            f"{list(expected.entries)}; expected one layout and the same entries"
        )
    own, meant = read_stored(found, row_width).values, read_stored(expected, row_width).values
    changed_row = (_row_bytes(found, row_width) != _row_bytes(expected, row_width)).any(1)
    # A changed byte that decodes to the same number (the sign of a zero) is still a changed row.
    changed = _bits(own) != _bits(meant)
    changed[:, 0] |= changed_row & ~changed.any(1)
    return _rows(changed, own, meant)


def unowned_change(found: PagedRows, expected: PagedRows, row_width: int) -> str | None:
    """Return what changed in bytes that no entry owns, or None.

    Pools that are laid out differently are not compared: their unowned bytes do not correspond.
    """
    same_tables = all(map(torch.equal, found.page_table, expected.page_table))
    if found.pool.shape != expected.pool.shape or not same_tables:
        return None
    width = row_width if found.layout == "rows-f64" else None
    pool = open_pool(found.pool, found.layout, found.page_size, row_width=width)
    owned = pool.owned_mask(found.page_table, found.entries)
    changed = (found.pool.numpy() != expected.pool.numpy()) & ~owned
    count = int(changed.sum())
    if not count:
        return None
    page, byte = (int(i) for i in np.argwhere(changed)[0])
    return f"{count} bytes that no entry owns differ, first byte {byte} of page {page}"


def _row_bytes(paged: PagedRows, row_width: int) -> Tensor:
    width = row_width if paged.layout == "rows-f64" else None
    pool = open_pool(paged.pool, paged.layout, paged.page_size, row_width=width)
    parts = [
        pool.raw_rows(table, count)
        for table, count in zip(paged.page_table, paged.entries, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


def _rows(changed: Tensor, found: Tensor, expected: Tensor) -> RowErrors:
    ratio = torch.where(changed, math.inf, 0.0).to(torch.float64)
    apart = ulps_apart(found, expected, drop=0)
    return worst_of(ratio, found, expected, torch.where(changed, apart.clamp(min=1), 0))


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int64)
