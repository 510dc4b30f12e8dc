"""Layouts of stored rows, and the sizes of a pool that holds them.

A page is a sequence of *planes*. In each plane the rows of the page follow one another, so the
values of a token and its scales lie apart: token ``t`` of an index-fp8 page has its values at byte
``128 t`` and its scale at ``128 P + 4 t``.

Sources: the byte layouts of SGLang, vLLM, TensorRT-LLM, LMDeploy and DeepGEMM (index keys) and of
FlashMLA (584-byte main rows, pages rounded up to a multiple of 576 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plane:
    """Rows of one plane: named byte fields in order, then padding up to ``row_bytes``."""

    row_bytes: int
    fields: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Layout:
    """What a page holds; ``page_multiple`` is the number of bytes pages are rounded up to."""

    name: str
    planes: tuple[Plane, ...]
    page_multiple: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes a row occupies over all planes, row padding included."""
        return sum(plane.row_bytes for plane in self.planes)


def _one_plane(name: str, row_bytes: int) -> Layout:
    return Layout(name, (Plane(row_bytes, (("values", row_bytes),)),))


ROWS_F64 = "rows-f64"

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "index-fp8",
            (Plane(128, (("values", 128),)), Plane(4, (("scales", 4),))),
        ),
        _one_plane("index-bf16", 256),
        Layout(
            "index-fp4",
            (Plane(64, (("values", 64),)), Plane(4, (("scales", 4),))),
        ),
        Layout(
            "main-584",
            (Plane(576, (("values", 448), ("rope", 128))), Plane(8, (("scales", 7),))),
            page_multiple=576,
        ),
        _one_plane("main-bf16", 1024),
    )
}
"""Layouts of fixed row width; ``rows-f64`` (reference rows) takes its width from the caller."""


@dataclass(frozen=True)
class PoolGeometry:
    """Sizes of a pool."""

    layout: str  # Layout name.
    page_size: int  # Rows a page.
    row_bytes: int  # Bytes a row occupies, row padding included.
    page_stride: int  # Bytes from one page to the next.
    planes: tuple[tuple[int, Plane], ...]  # Byte offset of each plane in the page, and the plane.


def geometry(
    layout: str,
    page_size: int,
    *,
    row_width: int | None = None,
    page_stride: int | None = None,
) -> PoolGeometry:
    """Return the geometry of a pool.

    Parameters
    ----------
    layout
        A name of :data:`LAYOUTS`, or ``"rows-f64"``.
    page_size
        Rows a page, at least 1.
    row_width
        float64 elements a row; for ``rows-f64`` only.
    page_stride
        Bytes from page to page where an allocator pads more than the layout does; default is the
        layout's own page size.

    Raises
    ------
    ValueError
        For an unknown layout, a page size below 1, a row width that is missing or out of place, or
        a stride too short for the rows.
    """
    found = _layout(layout, row_width)
    if page_size < 1:
        raise ValueError(f"{layout}: page size {page_size}, expected at least 1 row")
    content = page_size * found.row_bytes
    own = -(-content // found.page_multiple) * found.page_multiple
    if page_stride is not None and page_stride < own:
        raise ValueError(
            f"{layout}: page stride {page_stride} bytes, expected at least {own} for "
            f"{page_size} rows of {found.row_bytes} bytes"
        )
    planes, offset = [], 0
    for plane in found.planes:
        planes.append((offset, plane))
        offset += page_size * plane.row_bytes
    return PoolGeometry(layout, page_size, found.row_bytes, page_stride or own, tuple(planes))


def _layout(layout: str, row_width: int | None) -> Layout:
    if layout == ROWS_F64:
        if row_width is None or row_width < 1:
            raise ValueError(f"{ROWS_F64}: row width {row_width}, expected the elements of a row")
        return _one_plane(ROWS_F64, 8 * row_width)
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: expected one of {sorted([*LAYOUTS, ROWS_F64])}")
    if row_width is not None:
        raise ValueError(
            f"{layout}: row width {row_width} given, but the layout fixes rows of "
            f"{LAYOUTS[layout].row_bytes} bytes; leave it out"
        )
    return LAYOUTS[layout]


def page_size_of(layout: str, page_bytes: int, row_width: int | None = None) -> int | None:
    """Return the page size whose unpadded pages have ``page_bytes`` bytes, or None."""
    rows = page_bytes // _layout(layout, row_width).row_bytes
    if rows and geometry(layout, rows, row_width=row_width).page_stride == page_bytes:
        return rows
    return None
