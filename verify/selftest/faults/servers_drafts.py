"""Servers that treat drafts wrongly: rejected tokens kept or visible, rows that have no room.

As :mod:`~needlepoint.verify.selftest.faults.servers`: one method each is changed.
"""

from __future__ import annotations

from torch import Tensor

from needlepoint.optimized.protocol.serving import Part, Place
from needlepoint.optimized.serving.emulated import EmulatedServer
from needlepoint.optimized.serving.plan import window_slots


class DraftsKept(EmulatedServer):
    """The state is a queue with a counter of its own, and rejected drafts stay in it."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.extra: dict[int, int] = {}

    def ring_places(self, place: Place, positions: Tensor) -> Tensor:
        """Count rejected tokens as tokens."""
        return super().ring_places(place, positions + self.extra.get(place.slot, 0))

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Forget to step back."""
        self.extra[place.slot] = self.extra.get(place.slot, 0) + drafted - kept

    def release(self, place: Place) -> None:
        """Start the next request at zero."""
        self.extra.pop(place.slot, None)


class RejectedVisible(EmulatedServer):
    """Entries that rejected drafts completed stay visible for the next call."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.longest: dict[int, int] = {}

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Remember how far the drafts went."""
        self.longest[place.slot] = place.length + drafted

    def visible(self, part: Part) -> Tensor:
        """Count from the longest that the request ever was."""
        seen = super().visible(part)
        longest = self.longest.pop(part.place.slot, 0)
        entries = (part.place.length + part.count) // self.parameters.ratio
        return seen.clamp(min=min(longest // self.parameters.ratio, entries))


class DraftsBlind(EmulatedServer):
    """Every draft sees what the first of them sees."""

    def visible(self, part: Part) -> Tensor:
        """Use the length before the draft for all of it."""
        seen = super().visible(part)
        return seen[:1].expand(len(seen)) if part.draft else seen


class ShortRing(EmulatedServer):
    """The ring has no room for drafts: they overwrite tokens that a window still needs."""

    def ring_places(self, place: Place, positions: Tensor) -> Tensor:
        """Use as many rows as a window has."""
        return positions % window_slots(self.parameters.ratio)
