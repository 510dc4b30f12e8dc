"""Bytes of every layout at offsets worked out by hand; nothing is written that is not owned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.optimized.emulation.narrow import StoredRows, store_bf16, store_fp4, store_fp8
from needlepoint.optimized.emulation.pages import LAYOUTS, allocate, page_rows, write_rows
from needlepoint.optimized.emulation.readback import read_index_keys, read_queries, stored_bytes
from needlepoint.optimized.protocol.interface import PagedRows, QueryRows
from needlepoint.reference import formats

U8 = npt.NDArray[np.uint8]

# layout, rows a page, value offset of row j, scale offset of row j, page bytes
BY_HAND = [
    ("index-fp8", 64, [0, 128, 63 * 128], [8192, 8196, 8444], 8448),
    ("index-bf16", 64, [0, 256, 63 * 256], [], 16384),
    ("index-fp4", 64, [0, 64, 63 * 64], [4096, 4100, 4348], 4352),
    ("main-584", 64, [0, 576, 63 * 576], [36864, 36872, 37368], 37440),
    ("main-584", 2, [0, 576], [1152, 1160], 1728),
    ("main-bf16", 64, [0, 1024, 63 * 1024], [], 65536),
    ("main-bf16", 2, [0, 1024], [], 2048),
]


def random_rows(layout: str, count: int, seed: int = 0) -> StoredRows:
    """Return rows of random bytes below 0xFF, so that an unwritten byte stands out."""
    rng = np.random.default_rng(seed)
    shape = LAYOUTS[layout]
    return StoredRows(
        rng.integers(0, 255, (count, shape.value_bytes), dtype=np.uint8),
        rng.integers(0, 255, (count, shape.scale_bytes), dtype=np.uint8),
    )


def pool_of(paged: PagedRows) -> U8:
    pool: U8 = paged.pool.numpy()
    return pool


@pytest.mark.parametrize(("layout", "size", "values", "scales", "page_bytes"), BY_HAND)
def test_bytes_by_hand(
    layout: str, size: int, values: list[int], scales: list[int], page_bytes: int
) -> None:
    paged = allocate(layout, size, [3 * size], seed=1)
    rows = random_rows(layout, 3 * size)
    write_rows(paged, 0, 0, rows)
    assert paged.pool.shape == (6, page_bytes)
    expected = np.full_like(pool_of(paged), 0xFF)
    for logical, page in enumerate(paged.page_table[0].tolist()):
        for j in range(size):
            entry, width = logical * size + j, rows.values.shape[1]
            start = values[0] + j * (values[1] - values[0])
            expected[page, start : start + width] = rows.values[entry]
            if scales:
                start, width = scales[0] + j * (scales[1] - scales[0]), rows.scales.shape[1]
                expected[page, start : start + width] = rows.scales[entry]
        last = size - 1
        assert values[-1] == values[0] + last * (values[1] - values[0])
    assert np.array_equal(pool_of(paged), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_touches_its_own_bytes_alone(layout: str) -> None:
    paged = allocate(layout, 4, [5, 9], seed=3)
    before = pool_of(paged).copy()
    rows = random_rows(layout, 3)
    write_rows(paged, 1, 4, rows)
    changed = pool_of(paged) != before
    assert changed.sum() == 3 * (rows.values.shape[1] + rows.scales.shape[1])
    assert set(np.flatnonzero(changed.any(axis=1))) == {int(paged.page_table[1][1])}


@given(
    entries=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 16, 64]),
    seed=st.integers(0, 2**31),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_page_tables_share_no_page_and_leave_spares(
    entries: list[int], size: int, seed: int, layout: str
) -> None:
    paged = allocate(layout, size, entries, seed)
    used = [page for table in paged.page_table for page in table.tolist()]
    assert len(set(used)) == len(used) == sum(-(-n // size) for n in entries)
    assert paged.pool.shape[0] == len(used) + 3
    assert all(0 <= page < paged.pool.shape[0] for page in used)
    assert all(table.dtype == torch.int32 for table in paged.page_table)
    assert bool((paged.pool == 0xFF).all())


def test_page_tables_are_shuffled_by_the_seed() -> None:
    first, second = (allocate("index-fp8", 64, [64 * 40], seed).page_table[0] for seed in (0, 1))
    assert first.tolist() != sorted(first.tolist())
    assert first.tolist() != second.tolist()
    again = allocate("index-fp8", 64, [64 * 40], 0).page_table[0]
    assert torch.equal(first, again)


def test_a_page_covers_256_tokens() -> None:
    assert (page_rows(4), page_rows(128)) == (64, 2)


def test_rows_of_another_layout_are_refused() -> None:
    paged = allocate("index-fp8", 64, [10], seed=0)
    with pytest.raises(ValueError, match=r"64 value and 4 scale bytes, expected 128 and 4"):
        write_rows(paged, 0, 0, random_rows("index-fp4", 1))


@pytest.mark.parametrize("first", [-1, 8])
def test_rows_past_the_request_are_refused(first: int) -> None:
    paged = allocate("index-fp8", 64, [10], seed=0)
    with pytest.raises(ValueError, match="but it owns 10"):
        write_rows(paged, 0, first, random_rows("index-fp8", 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_back_returns_what_was_written(layout: str) -> None:
    paged = allocate(layout, 4, [5, 0, 11], seed=9)
    rows = random_rows(layout, 11)
    for first in (0, 3, 8):
        part = slice(first, {0: 3, 3: 8, 8: 11}[first])
        write_rows(paged, 2, first, StoredRows(rows.values[part], rows.scales[part]))
    values, scales = stored_bytes(paged, 2)
    assert np.array_equal(values, rows.values)
    assert np.array_equal(scales, rows.scales)
    assert stored_bytes(paged, 1)[0].shape == (0, rows.values.shape[1])


@pytest.mark.parametrize("key_format", ["bf16", "fp8", "fp4"])
def test_index_keys_decode_as_the_format_says(key_format: str) -> None:
    y = np.random.default_rng(0).standard_normal((128, 7)).astype(np.float32)
    store = {"bf16": store_bf16, "fp8": store_fp8, "fp4": store_fp4}[key_format]
    paged = allocate(f"index-{key_format}", 4, [7], seed=2)
    write_rows(paged, 0, 0, store(y))
    keys = read_index_keys(paged, 0)
    got = keys.values.double()
    if keys.scale is not None:
        got = got * keys.scale.double()[:, None]
    fmt = {"bf16": formats.BF16, "fp8": formats.FP8_PLAIN, "fp4": formats.FP4_OFFICIAL}[key_format]
    expected = formats.decode(formats.encode(torch.from_numpy(y.T.copy()), fmt), fmt)
    assert torch.equal(got, expected)


def test_main_pages_hold_no_index_keys() -> None:
    with pytest.raises(ValueError, match="main-584"):
        read_index_keys(allocate("main-584", 64, [3], seed=0), 0)


def test_fp4_queries_need_scales() -> None:
    rows = QueryRows("fp4", torch.zeros(1, 1, 64, dtype=torch.uint8), None, torch.ones(1, 1), False)
    with pytest.raises(ValueError, match="without scales"):
        read_queries(rows, slice(0, 1))
