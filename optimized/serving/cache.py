"""The cache of a server, and what is done to it between calls: fork, offload, restore, move.

Buffers start filled with what shows when it is read: NaN in the state, 0xFF in pages. Nothing is
cleared when a slot or a page changes hands, as in serving engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.emulation.pages import LAYOUTS, UNWRITTEN
from needlepoint.optimized.protocol.interface import INDEX, MAIN, PagedRows
from needlepoint.optimized.protocol.serving import (
    BF16_STATE,
    FP32_STATE,
    Cache,
    CacheSpec,
    LayerParameters,
    Place,
    StepBatch,
    StepOutput,
    TokenRows,
)
from needlepoint.optimized.serving.plan import ring_rows, window_slots

STATE_DTYPES = {FP32_STATE: torch.float32, BF16_STATE: torch.bfloat16}


def first_needed(length: int, ratio: int) -> int:
    """Return the first position that a window still to come reads, after ``length`` tokens."""
    return max(0, (length // ratio + 1) * ratio - window_slots(ratio))


def new_cache(
    parameters: LayerParameters,
    spec: CacheSpec,
    key_format: str,
    device: torch.device | str = "cpu",
) -> Cache:
    """Return an unwritten cache.

    Parameters
    ----------
    parameters
        The layer: ratio and widths.
    spec
        Sizes.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``; main rows are bf16 beside bf16 keys, else 584 bytes.
    device
        Where the buffers live.

    Raises
    ------
    ValueError
        If a size is not positive, the page size is no power of two or the state dtype is unknown.
    """
    if min(spec.slots, spec.pages, spec.page_size, spec.pools) < 1:
        raise ValueError(f"cache {spec}: expected at least one slot, page, row and pool")
    if spec.page_size & (spec.page_size - 1):
        raise ValueError(f"cache: page_size {spec.page_size}, expected a power of two")
    if spec.state not in STATE_DTYPES:
        raise ValueError(f"cache: state {spec.state!r}, expected one of {sorted(STATE_DTYPES)}")
    layouts = {MAIN: "main-bf16" if key_format == "bf16" else "main-584"}
    widths = {MAIN: parameters.main.ape.shape[1]}
    if parameters.index is not None:
        layouts[INDEX] = f"index-{key_format}"
        widths[INDEX] = parameters.index.ape.shape[1]
    ring = ring_rows(parameters.ratio)
    state = {
        path: torch.full(
            (spec.slots, ring, 2, width),
            float("nan"),
            dtype=STATE_DTYPES[spec.state],
            device=device,
        )
        for path, width in widths.items()
    }
    pools = {
        path: tuple(
            torch.full(
                (spec.pages, LAYOUTS[layout].page_bytes(spec.page_size)),
                UNWRITTEN,
                dtype=torch.uint8,
                device=device,
            )
            for _ in range(spec.pools)
        )
        for path, layout in layouts.items()
    }
    return Cache(state, pools, layouts, spec.page_size)


@dataclass(frozen=True)
class Saved:
    """What is kept of a request outside the cache: state rows and page bytes by path."""

    state: Mapping[str, Tensor]
    pages: Mapping[str, Tensor]


class RingServer:
    """A server whose ring keeps the token of position ``p`` in row ``p`` modulo the ring.

    The ring has twice the rows of a window. A draft of at most 8 tokens then overwrites nothing
    that the window before it still needs, so rejected tokens are left where they are and
    overwritten in their turn: :meth:`accept` has nothing to undo. Subclasses compute; they may
    replace any of the rest.

    Parameters
    ----------
    parameters
        The layer.
    cache
        From :func:`new_cache`.
    """

    def __init__(self, parameters: LayerParameters, cache: Cache) -> None:
        self.parameters = parameters
        self._cache = cache

    @property
    def cache(self) -> Cache:
        """The buffers, live."""
        return self._cache

    def ring_places(self, place: Place, positions: Tensor) -> Tensor:
        """Return the ring rows of positions of a request."""
        return positions % ring_rows(self.parameters.ratio)

    def read_state(self, path: str, place: Place, start: int, stop: int) -> Tensor:
        """Return kept tokens ``start .. stop - 1`` as fp32 ``[n, 2, c * d]``."""
        rows = self.ring_places(place, torch.arange(start, stop))
        return self._cache.state[path][place.slot, rows].to(torch.float32)

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Keep consecutive tokens from position ``first`` on, the last ring of them."""
        state = self._cache.state[path]
        kept = min(len(rows.kv), state.shape[1])
        skipped = len(rows.kv) - kept
        at = self.ring_places(place, torch.arange(first + skipped, first + skipped + kept))
        both = torch.stack((rows.kv[skipped:], rows.score[skipped:]), dim=1)
        state[place.slot, at.to(state.device)] = both.to(state)

    def paged(self, path: str, place: Place, entries: int) -> PagedRows:
        """Return the pages of one request as a pool of its own."""
        return PagedRows(
            layout=self._cache.layouts[path],
            pool=self._cache.pools[path][place.pool],
            page_size=self._cache.page_size,
            page_table=(place.pages[path],),
            entries=(entries,),
        )

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a call."""
        raise NotImplementedError

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Do nothing: rows past ``place.length + kept`` are never read before they are written."""

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Copy the pages that are not shared and keep the tail of the prefix."""
        for path in self._cache.pools:
            self.copy_pages(path, source, target)
            rows = tail[path]
            self.write_state(path, target, target.length - len(rows.kv), rows)

    def copy_pages(self, path: str, source: Place, target: Place) -> None:
        """Copy the pages of a target that are not its source's own."""
        count = len(target.pages[path])
        old, new = source.pages[path][:count].long(), target.pages[path].long()
        own = old != new if source.pool == target.pool else torch.ones_like(old, dtype=torch.bool)
        pools = self._cache.pools[path]
        pools[target.pool][new[own]] = pools[source.pool][old[own]]

    def offload(self, place: Place) -> object:
        """Return the state and the pages of a request."""
        cache = self._cache
        return Saved(
            {path: state[place.slot].clone() for path, state in cache.state.items()},
            {
                path: pools[place.pool][place.pages[path].long()]
                for path, pools in cache.pools.items()
            },
        )

    def restore(self, saved: object, place: Place) -> None:
        """Write them back to another place."""
        if not isinstance(saved, Saved):
            raise ValueError(f"restore: {type(saved).__name__}, expected what offload returned")
        for path, pages in saved.pages.items():
            self._cache.pools[path][place.pool][place.pages[path].long()] = pages
            self._cache.state[path][place.slot] = saved.state[path]

    def move(self, source: Place, target: Place) -> None:
        """Copy every page of a request to another pool."""
        for path in self._cache.pools:
            self.copy_pages(path, source, target)

    def release(self, place: Place) -> None:
        """Do nothing: nothing is cleared."""
