"""Slots and pages of a scheduler: the last one given back is the next one given out.

Nothing is cleared on the way, so whatever a request leaves behind lies in the next one's place.
"""

from __future__ import annotations

from collections import Counter

import torch

from needlepoint.optimized.protocol.interface import INDEX, MAIN
from needlepoint.optimized.protocol.serving import Place
from needlepoint.verify.inputs.synthetic_draw import Draw
from needlepoint.verify.scenario.events import Scenario

PATHS = (INDEX, MAIN)
Pages = dict[str, list[int]]
"""Page ids by path, the page of entry 0 first."""


class Store:
    """The slots and pages of one scenario; page numbers are shuffled, other ones for each path."""

    def __init__(self, scenario: Scenario) -> None:
        self.page_tokens = scenario.page_tokens
        self._slots = list(range(scenario.slots))[::-1]
        self._free: dict[tuple[str, int], list[int]] = {}
        for path in PATHS:
            for pool in range(scenario.pools):
                draw = Draw(scenario.seed, f"pages of {path} in pool {pool}")
                self._free[path, pool] = draw.channels(scenario.pages, scenario.pages).tolist()
        self._users: Counter[tuple[str, int, int]] = Counter()

    def take_slot(self) -> int:
        """Return a slot.

        Raises
        ------
        ValueError
            If every slot is taken.
        """
        if not self._slots:
            raise ValueError("every slot is taken; free, evict or offload a request first")
        return self._slots.pop()

    def count(self, tokens: int) -> int:
        """Return the pages that so many tokens need."""
        return -(-tokens // self.page_tokens)

    def grow(self, pages: Pages, pool: int, tokens: int) -> Pages:
        """Return the page table grown to hold so many tokens; the one given stays as it is.

        Raises
        ------
        ValueError
            If the pool has no page left.
        """
        grown = {path: list(pages[path]) for path in PATHS}
        for path in PATHS:
            while len(grown[path]) < self.count(tokens):
                grown[path].append(self._take(path, pool))
        return grown

    def share(self, pages: Pages, pool: int, prefix: int) -> Pages:
        """Return a table that shares the pages that a prefix fills and owns the one it does not."""
        full = prefix // self.page_tokens
        shared = {path: pages[path][:full] for path in PATHS}
        for path in PATHS:
            self._users.update((path, pool, page) for page in shared[path])
        return self.grow(shared, pool, prefix)

    def give_back(self, pages: Pages, pool: int, slot: int | None = None) -> None:
        """Give pages back, those that nobody else shares, and a slot."""
        for path in PATHS:
            for page in pages[path]:
                self._users[path, pool, page] -= 1
                if not self._users[path, pool, page]:
                    self._free[path, pool].append(page)
        if slot is not None:
            self._slots.append(slot)

    def _take(self, path: str, pool: int) -> int:
        free = self._free[path, pool]
        if not free:
            raise ValueError(f"pool {pool} has no page left; give the scenario more pages")
        page = free.pop()
        self._users[path, pool, page] += 1
        return page


def place_of(slot: int, pool: int, pages: Pages, length: int) -> Place:
    """Return a place as servers are told it."""
    tables = {path: torch.tensor(ids, dtype=torch.int32) for path, ids in pages.items()}
    return Place(slot, pool, tables, length)
