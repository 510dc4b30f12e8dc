"""Pools built byte by byte from the layout definitions, read back through shuffled page tables."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from needlepoint.verify.layout.pages import DecodedRows, open_pool

POISON = 0xFF  # NaN in E4M3, UE8M0, bf16, fp32 and fp64
LAYOUTS = ["index-fp8", "index-bf16", "index-fp4", "main-584", "main-bf16", "rows-f64"]
WIDTH = 5  # elements a row of rows-f64

E4M3 = [float(v) for v in np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)]
E2M1 = [float(v) for v in np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)]


def bf16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


@dataclass
class Book:
    """A pool under construction: poison, the bytes written, and what rows should decode to."""

    pages: NDArray[np.uint8]
    written: set[tuple[int, int]] = field(default_factory=set)
    values: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    scales: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    row: tuple[int, int] = (0, 0)

    def put(self, page: int, offset: int, raw: bytes) -> None:
        for at, byte in enumerate(raw, offset):
            assert (page, at) not in self.written
            self.pages[page, at] = byte
            self.written.add((page, at))


def page_bytes(layout: str, size: int) -> int:
    if layout == "main-584":
        return math.ceil(size * 584 / 576) * 576
    row = {"index-fp8": 132, "index-bf16": 256, "index-fp4": 68, "main-bf16": 1024}
    return size * row.get(layout, 8 * WIDTH)


def write_row(
    book: Book, layout: str, size: int, page: int, slot: int, rng: np.random.Generator
) -> None:
    """Write one random row at its place and note what it should decode to."""
    unique = len(book.values)  # no two rows share a scale
    if layout == "index-fp8":
        codes = rng.integers(0, 0x7F, 128) + 0x80 * rng.integers(0, 2, 128)
        scale = float(np.float32((1 + unique / 1024) * 2.0 ** -(unique % 7)))
        book.put(page, 128 * slot, bytes(codes.tolist()))
        book.put(page, 128 * size + 4 * slot, struct.pack("<f", scale))
        book.values[book.row] = [E4M3[c] * scale for c in codes]
        book.scales[book.row] = [scale]
    elif layout == "index-fp4":
        codes = rng.integers(0, 16, 128)
        scale_codes = [(unique + 40 * g) % 255 for g in range(4)]
        packed = [int(codes[2 * i] + 16 * codes[2 * i + 1]) for i in range(64)]
        book.put(page, 64 * slot, bytes(packed))
        book.put(page, 64 * size + 4 * slot, bytes(scale_codes))
        book.values[book.row] = [
            E2M1[c] * 2.0 ** (scale_codes[i // 32] - 127) for i, c in enumerate(codes)
        ]
        book.scales[book.row] = [float(c) for c in scale_codes]
    elif layout == "main-584":
        codes = rng.integers(0, 0x7F, 448) + 0x80 * rng.integers(0, 2, 448)
        rope = rng.integers(0, 0x7F80, 64) + 0x8000 * rng.integers(0, 2, 64)
        scale_codes = [(unique + 30 * g) % 255 for g in range(7)]
        book.put(page, 576 * slot, bytes(codes.tolist()))
        for i, bits in enumerate(rope.tolist()):
            book.put(page, 576 * slot + 448 + 2 * i, struct.pack("<H", bits))
        book.put(page, 576 * size + 8 * slot, bytes(scale_codes))
        book.values[book.row] = [
            E4M3[c] * 2.0 ** (scale_codes[i // 64] - 127) for i, c in enumerate(codes)
        ] + [bf16(bits) for bits in rope.tolist()]
        book.scales[book.row] = [float(c) for c in scale_codes]
    elif layout == "rows-f64":
        numbers = rng.standard_normal(WIDTH).tolist()
        book.put(page, 8 * WIDTH * slot, struct.pack(f"<{WIDTH}d", *numbers))
        book.values[book.row] = numbers
    else:
        dims = {"index-bf16": 128, "main-bf16": 512}[layout]
        words = rng.integers(0, 0x7F80, dims).tolist()
        book.put(page, 2 * dims * slot, struct.pack(f"<{dims}H", *words))
        book.values[book.row] = [bf16(bits) for bits in words]


def build(
    layout: str, size: int, entries: Sequence[int], seed: int, spare: int = 2
) -> tuple[Book, list[torch.Tensor]]:
    """Return a poisoned pool with the given entries a request, and shuffled page tables."""
    rng = np.random.default_rng(seed)
    needed = [math.ceil(n / size) for n in entries]
    order = rng.permutation(sum(needed) + spare)
    book = Book(np.full((len(order), page_bytes(layout, size)), POISON, dtype=np.uint8))
    tables, used = [], 0
    for request, (count, pages) in enumerate(zip(entries, needed, strict=True)):
        table = order[used : used + pages]
        used += pages
        tables.append(torch.tensor(table, dtype=torch.int32))
        for entry in range(count):
            book.row = (request, entry)
            write_row(book, layout, size, int(table[entry // size]), entry % size, rng)
    return book, tables


def assert_rows(rows: DecodedRows, book: Book, request: int, count: int) -> None:
    expected = [book.values[request, e] for e in range(count)]
    np.testing.assert_array_equal(rows.values, np.array(expected).reshape(count, -1))
    if rows.scales is not None:
        scales = [book.scales[request, e] for e in range(count)]
        np.testing.assert_array_equal(rows.scales, np.array(scales).reshape(count, -1))


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=8)
@given(
    size=st.integers(1, 9),
    entries=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_rows_and_ownership_of_hand_built_pools(
    layout: str, size: int, entries: list[int], seed: int
) -> None:
    book, tables = build(layout, size, entries, seed)
    width = WIDTH if layout == "rows-f64" else None
    pool = open_pool(torch.from_numpy(book.pages), layout, size, row_width=width)

    for request, (rows, count) in enumerate(
        zip(pool.read_requests(tables, entries), entries, strict=True)
    ):
        assert rows.values.shape[0] == rows.codes.shape[0] == count
        if count:
            assert_rows(rows, book, request, count)
    mask = pool.owned_mask(tables, entries)
    owned = {(int(p), int(o)) for p, o in np.argwhere(mask)}
    assert owned == book.written


def test_codes_are_handed_out_as_stored() -> None:
    for layout, dtype, n, scale_dtype, blocks in (
        ("index-fp8", np.uint8, 128, np.float32, 1),
        ("index-fp4", np.uint8, 128, np.uint8, 4),
        ("main-584", np.uint8, 448, np.uint8, 7),
        ("index-bf16", np.uint16, 128, None, 0),
        ("main-bf16", np.uint16, 512, None, 0),
        ("rows-f64", np.uint64, WIDTH, None, 0),
    ):
        book, tables = build(layout, 4, [6], seed=1)
        width = WIDTH if layout == "rows-f64" else None
        rows = open_pool(book.pages, layout, 4, row_width=width).read(tables[0], 6)
        assert (rows.codes.dtype, rows.codes.shape) == (np.dtype(dtype), (6, n))
        if scale_dtype is None:
            assert rows.scales is None
        else:
            assert rows.scales is not None
            assert (rows.scales.dtype, rows.scales.shape) == (np.dtype(scale_dtype), (6, blocks))
        assert (rows.rope_codes is not None) == (layout == "main-584")
    book, tables = build("main-584", 4, [6], seed=1)
    rows = open_pool(book.pages, "main-584", 4).read(tables[0], 6)
    assert rows.rope_codes is not None
    assert [[bf16(int(b)) for b in r] for r in rows.rope_codes] == rows.values[:, 448:].tolist()


def test_planar_page_read_row_by_row_is_different() -> None:
    """fault_log D01, D02: 64 rows of 132 bytes, 64 finite scales, and one right row of codes."""
    book, tables = build("index-fp8", 64, [64], seed=3, spare=0)
    rows = open_pool(book.pages, "index-fp8", 64).read(tables[0], 64)

    interleaved = book.pages[int(tables[0][0])].reshape(64, 132)
    codes, raw = interleaved[:, :128], np.ascontiguousarray(interleaved[:, 128:])
    scales = raw.view("<f4")
    assert rows.scales is not None
    assert np.flatnonzero((codes == rows.codes).all(axis=1)).tolist() == [0]
    assert np.flatnonzero((scales == rows.scales).all(axis=1)).tolist() == [63]
    assert np.isfinite(scales).all()  # so a check for NaN alone sees nothing
    assert_rows(rows, book, 0, 64)


def test_fixture_f2_five_shuffled_pages_and_a_partial_last_one() -> None:
    """Every byte that no entry owns is NaN; no NaN reaches a row."""
    for layout in ("index-fp8", "index-fp4", "main-584", "index-bf16"):
        book, tables = build(layout, 64, [4 * 64 + 37], seed=5, spare=1)
        assert len(tables[0]) == 5
        pool = open_pool(book.pages, layout, 64)
        rows = pool.read(tables[0], 4 * 64 + 37)
        assert np.isfinite(rows.values).all()
        assert_rows(rows, book, 0, 4 * 64 + 37)
        unowned = book.pages[~pool.owned_mask(tables, [4 * 64 + 37])]
        assert (unowned == POISON).all()
        past_the_end = pool.read(tables[0], 5 * 64).values[4 * 64 + 37 :]
        assert np.isnan(past_the_end).all()


def test_strided_pools_are_read_in_place() -> None:
    """Serving hands out views whose page stride spans all layers of a model."""
    book, tables = build("index-fp8", 4, [10], seed=6)
    n_pages, stride = book.pages.shape
    wide = torch.full((n_pages, 5 * stride), 0x55, dtype=torch.uint8)
    view = wide[:, 2 * stride : 3 * stride]
    view.copy_(torch.from_numpy(book.pages))

    rows = open_pool(view, "index-fp8", 4).read(tables[0], 10)
    assert_rows(rows, book, 0, 10)


def test_allocator_padding_is_declared_and_unowned() -> None:
    book, tables = build("index-fp4", 4, [10], seed=7)
    stride = book.pages.shape[1]
    padded = np.concatenate([book.pages, np.zeros((len(book.pages), 60), np.uint8)], axis=1)

    with pytest.raises(ValueError, match=f"pages of {stride + 60} bytes, expected {stride} bytes"):
        open_pool(padded, "index-fp4", 4)
    pool = open_pool(padded, "index-fp4", 4, page_stride=stride + 60)
    assert_rows(pool.read(tables[0], 10), book, 0, 10)
    mask = pool.owned_mask(tables, [10])
    assert mask.shape == padded.shape
    assert not mask[:, stride:].any()


def test_page_tables_may_be_any_integers_and_longer_than_needed() -> None:
    book, tables = build("index-bf16", 4, [6], seed=9)
    pool = open_pool(book.pages, "index-bf16", 4)
    ids = tables[0].tolist()

    for table in (ids, [*ids, -1, 99], np.array(ids, np.int64), np.array(ids, np.uint16)):
        assert_rows(pool.read(table, 6), book, 0, 6)
    assert pool.read([], 0).values.shape == (0, 128)
    assert not pool.owned_mask([[]], [0]).any()


def test_reading_does_not_alias_or_modify_the_pool() -> None:
    book, tables = build("index-fp8", 4, [6], seed=2)
    before = book.pages.copy()
    rows = open_pool(book.pages, "index-fp8", 4).read(tables[0], 6)
    rows.codes[:] = 0

    np.testing.assert_array_equal(book.pages, before)


def test_wrong_pools_are_refused_with_both_sides_named() -> None:
    pool = torch.zeros(3, 64 * 132, dtype=torch.uint8)

    with pytest.raises(
        ValueError,
        match=r"pages of 8448 bytes \(page size 64\), expected 4224 bytes for page size 32",
    ):
        open_pool(pool, "index-fp8", 32)
    with pytest.raises(ValueError, match="pages of 8448 bytes, expected 4352 bytes"):
        open_pool(pool, "index-fp4", 64)
    with pytest.raises(ValueError, match=r"\(page size 33\), expected 16384 bytes"):
        open_pool(pool, "index-bf16", 64)
    with pytest.raises(ValueError, match=r"pages of 37376 bytes, expected 37440 bytes"):
        open_pool(torch.zeros(2, 64 * 584, dtype=torch.uint8), "main-584", 64)
    with pytest.raises(ValueError, match=r"pages of 1728 bytes \(page size 2\), expected 1152"):
        open_pool(torch.zeros(2, 1728, dtype=torch.uint8), "main-584", 1)
    with pytest.raises(ValueError, match=r"dtype torch\.float8_e4m3fn, expected uint8"):
        open_pool(pool.view(torch.float8_e4m3fn), "index-fp8", 64)
    with pytest.raises(ValueError, match="dtype int8, expected uint8"):
        open_pool(pool.numpy().view(np.int8), "index-fp8", 64)
    with pytest.raises(ValueError, match=r"shape \(3, 64, 1, 132\), expected \[pages, 8448\]"):
        open_pool(pool.view(3, 64, 1, 132), "index-fp8", 64)


def test_wrong_page_tables_are_refused_with_both_sides_named() -> None:
    pool = open_pool(torch.zeros(5, 4 * 132, dtype=torch.uint8), "index-fp8", 4)

    with pytest.raises(ValueError, match="2 pages for 9 entries, expected at least 3 at 4 rows"):
        pool.read([0, 1], 9)
    with pytest.raises(ValueError, match=r"page id -1 at position 1, expected 0 \.\. 4"):
        pool.read([0, -1], 8)
    with pytest.raises(ValueError, match=r"page id 5 at position 0.*the pool has 5 pages"):
        pool.read(torch.tensor([5], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="page id 3 at position 2 is mapped twice"):
        pool.read([3, 1, 3], 12)
    with pytest.raises(ValueError, match=r"float64 of shape \(1,\), expected a list of integer"):
        pool.read(np.array([1.0]), 4)
    with pytest.raises(ValueError, match=r"of shape \(1, 1\), expected a list of integer"):
        pool.read(torch.zeros(1, 1, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="-1 entries, expected 0 or more"):
        pool.read([0], -1)


def test_wrong_requests_are_refused_with_both_sides_named() -> None:
    pool = open_pool(torch.zeros(5, 4 * 132, dtype=torch.uint8), "index-fp8", 4)

    with pytest.raises(ValueError, match="page 1 is mapped by request 0 and request 1"):
        pool.owned_mask([[0, 1], [1, 2]], [8, 8])
    with pytest.raises(ValueError, match="page 2 is mapped by request 0 and request 2"):
        pool.read_requests([[2], [1], [2]], [4, 4, 1])
    with pytest.raises(ValueError, match="page table of request 1: page id 9"):
        pool.owned_mask([[0], [9]], [4, 4])
    with pytest.raises(ValueError, match="1 page tables for 2 requests"):
        pool.owned_mask([[0]], [4, 4])
