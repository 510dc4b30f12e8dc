"""Servers that lose or mix up what they keep: prefixes, offload, copies and slots.

As :mod:`~needlepoint.verify.selftest.faults.servers`: one method each is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from needlepoint.optimized.protocol.interface import INDEX, MAIN
from needlepoint.optimized.protocol.serving import Place, StepBatch, TokenRows
from needlepoint.optimized.serving.cache import Saved
from needlepoint.optimized.serving.emulated import EmulatedServer, Windows
from needlepoint.optimized.serving.plan import I64


class StalePrefix(EmulatedServer):
    """A prefix hit takes the source's state as it is now, not as it was at the prefix."""

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Copy the ring as it is."""
        super().fork(source, target, tail)
        for state in self.cache.state.values():
            state[target.slot] = state[source.slot]


class NoPrefixState(EmulatedServer):
    """A prefix hit restores pages and leaves the state of the slot's last owner."""

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Copy pages alone."""
        for path in self.cache.pools:
            self.copy_pages(path, source, target)


class PartialPage(EmulatedServer):
    """Only full pages of a prefix are taken over."""

    def copy_pages(self, path: str, source: Place, target: Place) -> None:
        """Leave the page that the prefix does not fill."""
        full = target.length // (self.cache.page_size * self.parameters.ratio)
        cut = {p: ids[:full] for p, ids in target.pages.items()}
        super().copy_pages(path, source, replace(target, pages=cut))


class IndexLost(EmulatedServer):
    """Offload takes the main pages and not the index pages beside them."""

    def restore(self, saved: object, place: Place) -> None:
        """Put back what was taken."""
        if isinstance(saved, Saved):
            pages = {path: rows for path, rows in saved.pages.items() if path != INDEX}
            super().restore(replace(saved, pages=pages), place)
            for path in self.cache.state:
                self.cache.state[path][place.slot] = saved.state[path]


class StateLost(EmulatedServer):
    """Offload takes the pages and not the state."""

    def restore(self, saved: object, place: Place) -> None:
        """Put back pages; the slot keeps what its last owner left."""
        before = {path: state[place.slot].clone() for path, state in self.cache.state.items()}
        super().restore(saved, place)
        for path, state in before.items():
            self.cache.state[path][place.slot] = state


class WrongSlot(EmulatedServer):
    """A restored state goes to the slot that it came from, whoever lives there now."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.slots: dict[int, int] = {}

    def offload(self, place: Place) -> object:
        """Remember the slot."""
        saved = super().offload(place)
        self.slots[id(saved)] = place.slot
        return saved

    def restore(self, saved: object, place: Place) -> None:
        """Write to the old slot."""
        super().restore(saved, replace(place, slot=self.slots.get(id(saved), place.slot)))


class OneTable(EmulatedServer):
    """Pages are copied by the table of the main pool, whichever pool they are of."""

    def copy_pages(self, path: str, source: Place, target: Place) -> None:
        """Use one table for all."""
        wrong = replace(source, pages=dict.fromkeys(source.pages, source.pages[MAIN]))
        super().copy_pages(path, wrong, target)


class LastPageLeft(EmulatedServer):
    """A copy to another pool leaves the last page behind."""

    def move(self, source: Place, target: Place) -> None:
        """Copy all but the last."""
        cut = {path: ids[:-1] for path, ids in target.pages.items()}
        super().move(source, replace(target, pages=cut))


class FormerOwner(EmulatedServer):
    """Entry 0 reads the slots before it from the state instead of masking them."""

    def windows(self, path: str, batch: StepBatch, part: I64, entry: I64) -> Windows:
        """Fill the masked slots of entry 0 with what the ring holds, where it holds numbers."""
        found = super().windows(path, batch, part, entry)
        ratio = self.parameters.ratio
        for column in np.flatnonzero(entry == 0) if ratio == 4 else ():
            place = batch.parts[part[column]].place
            kept = self.read_state(path, place, -4, 0).numpy()
            if not np.isnan(kept).any():
                width = found.kv.shape[2]
                found.kv[:4, column] = kept[:, 0, :width]
                found.score[:4, column] = kept[:, 1, :width]
                found.masked[:4, column] = False
        return found
