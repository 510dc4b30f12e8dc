"""Servers with one fault each, for :mod:`~needlepoint.verify.selftest.faults.scenario`.

Each is the emulated server with one method changed, so that whole prompts stay right and only what
lies between calls is wrong: windows and state, drafts, prefixes, offload, copies and slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, PagedRows
from needlepoint.optimized.protocol.serving import Part, Place, StepBatch, StepOutput, TokenRows
from needlepoint.optimized.serving.cache import Saved
from needlepoint.optimized.serving.emulated import EmulatedServer, Windows
from needlepoint.optimized.serving.plan import I64, window_slots


class Overlap(EmulatedServer):
    """A call sees only its own windows: the older half is lost where it lies in the state."""

    def windows(self, path: str, batch: StepBatch, part: I64, entry: I64) -> Windows:
        """Mask the older four slots of windows that are a call's first."""
        found = super().windows(path, batch, part, entry)
        if self.parameters.ratio == 4:
            start = np.array([own.place.length for own in batch.parts])[part]
            found.masked[:4, (entry - 1) * 4 < start] = True
        return found


class SlotBias(EmulatedServer):
    """The position embedding counts from the start of the call, not of the request."""

    def windows(self, path: str, batch: StepBatch, part: I64, entry: I64) -> Windows:
        """Move the scores by the difference of the two embeddings."""
        found = super().windows(path, batch, part, entry)
        ratio = self.parameters.ratio
        ape = self._compressor_parameters(path).ape.numpy()
        start = np.array([own.place.length for own in batch.parts])[part]
        place = np.arange(window_slots(ratio))[:, None] % ratio
        moved = ape[(place - start) % ratio] - ape[np.broadcast_to(place, (len(place), len(part)))]
        if ratio == 4:
            width = moved.shape[2] // 2
            moved = np.concatenate((moved[:4, :, :width], moved[4:, :, width:]))
        return replace(found, score=found.score + moved.astype(np.float32))


class Tail(EmulatedServer):
    """Tokens behind the last full window of a call of several are not kept."""

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Drop them."""
        count, ratio = len(rows.kv), self.parameters.ratio
        if count > 1:
            count = max(0, (first + count) // ratio * ratio - first)
        super().write_state(path, place, first, TokenRows(rows.kv[:count], rows.score[:count]))


class Padding(EmulatedServer):
    """Rows are counted without the padding before them."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Move every part to where it would be without padding at the front."""
        before = min(part.row for part in batch.parts)
        parts = tuple(replace(part, row=part.row - before) for part in batch.parts)
        out = super().step(replace(batch, parts=parts))
        if out.query is None or out.topk is None:
            return out
        query = out.query
        moved = replace(
            query,
            codes=query.codes.roll(before, 0),
            scales=None if query.scales is None else query.scales.roll(before, 0),
            weights=query.weights.roll(before, 0),
        )
        return replace(out, query=moved, topk=out.topk.roll(before, 0))


class PaddingStored(EmulatedServer):
    """Padding is stored in the first row of the first page."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Write a row for padding."""
        out = super().step(batch)
        if len(batch.tokens[MAIN].kv) > sum(part.count for part in batch.parts):
            self.cache.pools[MAIN][0][0, :16] = 7
        return out


