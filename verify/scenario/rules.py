"""What is possible: from events to what a server is asked to do, each with its slots and pages.

One walk over the events serves both ends. It refuses an event that cannot happen, naming it, and it
returns the actions that every server of the scenario is driven by. Slots and pages are a
scheduler's: the last one given back is the next one given out, and nothing is cleared on the way,
so whatever a request leaves behind lies in the next one's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from needlepoint.optimized.protocol.interface import INDEX, MAIN
from needlepoint.optimized.protocol.serving import BF16_STATE, FP32_STATE, MAX_DRAFT, Place
from needlepoint.optimized.serving.ranks import LAYOUTS
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.scenario.actions import JUNK, Action, CallPart, ScenarioError, View
from needlepoint.verify.scenario.events import (
    CALLS,
    MAX_TOKENS,
    TEXTS,
    Accept,
    Copy,
    Draft,
    Event,
    Evict,
    Fork,
    Free,
    Offload,
    Pad,
    Prefill,
    Restore,
    Scenario,
    Split,
    kind_of,
)

SIDES = ("front", "back")
MAX_RANKS = 8
MAX_PADDING = 64


@dataclass
class _Held:
    """What the scheduler knows of a request."""

    name: str
    text: int
    state: str = "new"  # new, live, offloaded, finished
    slot: int = -1
    pool: int = 0
    pages: Pages = field(default_factory=lambda: {"index": [], "main": []})
    texts: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    drafted: int = 0
    kept: int = 0

    @property
    def length(self) -> int:
        return len(self.texts)

    def view(self) -> View:
        return View(
            self.name,
            place_of(self.slot, self.pool, self.pages, self.length),
            np.asarray(self.texts, np.int64),
            np.asarray(self.calls, np.int64),
        )


def check(scenario: Scenario) -> tuple[Action, ...]:
    """Return what a scenario asks of a server, one action an event.

    Padding and splits join the call that they are said of.

    Raises
    ------
    ScenarioError
        If a request, a size or an event is not possible; an event is named by its index.
    """
    _check_sizes(scenario)
    walk = _Walk(scenario)
    actions: list[Action] = []
    for index, event in enumerate(scenario.events):
        try:
            actions += walk.apply(index, event)
        except ValueError as error:
            raise ScenarioError(f"event {index} ({event.describe()}): {error}") from error
    walk.finish()
    return tuple(actions)


class _Walk:
    """The scheduler."""

    def __init__(self, scenario: Scenario) -> None:
        self._events = scenario.events
        self._pools = scenario.pools
        self._store = Store(scenario)
        self._held = {r.name: _Held(r.name, r.text) for r in scenario.requests}
        self._pad: Pad | None = None
        self._split: Split | None = None

    def apply(self, index: int, event: Event) -> list[Action]:
        """Return the action of an event; none for one that waits for its call."""
        if isinstance(event, Pad):
            _require(1 <= event.rows <= MAX_PADDING, f"expected 1 to {MAX_PADDING} rows")
            _require(event.side in SIDES, f"side {event.side!r}, expected one of {SIDES}")
            _require(self._pad is None, "the next call is padded already")
            self._pad = event
            return []
        if isinstance(event, Split):
            _require(2 <= event.ranks <= MAX_RANKS, f"expected 2 to {MAX_RANKS} ranks")
            _require(event.layout in LAYOUTS, f"layout {event.layout!r}, expected one of {LAYOUTS}")
            _require(self._split is None, "the next call is split already")
            self._split = event
            return []
        if isinstance(event, CALLS):
            return [self._call(index, event)]
        self.finish()
        if isinstance(event, Accept):
            return self._accept(index, event)
        if isinstance(event, Fork):
            return [self._fork(index, event)]
        return [self._move(index, event)]

    def finish(self) -> None:
        """Refuse padding or a split that no call followed."""
        for waiting in (self._pad, self._split):
            if waiting is not None:
                at = next(i for i, event in enumerate(self._events) if event is waiting)
                raise ScenarioError(
                    f"event {at} ({waiting.describe()}): is not followed by a call; put it right "
                    "before a prefill, decode or draft"
                )

    def _call(self, index: int, event: Event) -> Action:
        requests: tuple[str, ...] = getattr(event, "requests", ())
        tokens = getattr(event, "tokens", (1,) * len(requests))
        self._require_names(requests, tokens)
        parts = [
            self._part(index, event, self._held[name], count)
            for name, count in zip(requests, tokens, strict=True)
        ]
        action = Action(index, event, tuple(parts))
        if self._pad is not None:
            action = replace(action, pad=self._pad.rows, side=self._pad.side)
        if self._split is not None:
            action = replace(action, ranks=self._split.ranks, layout=self._split.layout)
        self._pad = self._split = None
        return action

    def _part(self, index: int, event: Event, held: _Held, count: int) -> CallPart:
        draft = isinstance(event, Draft)
        name, start = held.name, held.length
        _require(held.state != "finished", f"request {name} is finished")
        _require(held.state != "offloaded", f"request {name} is offloaded; restore it first")
        if not isinstance(event, Prefill):
            _require(held.state == "live", f"request {name} has no tokens; prefill it first")
        _require(not held.drafted, f"request {name} has drafts that wait for an accept")
        most = MAX_DRAFT if draft else MAX_TOKENS
        _require(1 <= count <= most, f"{count} tokens of {name}, expected 1 to {most}")
        _require(
            start + count <= MAX_TOKENS,
            f"request {name} would have {start + count} tokens, expected at most {MAX_TOKENS}",
        )
        if held.state == "new":
            held.slot, held.pool, held.state = self._store.take_slot(), 0, "live"
        held.pages = self._store.grow(held.pages, held.pool, start + count)
        kept = self._kept(index, name, count) if draft else count
        texts = np.full(count, held.text, np.int64)
        texts[kept:] = JUNK
        part = CallPart(held.view(), texts, kept, draft)
        if draft:
            held.drafted, held.kept = count, kept
        else:
            held.texts += texts.tolist()
            held.calls += [start] * count
        return part

    def _kept(self, index: int, name: str, count: int) -> int:
        """Return how many drafts the next accept keeps: they are what the text says."""
        for event in self._events[index + 1 :]:
            if isinstance(event, Accept) and name in event.requests:
                keep = dict(zip(event.requests, event.keep, strict=False)).get(name, 0)
                return min(max(keep, 0), count)
            if isinstance(event, Free | Evict) and event.request == name:
                break
        return 0

    def _accept(self, index: int, event: Accept) -> list[Action]:
        self._require_names(event.requests, event.keep)
        actions = []
        for name, keep in zip(event.requests, event.keep, strict=True):
            held = self._held[name]
            _require(bool(held.drafted), f"request {name} has no drafts")
            _require(
                0 <= keep <= held.drafted,
                f"keeps {keep} of {held.drafted} drafts of {name}, expected 0 to {held.drafted}",
            )
            before, start = held.view(), held.length
            held.texts += [held.text] * keep
            held.calls += [start] * keep
            drafted, held.drafted = held.drafted, 0
            actions.append(Action(index, event, before=before, after=held.view(), drafted=drafted))
        return actions

    def _fork(self, index: int, event: Fork) -> Action:
        self._require_names((event.request, event.source), (event.prefix,) * 2)
        held, source = self._held[event.request], self._held[event.source]
        _require(held.state == "new" and not held.texts, f"request {held.name} has started already")
        self._require_owner(source)
        _require(
            1 <= event.prefix <= source.length,
            f"prefix {event.prefix}, expected 1 to the {source.length} tokens of {source.name}",
        )
        held.slot, held.pool, held.state = self._store.take_slot(), source.pool, "live"
        held.pages = self._store.share(source.pages, source.pool, event.prefix)
        held.texts = source.texts[: event.prefix]
        held.calls = source.calls[: event.prefix]
        return Action(index, event, before=source.view(), after=held.view())

    def _move(self, index: int, event: Event) -> Action:
        name = str(getattr(event, "request", ""))
        self._require_names((name,), (0,))
        held = self._held[name]
        if isinstance(event, Restore):
            _require(held.state == "offloaded", f"request {name} is not offloaded")
            before = held.view()
            held.slot, held.state = self._store.take_slot(), "live"
            held.pages = self._store.grow({"index": [], "main": []}, held.pool, held.length)
            return Action(index, event, before=before, after=held.view())
        if isinstance(event, Free) and held.state == "offloaded":
            before, held.state = held.view(), "finished"
            return Action(index, event, before=before)
        if isinstance(event, Free | Evict):
            _require(held.state == "live", f"request {name} owns no slot and no pages")
            before = held.view()
            self._store.take_back(held.pages, held.pool, held.slot)
            state = "finished" if isinstance(event, Free) else "new"
            self._held[name] = _Held(name, held.text, state)
            return Action(index, event, before=before)
        self._require_owner(held)
        before = held.view()
        if isinstance(event, Offload):
            self._store.take_back(held.pages, held.pool, held.slot)
            held.state = "offloaded"
            return Action(index, event, before=before)
        if isinstance(event, Copy):
            _require(
                0 <= event.pool < self._pools and event.pool != held.pool,
                f"{name} is in pool {held.pool}; expected another one of {self._pools}",
            )
            pages = self._store.grow({"index": [], "main": []}, event.pool, held.length)
            self._store.take_back(held.pages, held.pool)
            held.pages, held.pool = pages, event.pool
            return Action(index, event, before=before, after=held.view())
        raise ScenarioError(f"unknown kind {kind_of(event)}")

    def _require_names(self, names: Sequence[str], values: Sequence[int]) -> None:
        _require(len(names) > 0, "names no request")
        _require(
            len(names) == len(values),
            f"{len(names)} requests and {len(values)} numbers, expected one for each",
        )
        for name in names:
            _require(name in self._held, f"request {name!r} is not one of {sorted(self._held)}")
        _require(len(set(names)) == len(names), "names a request twice")

    def _require_owner(self, held: _Held) -> None:
        _require(held.state == "live", f"request {held.name} owns no pages")
        _require(not held.drafted, f"request {held.name} has drafts that wait for an accept")


def _check_sizes(scenario: Scenario) -> None:
    names = [request.name for request in scenario.requests]
    for request in scenario.requests:
        if names.count(request.name) > 1:
            raise ScenarioError(f"request {request.name} is declared twice")
        if not 0 <= request.text < TEXTS:
            raise ScenarioError(
                f"request {request.name}: text {request.text}, expected 0 to {TEXTS - 1}"
            )
    for name, value, least, most in (
        ("slots", scenario.slots, 1, 64),
        ("pages", scenario.pages, 1, 256),
        ("pools", scenario.pools, 1, 4),
        ("seed", scenario.seed, 0, 2**32 - 1),
    ):
        if not least <= value <= most:
            raise ScenarioError(f"{name} {value}, expected {least} to {most}")
    if scenario.page_tokens not in (128, 256, 512):
        raise ScenarioError(f"page_tokens {scenario.page_tokens}, expected 128, 256 or 512")
    if scenario.state not in (FP32_STATE, BF16_STATE):
        raise ScenarioError(f"state {scenario.state!r}, expected {FP32_STATE!r} or {BF16_STATE!r}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


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

    def take_back(self, pages: Pages, pool: int, slot: int | None = None) -> None:
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
