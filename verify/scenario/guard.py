"""Every byte that an action does not own stays as it is: pages and state, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needlepoint.optimized.protocol.serving import Cache
from needlepoint.verify.layout.decode import Bytes
from needlepoint.verify.layout.geometry import PoolGeometry


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
        self._geometry = geometry
        self._pools = {path: [_Watched(p) for p in pools] for path, pools in cache.pools.items()}
        self._state = {path: _Watched(state) for path, state in cache.state.items()}

    def check(self, owned: Iterable[Owned]) -> str | None:
        """Return what changed without an owner, in words, or None; then forget it."""
        for pools in self._pools.values():
            for pool in pools:
                pool.look()
        for state in self._state.values():
            state.look()
        for part in owned:
            for path, pools in self._pools.items():
                self._allow(path, part, pools[part.pool])
            if part.slot is not None:
                for state in self._state.values():
                    state.before[part.slot] = state.now[part.slot]
        for path, pools in self._pools.items():
            for number, pool in enumerate(pools):
                if changed := pool.first_change():
                    page, byte = changed
                    return f"{path} pool {number}, page {page}, byte {byte} changed; nobody owns it"
        for path, state in self._state.items():
            if changed := state.first_change():
                slot = changed[0]
                return f"{path} state of slot {slot} changed; no request of this action lives there"
        return None

    def _allow(self, path: str, part: Owned, pool: _Watched) -> None:
        before, now, pages = pool.before, pool.now, part.pages[path]
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


class _Watched:
    """A buffer and what it held at the last look, as bytes ``[first axis, ..]``."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._shared = tensor.device.type == "cpu" and tensor.is_contiguous()
        self.now = _bytes(tensor)
        self.before: Bytes = self.now.copy()

    def look(self) -> None:
        """Bring ``now`` up to date; in host memory it shares the buffer."""
        if not self._shared:
            self.now = _bytes(self._tensor)

    def first_change(self) -> list[int] | None:
        """Return where the first byte differs from before, or None; then take it as it is."""
        # Rows of every layout and state are multiples of 8 bytes, and words compare faster.
        if (self.before.view(np.uint64) == self.now.view(np.uint64)).all():
            return None
        found: list[int] = np.argwhere(self.before != self.now)[0].tolist()
        self.before[:] = self.now
        return found


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return found