class EntryPosition(EmulatedServer):
    """Entries of a call are rotated as if the call were the start of the request."""

    def _finish(self, path: str, batch: StepBatch, windows: Windows, pooled: np.ndarray) -> None:
        table = self.parameters.rope_table
        start = {i: part.place.length for i, part in enumerate(batch.parts)}
        ratio = self.parameters.ratio
        for number in np.unique(windows.part):
            own = windows.part == number
            moved = table.roll(start[int(number)] // ratio * ratio, 0)
            self.parameters = replace(self.parameters, rope_table=moved)
            one = Windows(
                windows.part[own], windows.entry[own], windows.kv, windows.score, windows.masked
            )
            super()._finish(path, batch, one, pooled[own])
            self.parameters = replace(self.parameters, rope_table=table)


class StridedAsRun(EmulatedServer):
    """Strided tokens of a context-parallel rank are taken for a run."""

    ranks, layout = 1, ""

    def visible(self, part: Part) -> Tensor:
        """Count the tokens of each rank from its first one on."""
        seen = super().visible(part)
        ranks = self.ranks
        if ranks == 1 or self.layout != "strided":
            return seen
        first = torch.arange(len(seen)) % ranks
        place = torch.arange(len(seen)) // ranks
        return (part.place.length + first + place + 1) // self.parameters.ratio

    def step(self, batch: StepBatch) -> StepOutput:
        """Remember the geometry."""
        self.ranks, self.layout = batch.ranks, batch.layout
        return super().step(batch)


class LocalLength(EmulatedServer):
    """Each rank rounds its share of the entries down, so the newest are lost."""

    ranks = 1

    def step(self, batch: StepBatch) -> StepOutput:
        """Remember the ranks."""
        self.ranks = batch.ranks
        return super().step(batch)

    def visible(self, part: Part) -> Tensor:
        """Give every rank the same whole number of entries."""
        seen = super().visible(part)
        return seen // self.ranks * self.ranks


class Unfinished(EmulatedServer):
    """A token sees the entry of the window that it stands in, finished or not."""

    def visible(self, part: Part) -> Tensor:
        """Round up."""
        first = part.place.length + 1
        ratio = self.parameters.ratio
        seen = (torch.arange(first, first + part.count) + ratio - 1) // ratio
        return seen.clamp(max=(part.place.length + part.count) // ratio)


class NewestHidden(EmulatedServer):
    """A decoded token does not see the entry that it completes."""

    def visible(self, part: Part) -> Tensor:
        """Count the tokens before it."""
        seen = super().visible(part)
        return (self.positions(part)) // self.parameters.ratio if part.count == 1 else seen


class FirstPages(EmulatedServer):
    """Every request of a call is stored through the page table of the first."""

    def paged(self, path: str, place: Place, entries: int) -> PagedRows:
        """Use the first table."""
        if self.first is not None and len(self.first.pages[path]) >= len(place.pages[path]):
            place = replace(place, pages=self.first.pages, pool=self.first.pool)
        return super().paged(path, place, entries)

    first: Place | None = None

    def step(self, batch: StepBatch) -> StepOutput:
        """Remember the first place."""
        self.first = batch.parts[0].place
        return super().step(batch)


class FirstSlot(EmulatedServer):
    """Every request of a call keeps its tokens in the slot of the first."""

    first: Place | None = None

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Use the first slot."""
        slot = place.slot if self.first is None else self.first.slot
        super().write_state(path, replace(place, slot=slot), first, rows)

    def step(self, batch: StepBatch) -> StepOutput:
        """Remember the first place."""
        self.first = batch.parts[0].place
        out = super().step(batch)
        self.first = None
        return out


class StaleMetadata(EmulatedServer):
    """A decode replays the places of the first decode of as many requests."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.captured: dict[int, tuple[Part, ...]] = {}

    def step(self, batch: StepBatch) -> StepOutput:
        """Replay a captured call."""
        parts = batch.parts
        if all(part.count == 1 and not part.draft for part in parts) and batch.ranks == 1:
            rows = [part.row for part in self.captured.get(len(parts), parts)]
            held = self.captured.setdefault(len(parts), parts)
            if rows == [part.row for part in parts]:
                batch = replace(batch, parts=held)
        return super().step(batch)


class FirstDecodeStale(EmulatedServer):
    """The first decode after a prompt runs with the lengths of the prompt: no window completes."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.prompted: set[int] = set()
        self.stale: set[int] = set()

    def step(self, batch: StepBatch) -> StepOutput:
        """Notice who comes from a prompt."""
        single = {part.place.slot for part in batch.parts if part.count == 1}
        self.stale = self.prompted & single
        out = super().step(batch)
        self.prompted -= {part.place.slot for part in batch.parts}
        self.prompted |= {part.place.slot for part in batch.parts if part.count > 1}
        return out

    def completed(self, batch: StepBatch) -> tuple[I64, I64]:
        """Leave out what those complete."""
        part, entry = super().completed(batch)
        keep = np.array([batch.parts[i].place.slot not in self.stale for i in part], np.bool_)
        return part[keep], entry[keep]


class Bf16State(EmulatedServer):
    """A state that is declared fp32 keeps bf16."""

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Round what is kept."""
        kv, score = (x.bfloat16().float() for x in (rows.kv, rows.score))
        super().write_state(path, place, first, TokenRows(kv, score))


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
