"""Sizes of pages, from the layouts' published figures."""

from __future__ import annotations

import pytest

from needlepoint.verify.layout.geometry import LAYOUTS, geometry, page_size_of


@pytest.mark.parametrize(
    ("layout", "page_size", "row_bytes", "page_stride"),
    [
        ("index-fp8", 64, 132, 8448),
        ("index-fp8", 1, 132, 132),
        ("index-fp4", 64, 68, 4352),
        ("index-bf16", 64, 256, 16384),
        ("main-584", 2, 584, 1728),
        ("main-584", 64, 584, 37440),
        ("main-584", 256, 584, 149760),
        ("main-584", 72, 584, 42048),  # 72 * 584 = 73 * 576: nothing to round
        ("main-bf16", 64, 1024, 65536),
    ],
)
def test_page_sizes(layout: str, page_size: int, row_bytes: int, page_stride: int) -> None:
    found = geometry(layout, page_size)

    assert (found.layout, found.page_size) == (layout, page_size)
    assert (found.row_bytes, found.page_stride) == (row_bytes, page_stride)
    assert page_size_of(layout, page_stride) == page_size
    assert page_size_of(layout, page_stride + 1) is None
    assert page_size_of(layout, row_bytes - 1) is None


def test_planes_follow_one_another() -> None:
    assert [offset for offset, _ in geometry("index-fp8", 64).planes] == [0, 8192]
    assert [offset for offset, _ in geometry("index-fp4", 64).planes] == [0, 4096]
    assert [offset for offset, _ in geometry("main-584", 64).planes] == [0, 36864]


def test_reference_rows_take_their_width() -> None:
    assert geometry("rows-f64", 4, row_width=512).page_stride == 4 * 512 * 8
    assert page_size_of("rows-f64", 4 * 512 * 8, 512) == 4
    with pytest.raises(ValueError, match="row width None, expected the elements of a row"):
        geometry("rows-f64", 4)
    with pytest.raises(ValueError, match="row width 0"):
        geometry("rows-f64", 4, row_width=0)
    with pytest.raises(ValueError, match="row width 128 given, but the layout fixes rows of 256"):
        geometry("index-bf16", 4, row_width=128)


def test_wrong_geometry_is_named() -> None:
    with pytest.raises(ValueError, match=r"layout 'fp8': expected one of \['index-bf16'"):
        geometry("fp8", 64)
    with pytest.raises(ValueError, match="index-fp8: page size 0, expected at least 1 row"):
        geometry("index-fp8", 0)
    with pytest.raises(ValueError, match="page stride 8447 bytes, expected at least 8448"):
        geometry("index-fp8", 64, page_stride=8447)
    assert geometry("index-fp8", 64, page_stride=8640).page_stride == 8640


def test_bytes_per_token() -> None:
    """fault_log P06, D14: what a cache budget is computed from."""
    sizes = {name: layout.row_bytes for name, layout in LAYOUTS.items()}

    assert sizes == {
        "index-fp8": 132,
        "index-bf16": 256,
        "index-fp4": 68,
        "main-584": 584,
        "main-bf16": 1024,
    }
