"""Ways to plant: on altered inputs, with an altered step, in a tensor, in the bytes of pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.protocol.interface import (
    INDEX,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    StageKey,
)
from needlepoint.reference.compressor import Taps, gather_taps, pool
from needlepoint.reference.profile import Arithmetic, needlepoint_profile
from needlepoint.verify.layout.geometry import geometry
from needlepoint.verify.selftest.faults.fault import Plant
from needlepoint.verify.selftest.faults.ground import (
    Ground,
    Steps,
    compress,
    pool_of,
    with_dense,
    with_keys,
    with_pool,
)

Pooling = Callable[[Taps], Tensor]
Planes = tuple[Tensor, Tensor]
"""Values and scales of all pages: uint8 ``[pages, page_size, bytes]`` views of one pool."""


def altered(change: Callable[[LayerInputs], LayerInputs], path: str = INDEX) -> Plant:
    """Run one path by the sound code on other inputs than were given."""
    return lambda ground: with_keys(
        ground, path, compress(ground, path, given=change(ground.given))
    )


def altered_projection(
    change: Callable[[Ground, CompressorInputs], CompressorInputs], path: str = INDEX
) -> Plant:
    """Run one path by the sound code on other projections or constants than were given."""

    def plant(ground: Ground) -> Observed:
        given = ground.given
        part = change(ground, _part(given, path))
        whole = replace(given, index=part) if path == INDEX else replace(given, main=part)
        return with_keys(ground, path, compress(ground, path, given=whole))

    return plant


def stepped(steps: Steps, path: str = INDEX) -> Plant:
    """Run one path with some steps replaced."""
    return lambda ground: with_keys(ground, path, compress(ground, path, steps))


def stored(store: Callable[[F32], StoredRows], path: str = INDEX) -> Plant:
    """Run one path with another store."""
    return stepped(Steps(store=store), path)


def repooled(
    change: Callable[[Ground, int, Taps], Taps] | None = None,
    path: str = INDEX,
    pooling: Pooling = pool,
) -> Plant:
    """Pool other taps, or by another formula, in float64 rounded once.

    ``change`` is given the ground, the request and its taps, ``[windows, slots, d]``.
    """

    def plant(ground: Ground) -> Observed:
        given, rows = ground.given, []
        part = _part(given, path)
        first = 0
        for request, length in enumerate(given.lengths):
            tokens = slice(first, first + length)
            taps = gather_taps(part.kv[tokens], part.score[tokens], part.ape, given.ratio, _PROFILE)
            taps = taps if change is None else change(ground, request, taps)
            rows.append(pooling(taps) if len(taps.kv) else taps.kv[:, 0])
            first += length
        pooled = torch.cat(rows).to(torch.float32).numpy()
        steps = Steps(pool=lambda engine, block: pooled[block.rows])
        return with_keys(ground, path, compress(ground, path, steps))

    return plant


def edited(key: StageKey, change: Callable[[Ground, Tensor], None]) -> Plant:
    """Change the tensor of one stage in place, and nothing that follows from it."""

    def plant(ground: Ground) -> Observed:
        rows = ground.observed.dense[key].clone()
        change(ground, rows)
        return with_dense(ground, key, rows)

    return plant


def paged(
    change: Callable[[Ground, PagedRows, Planes], None], path: str = INDEX, *, follow: bool = True
) -> Plant:
    """Change values and scales of pages in place; ``follow`` as in ``with_pool``."""

    def plant(ground: Ground) -> Observed:
        pool = pool_of(ground, path)
        rows = ground.observed.stored[path]
        change(ground, rows, planes(rows, pool))
        return with_pool(ground, path, pool, follow=follow)

    return plant


def planes(rows: PagedRows, pool: Tensor) -> Planes:
    """Return views of the values and the scales of every page of a pool."""
    shape = geometry(rows.layout, rows.page_size)
    views = []
    for offset, plane in shape.planes:
        part = pool[:, offset : offset + rows.page_size * plane.row_bytes]
        views.append(part.view(len(pool), rows.page_size, plane.row_bytes))
    if len(views) == 1:
        views.append(torch.empty(len(pool), rows.page_size, 0, dtype=torch.uint8))
    return views[0], views[1]


def place(ground: Ground, rows: PagedRows, entry: int) -> tuple[int, int]:
    """Return page and slot of an entry of the longest request."""
    table = rows.page_table[ground.longest]
    return int(table[entry // rows.page_size]), entry % rows.page_size


def _part(given: LayerInputs, path: str) -> CompressorInputs:
    part = given.index if path == INDEX else given.main
    if part is None:
        raise ValueError(f"layer {given.layer} of ratio {given.ratio} has no {path} path")
    return part


_PROFILE: Arithmetic = needlepoint_profile("fp8")
"""Any format: only the state's precision is read from it, and that is fp32 in all."""
