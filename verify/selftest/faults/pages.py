"""Faults of pages: which token's bytes stand where, geometry, strides, addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, Observed, PagedRows
from needlepoint.verify.selftest.faults.fault import Case, Setting, fault
from needlepoint.verify.selftest.faults.ground import Ground, pool_of, with_pool
from needlepoint.verify.selftest.faults.plant import Planes, paged, place

_R128, _FP4, _BF16 = Setting(ratio=128), Setting("fp4"), Setting("bf16")
_INDEX, _MAIN = "index.stored", "main.stored"

Change = Callable[[Ground, PagedRows, Planes], None]


def _middle(ground: Ground, rows: PagedRows, by: int = 0) -> tuple[int, int]:
    return place(ground, rows, ground.entries // 3 + by)


def filled(value: int) -> Change:
    """Return a change that fills one row and its scale."""

    def change(ground: Ground, rows: PagedRows, planes: Planes) -> None:
        page, slot = _middle(ground, rows)
        for plane in planes:
            plane[page, slot] = value

    return change


def _garbage(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    page, slot = place(ground, rows, 0)
    noise = torch.Generator().manual_seed(5)
    width = planes[0].shape[2]
    planes[0][page, slot] = torch.randint(0, 120, (width,), generator=noise).to(torch.uint8)


def moved(*moves: tuple[int, int]) -> Change:
    """Return a change that copies rows near the middle of the longest request."""

    def change(ground: Ground, rows: PagedRows, planes: Planes) -> None:
        before = [plane.clone() for plane in planes]
        for source, target in moves:
            from_page, from_slot = _middle(ground, rows, source)
            page, slot = _middle(ground, rows, target)
            for plane, old in zip(planes, before, strict=True):
                plane[page, slot] = old[from_page, from_slot]

    return change


def _last_stale(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Leave in the last row what the row before it holds."""
    page, slot = place(ground, rows, ground.entries - 1)
    other, there = place(ground, rows, ground.entries - 2)
    for plane in planes:
        plane[page, slot] = plane[other, there]


