"""Every byte that an action does not own stays as it is: pages and state, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needlepoint.optimized.stateful import Cache
from needlepoint.verify.pages_decode import Bytes
from needlepoint.verify.pages_geometry import PoolGeometry


@dataclass(frozen=True)
class Owned:
    """What one request may change in one action.

    Attributes
    ----------
    slot
        Its slot, or None where the state must stay.
    pool
        Its pool.
    pages
        By path: page ids.
    first, stop
        Entries it may write; None for every row of the pages, padding included.
    """

    slot: int | None
    pool: int
    pages: dict[str, NDArray[np.int64]]
    first: int | None = None
    stop: int = 0


class Guard:
    """Compares a cache with what it was after the action before.

    Parameters
    ----------
    cache
        The cache, live.
    geometry
        Of the pools, by path.
    """

    def __init__(self, cache: Cache, geometry: dict[str, PoolGeometry]) -> None:
        self._cache = cache
        self._geometry = geometry
        self._pools = {
            path: [_bytes(p).copy() for p in pools] for path, pools in cache.pools.items()
        }
        self._state = {path: _bytes(state).copy() for path, state in cache.state.items()}

    def check(self, owned: Iterable[Owned]) -> str | None:
        """Return what changed without an owner, in words, or None; then forget it."""
        now = {path: [_bytes(p) for p in pools] for path, pools in self._cache.pools.items()}
        state = {path: _bytes(rows) for path, rows in self._cache.state.items()}
        for part in owned:
            for path in now:
                self._allow(path, part, now[path][part.pool])
                if part.slot is not None and path in state:
                    self._state[path][part.slot] = state[path][part.slot]
        for path, pools in now.items():
            for number, pool in enumerate(pools):
                before = self._pools[path][number]
                if not _same(before, pool):
                    page, byte = np.argwhere(before != pool)[0]
                    before[:] = pool
                    return f"{path} pool {number}, page {page}, byte {byte} changed; nobody owns it"
        for path, rows in state.items():
            before = self._state[path]
            if not _same(before, rows):
                slot = int(np.argwhere(before != rows)[0][0])
                before[:] = rows
                return f"{path} state of slot {slot} changed; no request of this action lives there"
        return None

    def _allow(self, path: str, part: Owned, now: Bytes) -> None:
        before, pages = self._pools[path][part.pool], part.pages[path]
        if part.first is None:
            before[pages] = now[pages]
            return
        geometry = self._geometry[path]
        entry = np.arange(part.first, part.stop)
        page, row = pages[entry // geometry.page_size], entry % geometry.page_size
        for offset, plane in geometry.planes:
            shape = (len(now), geometry.page_size, plane.row_bytes)
            span = slice(offset, offset + geometry.page_size * plane.row_bytes)
            before[:, span].reshape(shape)[page, row] = now[:, span].reshape(shape)[page, row]


def _same(before: Bytes, after: Bytes) -> bool:
    # Rows of every layout and state are multiples of 8 bytes, and words compare faster.
    return bool(np.array_equal(before.view(np.uint64), after.view(np.uint64)))


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return found
