"""Row errors of two sides that must be equal to the bit: one specification, one set of given bytes.

Nothing is left open between two recordings of one exact arithmetic, so a row either has the same
bytes or an infinite error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import PagedRows
from needlepoint.verify.judge.results.stages import zero_errors
from needlepoint.verify.layout.pages import Pool, open_pool
from needlepoint.verify.layout.stored_rows import read_stored
from needlepoint.verify.numerics.row_errors import RowErrors, row_blocks, worst_of


@dataclass(frozen=True)
class UnownedChange:
    """Bytes of a pool that no entry owns and that differ.

    Attributes
    ----------
    count
        How many.
    page, byte
        The first of them.
    found, expected
        Its value on either side.
    request, entry
        Whose slot it lies in; an entry past the request's last where the slot is not filled yet.
        None outside of every slot and in pages that no request maps.
    """

    count: int
    page: int
    byte: int
    found: int
    expected: int
    request: int | None
    entry: int | None


def equal_rows(found: Tensor, expected: Tensor, what: str) -> RowErrors:
    """Compare rows of numbers bit by bit.

    Parameters
    ----------
    found, expected
        ``[rows, ...]`` of one dtype.
    what
        What to call them in errors.

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"{what}: {found.dtype} {tuple(found.shape)} against {expected.dtype} "
            f"{tuple(expected.shape)}; expected the same dtype and shape on both sides"
        )
    f, e = found.flatten(1), expected.flatten(1)
    rows = (~same_bytes(f, e)).nonzero()[:, 0]
    if not len(rows):
        return _equal(f)
    here, there = f[rows], e[rows]
    changed = (_bytes(here) != _bytes(there)).reshape(len(rows), f.shape[1], -1).any(2)
    return _changed_rows(_equal(f), rows, changed, here, there)


def same_bytes(found: Tensor, expected: Tensor) -> Tensor:
    """Return which rows have the same bytes, bool ``[rows]``; NaN is equal to itself.

    Parameters
    ----------
    found, expected
        ``[rows, n]``; rows of another dtype are never the same.
    """
    if found.dtype != expected.dtype:
        return torch.zeros(len(found), dtype=torch.bool)
    same = torch.empty(len(found), dtype=torch.bool)
    for rows in row_blocks(len(found), found.shape[1]):
        same[rows] = (_bytes(found[rows]) == _bytes(expected[rows])).all(1)
    return same


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
    rows = (_row_bytes(found, row_width) != _row_bytes(expected, row_width)).any(1).nonzero()[:, 0]
    if not len(rows):
        return _equal(own)
    here, there = own[rows], meant[rows]
    # A changed byte that decodes to the same number (another NaN) is still a changed row.
    changed = here.view(torch.int64) != there.view(torch.int64)
    changed[:, 0] |= ~changed.any(1)
    return _changed_rows(_equal(own), rows, changed, here, there)


def unowned_change(found: PagedRows, expected: PagedRows, row_width: int) -> UnownedChange | None:
    """Return what changed in bytes that no entry owns, or None.

    Pools that are laid out differently are not compared: their unowned bytes do not correspond.
    """
    same_tables = all(map(torch.equal, found.page_table, expected.page_table))
    if found.pool.shape != expected.pool.shape or not same_tables:
        return None
    pool = _open(found, row_width)
    owned = pool.owned_mask(found.page_table, found.entries)
    changed = (found.pool.numpy() != expected.pool.numpy()) & ~owned
    count = int(changed.sum())
    if not count:
        return None
    page, byte = (int(i) for i in np.argwhere(changed)[0])
    request, entry = _slot_owner(found, pool, page, byte)
    return UnownedChange(
        count=count,
        page=page,
        byte=byte,
        found=int(found.pool[page, byte]),
        expected=int(expected.pool[page, byte]),
        request=request,
        entry=entry,
    )


def _slot_owner(
    paged: PagedRows, pool: Pool, page: int, byte: int
) -> tuple[int, int] | tuple[None, None]:
    """Return request and entry of the slot that a byte lies in, filled or not."""
    size = paged.page_size
    slots = [
        (byte - start) // plane.row_bytes
        for start, plane in pool.geometry.planes
        if 0 <= byte - start < size * plane.row_bytes
    ]
    for request, table in enumerate(paged.page_table):
        used = table[: -(-paged.entries[request] // size)]
        for place in (used == page).nonzero().flatten().tolist():
            if slots:
                return request, place * size + slots[0]
    return None, None


def _row_bytes(paged: PagedRows, row_width: int) -> Tensor:
    pool = _open(paged, row_width)
    parts = [
        pool.raw_rows(table, count)
        for table, count in zip(paged.page_table, paged.entries, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


def _open(paged: PagedRows, row_width: int) -> Pool:
    width = row_width if paged.layout == "rows-f64" else None
    return open_pool(paged.pool, paged.layout, paged.page_size, row_width=width)


def _equal(rows: Tensor) -> RowErrors:
    """Return the errors of rows that are equal on both sides; their first number stands for both.

    The norm of the reference is left at 0: nothing is relative to it where nothing differs.
    """
    first = rows[:, 0].to(torch.float64)
    return replace(zero_errors(len(rows)), expected=first, found=first)


def _changed_rows(
    base: RowErrors, rows: Tensor, changed: Tensor, found: Tensor, expected: Tensor
) -> RowErrors:
    """Return ``base`` with the errors of some rows; their distance is the elements that changed."""
    f, e = found.to(torch.float64), expected.to(torch.float64)
    infinite = torch.where(changed, math.inf, 0.0).to(torch.float64)
    worst = worst_of(infinite, f, e, changed.sum(1, keepdim=True))
    return RowErrors(
        **{
            part.name: getattr(base, part.name).index_copy(0, rows, getattr(worst, part.name))
            for part in fields(RowErrors)
        }
    )


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