def _without_tail(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Leave a last page that is not full unwritten."""
    size = rows.page_size
    for table, count in zip(rows.page_table, rows.entries, strict=True):
        if count % size and count > size:
            for plane in planes:
                plane[int(table[count // size])] = 0xFF


def _over_page_table(swap: Callable[[list[int]], list[int]]) -> Change:
    """Return a change that moves whole pages of the longest request."""

    def change(ground: Ground, rows: PagedRows, planes: Planes) -> None:
        used = -(-rows.entries[ground.longest] // rows.page_size)
        pages = rows.page_table[ground.longest][:used].tolist()
        for plane in planes:
            plane[pages] = plane[swap(pages)]

    return change


def _wrapped_offsets(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Take page numbers modulo a few, as a product that no longer fits 32 bits does."""
    for plane in planes:
        plane[3:] = plane[torch.arange(3, len(plane)) % 3]


def _zero_pages(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Read zeros from the last page of the pool that a request owns."""
    owned = {int(page) for table in rows.page_table for page in table}
    planes[0][max(owned)] = 0


def _in_tiles(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Write rows flat that are read in tiles of 16 rows by 16 bytes."""
    values = planes[0]
    pages, size, width = values.shape
    tiled = values.reshape(pages, size // 16, 16, width // 16, 16).transpose(2, 3)
    values.copy_(tiled.reshape(values.shape))


def _first_of_page(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Take row 0 of a page for all of its rows, as a kernel made for one-row pages does."""
    for plane in planes:
        plane.copy_(plane[:, :1].expand_as(plane).clone())


def _bit(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    page, slot = _middle(ground, rows)
    planes[0][page, slot, 64] ^= 0x80


def _odd_scales_swapped(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Write scales in plain order that are read interleaved: pairs of rows exchange theirs."""
    scales = planes[1].clone()
    planes[1][:, 0::2], planes[1][:, 1::2] = scales[:, 1::2], scales[:, 0::2]


def _swapped_requests(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    """Write the first row of two requests into each other's place."""
    one, other = (int(table[0]) for table in rows.page_table[:2])
    for plane in planes:
        plane[[one, other], 0] = plane[[other, one], 0].clone()


def _rows_reversed(ground: Ground, rows: PagedRows, planes: Planes) -> None:
    for plane in planes:
        plane.copy_(plane.flip(1))


def bytes_of(
    change: Callable[[Ground, PagedRows, Tensor], Tensor], path: str = INDEX
) -> Callable[[Ground], Observed]:
    """Plant by rewriting whole pages, ``[pages, bytes]``."""
    return lambda ground: with_pool(
        ground, path, change(ground, ground.observed.stored[path], pool_of(ground, path))
    )


def interleaved(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write each row's scale behind its values instead of all scales behind all values."""
    size = rows.page_size
    values = pool[:, : size * 128].reshape(-1, size, 128)
    scales = pool[:, size * 128 :].reshape(-1, size, 4)
    return torch.cat((values, scales), dim=2).flatten(1)


def _halved(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write two pages of 32 rows where one of 64 is read."""
    cut = rows.page_size * 128
    parts = zip(pool[:, :cut].chunk(2, 1), pool[:, cut:].chunk(2, 1), strict=True)
    return torch.cat([torch.cat(part, dim=1) for part in parts], dim=1)


def _wide_rows(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write fp4 rows at the 132-byte distance of fp8 rows: what is beyond the page is lost."""
    wide = torch.full_like(pool, 0xFF)
    for slot in range(pool.shape[1] // 132):
        wide[:, 132 * slot : 132 * slot + 64] = pool[:, 64 * slot : 64 * slot + 64]
    return wide


def _unpadded(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Step from page to page by the bytes that rows use, without the padding behind them."""
    used = rows.page_size * 584
    flat = torch.full((pool.numel(),), 0xFF, dtype=torch.uint8)
    flat[: len(pool) * used] = pool[:, :used].flatten()
    return flat.view_as(pool)


def _padded_stride(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Step from page to page by 64 bytes too many."""
    flat = pool.flatten()
    starts = torch.arange(len(pool)) * (pool.shape[1] + 64)
    at = (starts[:, None] + torch.arange(pool.shape[1])).clamp(max=len(flat) - 1)
    return flat[at]


def _outside(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write a padding row into a page that belongs to nobody."""
    owned = {int(page) for table in rows.page_table for page in table}
    spare = min(set(range(len(pool))) - owned)
    pool[spare, :128] = 0
    return pool


def _behind_the_rows(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write into the padding between two pages."""
    pool[:, -1] = 0
    return pool


def _next_slot(ground: Ground, rows: PagedRows, pool: Tensor) -> Tensor:
    """Write one row more than a request has."""
    page, slot = place(ground, rows, ground.entries - 1)
    following = slot + 1
    if following < rows.page_size:
        pool[page, following * 256 : following * 256 + 256] = 0
    return pool


FAULTS: tuple[Case, ...] = (
    fault("token-dropped", "D", "one key row of zeros", paged(filled(0)), _INDEX, log="N01 K06"),
    fault("token-never-written", "C", "one key row keeps what the memory held", paged(filled(0xFF)),
          _INDEX, log="C04 B08 C11"),
    fault("token-of-garbage", "D", "one key row of noise", paged(_garbage), _INDEX, log="K13"),
    fault("token-stale", "K", "one key row is that of the token before", paged(moved((0, 1))),
          _INDEX),
    fault("last-token-stale", "M", "the newest key row not updated", paged(_last_stale), _INDEX,
          log="M04 M05"),
    fault("tokens-swapped", "D", "two neighbouring key rows exchanged",
          paged(moved((0, 1), (1, 0))), _INDEX, log="K12"),
    fault("code-of-the-wrong-sign", "D", "one bit of one key", paged(_bit), _INDEX, log="K13"),
    fault("restored-without-keys", "K",
          "main rows come back from the host, key rows of one page do not",
          paged(filled(0), follow=False), _INDEX, log="K09"),
    fault("main-token-dropped", "K", "one main row of zeros", paged(filled(0), MAIN), _MAIN,
          log="K02 D09"),
    fault("page-interleaved", "D", "each scale behind its row", bytes_of(interleaved), _INDEX,
          log="D01 D02 D03"),
    fault("pages-of-32-rows", "D", "two pages of 32 rows in one of 64", bytes_of(_halved), _INDEX,
          log="D10"),
    fault("rows-in-tiles", "D", "rows flat where tiles are read", paged(_in_tiles), _INDEX,
          log="D04"),
    fault("one-row-pages", "D", "row 0 of a page for all its rows", paged(_first_of_page), _INDEX,
          log="D05"),
    fault("tail-of-the-last-page", "D", "a last page that is not full stays unwritten",
          paged(_without_tail), _INDEX, log="C07 N07", needs=66),
    fault("pages-in-the-other-order", "D", "the pages of a request reversed",
          paged(_over_page_table(lambda pages: pages[::-1])), _INDEX, log="D08 B09 Q06", needs=66),
    fault("page-number-wraps", "E", "page numbers wrap around", paged(_wrapped_offsets), _INDEX,
          log="E01 E03 E04 E05"),
    fault("page-of-zeros", "E", "the page with the highest number reads zero", paged(_zero_pages),
          _INDEX, log="E02 E06 E07"),
    fault("pages-of-two-rows", "D", "the two rows of each page exchanged, windows of 128",
          paged(_rows_reversed, MAIN), _MAIN, log="D10", on=_R128, needs=2),
    fault("rows-of-two-requests-swapped", "L",
          "the first rows of two requests in each other's place", paged(_swapped_requests), _INDEX,
          log="K06 L01 L07", requests=2),
    fault("scales-in-another-order", "D", "scale bytes interleaved within a page",
          paged(_odd_scales_swapped), _INDEX, log="D11", on=_FP4),
    fault("fp4-rows-of-132-bytes", "D", "fp4 rows at the distance of fp8 rows",
          bytes_of(_wide_rows), _INDEX, log="D14", on=_FP4),
    fault("page-padding-forgotten", "D", "pages stepped by what rows use",
          bytes_of(_unpadded, MAIN), _MAIN, log="D13 D15"),
    fault("page-stride-too-long", "D", "pages stepped by 64 bytes too many",
          bytes_of(_padded_stride), _INDEX, log="D13"),
    fault("write-into-a-foreign-page", "C", "a padding row written where nobody owns the page",
          bytes_of(_outside), "unowned", log="C05 D09"),
    fault("write-between-pages", "D", "the padding behind the rows of a page written",
          bytes_of(_behind_the_rows, MAIN), "unowned", log="D15"),
    fault("write-one-row-too-many", "B", "the slot behind a request's last row written",
          bytes_of(_next_slot), "unowned", log="D09 C05 M06", on=_BF16),
)  # fmt: skip
