from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import LAYOUTS, allocate, write_rows
from needlepoint.optimized.protocol.interface import PagedRows
from needlepoint.verify.diff.byte_compare import (
    equal_rows,
    equal_stored,
    same_bytes,
    unowned_change,
)
from needlepoint.verify.layout.pages import open_pool

LAYOUT_NAMES = ("index-fp8", "index-bf16", "index-fp4", "main-584", "main-bf16")


def rows_of(layout: str, count: int, seed: int) -> StoredRows:
    """Return random bytes as rows; scale bytes stay off the codes of NaN and of tiny steps."""
    rng = np.random.default_rng(seed)
    widths = LAYOUTS[layout]
    values = rng.integers(0, 120, (count, widths.value_bytes), dtype=np.uint8)
    scales = rng.integers(60, 120, (count, widths.scale_bytes), dtype=np.uint8)
    return StoredRows(values, scales)


def pool_of(layout: str, page_size: int, entries: tuple[int, ...], seed: int) -> PagedRows:
    paged = allocate(layout, page_size, entries, seed)
    for request, count in enumerate(entries):
        write_rows(paged, request, 0, rows_of(layout, count, 1000 + request))
    return paged


def flipped(paged: PagedRows, page: int, byte: int) -> PagedRows:
    pool = paged.pool.clone()
    pool[page, byte] ^= 1
    return replace(paged, pool=pool)


def owner_of(paged: PagedRows, page: int, byte: int) -> tuple[int, int] | None:
    """Return request and entry of a byte; None for padding and unfilled slots."""
    geometry = open_pool(paged.pool, paged.layout, paged.page_size).geometry
    for start, plane in geometry.planes:
        slot, offset = divmod(byte - start, plane.row_bytes)
        if 0 <= slot < paged.page_size and offset < sum(size for _, size in plane.fields):
            for request, table in enumerate(paged.page_table):
                for at in (table == page).nonzero().flatten().tolist():
                    entry = at * paged.page_size + slot
                    if entry < paged.entries[request]:
                        return request, entry
    return None


def width(layout: str) -> int:
    return 128 if layout.startswith("index") else 512


@given(
    layout=st.sampled_from(LAYOUT_NAMES),
    page_size=st.integers(1, 9),
    entries=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
    where=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
)
@settings(max_examples=80, deadline=None)
def test_every_byte_of_a_pool_is_a_row_s_or_nobody_s(
    layout: str, page_size: int, entries: list[int], seed: int, where: tuple[float, float]
) -> None:
    if not sum(entries):
        entries[0] = 1
    paged = pool_of(layout, page_size, tuple(entries), seed)
    pages, stride = paged.pool.shape
    page, byte = int(where[0] * pages), int(where[1] * stride)
    changed = flipped(paged, page, byte)
    owner = owner_of(paged, page, byte)

    rows = equal_stored(changed, paged, width(layout))
    left = unowned_change(changed, paged, width(layout))

    failed = rows.failed(1e300).nonzero().flatten().tolist()
    if owner is None:
        assert failed == []
        assert left is not None
        assert (left.count, left.page, left.byte) == (1, page, byte)
        assert left.found ^ left.expected == 1
        if left.request is not None:
            assert left.entry is not None
            table = paged.page_table[left.request]
            assert int(table[left.entry // page_size]) == page
    else:
        assert left is None
        request, entry = owner
        assert failed == [sum(entries[:request]) + entry]
        assert rows.ratio[failed[0]] == math.inf
        assert rows.distance[failed[0]] >= 1


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_where_rows_lie_does_not_matter(layout: str) -> None:
    one = pool_of(layout, 4, (9, 0, 5), seed=1)
    other = pool_of(layout, 7, (9, 0, 5), seed=2)

    rows = equal_stored(other, one, width(layout))

    assert rows.rows == 14
    assert torch.equal(rows.ratio, torch.zeros(14, dtype=torch.float64))
    assert unowned_change(other, one, width(layout)) is None


def test_a_padded_row_names_its_own_entry() -> None:
    paged = pool_of("main-584", 4, (6,), seed=3)
    page = int(paged.page_table[0][1])

    # Eighth scale byte of slot 1 of the second page, which is entry 5.
    left = unowned_change(flipped(paged, page, 4 * 576 + 8 + 7), paged, 512)

    assert left is not None
    assert (left.request, left.entry) == (0, 5)


def test_another_code_of_the_same_number_is_another_row() -> None:
    """The two NaN codes of E4M3 decode alike, and are not the same bytes."""
    paged = pool_of("index-fp8", 4, (3,), seed=3)
    page = int(paged.page_table[0][0])
    pools = [paged.pool.clone() for _ in range(2)]
    pools[0][page, 5], pools[1][page, 5] = 0x7F, 0xFF
    one, other = (replace(paged, pool=pool) for pool in pools)

    rows = equal_stored(one, other, 128)

    assert rows.failed(1.0).tolist() == [True, False, False]
    assert equal_stored(one, one, 128).failed(1.0).tolist() == [False] * 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pool_of("index-bf16", 4, (3,), 0), r"index-fp8 \[3\] against index-bf16 \[3\]"),
        (pool_of("index-fp8", 4, (4,), 0), r"index-fp8 \[3\] against index-fp8 \[4\]"),
    ],
)
def test_pools_of_other_rows_are_refused(other: PagedRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equal_stored(pool_of("index-fp8", 4, (3,), 0), other, 128)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int32]
)
@pytest.mark.parametrize("row", [0, 3])
def test_one_bit_of_one_row(dtype: torch.dtype, row: int) -> None:
    expected = torch.arange(4 * 2 * 3).reshape(4, 2, 3).to(dtype)
    found = expected.clone()
    found[row, 1, 2:].view(torch.uint8)[0] ^= 1

    rows = equal_rows(found, expected, "x")

    assert rows.failed(1e300).tolist() == [r == row for r in range(4)]
    assert int(rows.dim[row]) == 5
    assert float(rows.expected[row]) == float(expected[row, 1, 2])
    assert float(rows.found[row]) == float(found[row, 1, 2])
    assert rows.expected[1] == rows.found[1] == float(expected[1, 0, 0])


def test_nan_is_equal_to_itself_and_zeros_have_signs() -> None:
    expected = torch.tensor([[0.0, 1.0], [torch.nan, 2.0], [torch.inf, 3.0]])
    found = expected.clone()
    assert not equal_rows(found, expected, "x").failed(1.0).any()

    found[0, 0] = -0.0
    found[2, 0] = torch.nan

    rows = equal_rows(found, expected, "x")
    assert rows.failed(1.0).tolist() == [True, False, True]
    assert rows.distance[0] == 1
    assert same_bytes(found, expected).tolist() == [False, True, False]
    assert same_bytes(found, found.double()).tolist() == [False] * 3


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(3, 4)]
)
def test_rows_of_another_shape_or_dtype_are_refused(other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"index\.pooled: torch\.float32 \(2, 4\) against"):
        equal_rows(torch.zeros(2, 4), other, "index.pooled")
