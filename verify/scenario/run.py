"""Run a scenario on a server and hold every request, at every event, to its tokens run alone.

Every byte of pages and state that an action does not own must stay as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, PagedRows
from needlepoint.optimized.protocol.serving import Cache, Part, Place, Server, StepBatch, StepOutput
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.stages import QUERIES, SCORES, STORED, TOPK, WEIGHTS
from needlepoint.verify.judge.candidate_run import CandidateFailed, blamed
from needlepoint.verify.judge.sides.query_side import query_rows
from needlepoint.verify.layout.decode import Bytes
from needlepoint.verify.layout.geometry import PoolGeometry
from needlepoint.verify.scenario.actions import JUNK, Action, CallPart, View
from needlepoint.verify.scenario.bank import Bank
from needlepoint.verify.scenario.events import Accept, Copy, Evict, Fork, Free, Offload, Restore
from needlepoint.verify.scenario.judge import Judge, Problem, Seen, opened


@dataclass(frozen=True)
class Failure:
    """The first event at which a scenario went wrong."""

    event: int  # Index of the event.
    request: str  # Name of the request; empty for a byte that nobody owns.
    problem: Problem  # Stage, token and words.


@dataclass
class Outcome:
    """What a run of a scenario on one server found."""

    failure: Failure | None = None  # The first one, or None.
    # Rows compared by (path, stage).
    compared: Counter[tuple[str, str]] = field(default_factory=Counter)


class _Found(CandidateFailed):
    """A failure, thrown to the end of the run past whatever blames a candidate."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def run_scenario(
    actions: Sequence[Action],
    server: Server,
    tokens: Bank,
    judge: Judge,
    name: str,
    progress: Progress,
) -> Outcome:
    """Run a scenario.

    Parameters
    ----------
    actions
        From :func:`~needlepoint.verify.scenario.rules.check`.
    server
        A fresh server of the bank's layer.
    tokens
        The bank.
    judge
        The oracle.
    name
        Of the candidate, for messages.
    progress
        Told of every action.

    Returns
    -------
    Outcome
        The run ends at the first failure.

    Raises
    ------
    CandidateFailed
        If the server raises; the message names the candidate, the layer and the event.
    """
    run = _Run(server, tokens, judge)
    try:
        # A fault may compute with unwritten state, NaN: bytes show that, warnings are not needed.
        with np.errstate(all="ignore"):
            for action in actions:
                with blamed(f"{name}, {action.words}", tokens.inputs.layer):
                    run.apply(action)
                progress.advance()
            run.finish(actions[-1].index if actions else 0)
    except _Found as found:
        run.outcome.failure = found.failure
    return run.outcome


class _Run:
    def __init__(self, server: Server, tokens: Bank, judge: Judge) -> None:
        self._server, self._bank, self._judge = server, tokens, judge
        self.outcome = Outcome()
        self._guard = Guard(server.cache, _geometries(server))
        self._live: dict[str, View] = {}
        self._seen: dict[str, list[Seen]] = {}
        self._saved: dict[str, object] = {}

    def apply(self, action: Action) -> None:
        """Do one action and judge what it touched."""
        self._index = action.index
        event, before, after = action.event, action.before, action.after
        if action.parts:
            self._call(action)
            return
        if before is None:
            raise ValueError(f"event {action.index}: no request; expected one from check()")
        name = before.request if after is None else after.request
        owned: list[Owned] = []
        if isinstance(event, Accept):
            self._server.accept(before.place, action.drafted, len(after.texts) - len(before.texts))  # type: ignore[union-attr]
            owned.append(self._owner(before, entries=self._span(before, action.drafted)))
        elif isinstance(event, Fork) and after is not None:
            self._server.fork(before.place, after.place, self._bank.tail(after.texts))
            owned.append(self._owner(after, fresh_from=len(after.texts)))
        elif isinstance(event, Offload):
            self._end(before)
            self._saved[name] = self._server.offload(before.place)
        elif isinstance(event, Restore) and after is not None:
            self._server.restore(self._saved.pop(name), after.place)
            owned.append(self._owner(after))
        elif isinstance(event, Copy) and after is not None:
            self._server.move(before.place, after.place)
            owned.append(self._owner(after))
        elif isinstance(event, Free | Evict):
            if name not in self._saved:
                self._end(before)
                self._server.release(before.place)
                owned.append(self._slot_only(before))
            self._saved.pop(name, None)
            self._seen.pop(name, None)
        self._require_untouched(owned)
        if after is None:
            self._live.pop(name, None)
            return
        self._live[name] = after
        first = 0 if not isinstance(event, Accept) else len(before.texts) // self._bank.ratio
        self._rows(after, first)

    def finish(self, index: int) -> None:
        """Judge every request that is still there."""
        self._index = index
        for view in self._live.values():
            self._end(view)

    def _call(self, action: Action) -> None:
        batch, rows = self._batch(action)
        output = self._server.step(batch)
        self._require_untouched(
            [
                self._owner(p.before, entries=self._span(p.before, len(p.texts)))
                for p in action.parts
            ]
        )
        for number, (part, row) in enumerate(zip(action.parts, rows, strict=True)):
            view = part.after
            self._live[view.request] = view if not part.draft else part.before
            self._rows(view, len(part.before.texts) // self._bank.ratio)
            self._returned(part, row, number, output)

    def _batch(self, action: Action) -> tuple[StepBatch, list[int]]:
        texts, places, at = [], [], action.pad if action.side == "front" else 0
        pad = self._bank.rows(np.full(action.pad, JUNK), 0)
        parts, rows = [], []
        for part in action.parts:
            start = len(part.before.texts)
            places.append(self._bank.rows(part.texts, start))
            rows.append(at)
            parts.append(Part(part.before.place, at, len(part.texts), part.draft))
            at += len(part.texts)
            texts.append(part.texts)
        fed = torch.cat([pad, *places] if action.side == "front" else [*places, pad])
        given = {path: self._bank.tokens(path, fed) for path in self._bank.paths}
        query = self._bank.query(fed)
        return StepBatch(tuple(parts), given, query, action.ranks, action.layout), rows

    def _returned(self, part: CallPart, row: int, number: int, output: StepOutput) -> None:
        """Judge the queries of the tokens that stay; keep scores and picks for the end."""
        view, start, kept = part.after, len(part.before.texts), part.kept
        if output.query is not None:
            found = query_rows(output.query, slice(row, row + kept))
            self._fail(view, self._judge.queries(view, start, found))
            for stage in (QUERIES, WEIGHTS):
                self.outcome.compared["query", stage] += kept
        scores = None if output.scores is None else output.scores[number][:kept].cpu()
        topk = None if output.topk is None else output.topk[row : row + kept].cpu()
        if kept:
            self._seen.setdefault(view.request, []).append(Seen(start, scores, topk))

    def _rows(self, view: View, first: int) -> None:
        """Judge stored rows of a request from entry ``first`` on."""
        entries = len(view.texts) // self._bank.ratio
        for path in self._bank.paths:
            self._fail(
                view, self._judge.rows(path, view, first, self._paged(path, view.place, entries))
            )
            self.outcome.compared[path, STORED] += max(0, entries - first)

    def _end(self, view: View) -> None:
        """Judge all of a request once more, and what calls said of it."""
        self._rows(view, 0)
        seen = self._seen.pop(view.request, [])
        if INDEX not in self._bank.paths or not seen:
            return
        self._fail(view, self._judge.selection(view, seen))
        for part in seen:
            self.outcome.compared[INDEX, SCORES] += 0 if part.scores is None else len(part.scores)
            self.outcome.compared[INDEX, TOPK] += 0 if part.topk is None else len(part.topk)

    def _paged(self, path: str, place: Place, entries: int) -> PagedRows:
        cache = self._server.cache
        return PagedRows(
            layout=cache.layouts[path],
            pool=cache.pools[path][place.pool].cpu(),
            page_size=cache.page_size,
            page_table=(place.pages[path],),
            entries=(entries,),
        )

    def _span(self, view: View, count: int) -> tuple[int, int]:
        """Return the entries that so many more tokens of a request complete."""
        length, ratio = len(view.texts), self._bank.ratio
        return length // ratio, (length + count) // ratio

    def _owner(
        self,
        view: View,
        entries: tuple[int, int] | None = None,
        fresh_from: int | None = None,
    ) -> Owned:
        """Return what a request may change: some entries, or its pages from a token on."""
        place = view.place
        shared = 0 if fresh_from is None else fresh_from // self._page_tokens()
        pages = {
            path: place.pages[path].numpy().astype(np.int64)[shared:] for path in self._bank.paths
        }
        if entries is None:
            return Owned(place.slot, place.pool, pages)
        return Owned(place.slot, place.pool, pages, *entries)

    def _slot_only(self, view: View) -> Owned:
        none = {path: np.zeros(0, np.int64) for path in self._bank.paths}
        return Owned(view.place.slot, view.place.pool, none)

    def _page_tokens(self) -> int:
        return self._server.cache.page_size * self._bank.ratio

    def _require_untouched(self, owned: Sequence[Owned]) -> None:
        found = self._guard.check(owned)
        if found is not None:
            problem = Problem("main", STORED, 0, None, found)
            raise _Found(Failure(self._index, "", problem))

    def _fail(self, view: View, problem: Problem | None) -> None:
        if problem is not None:
            raise _Found(Failure(self._index, view.request, problem))


def _geometries(server: Server) -> dict[str, PoolGeometry]:
    cache = server.cache
    found = {}
    for path, pools in cache.pools.items():
        empty: Tensor = pools[0][:0].cpu()
        found[path] = opened(
            PagedRows(cache.layouts[path], empty, cache.page_size, (), ())
        ).geometry
    return found


@dataclass(frozen=True)
class Owned:
    """What one request may change in one action."""

    slot: int | None  # Its slot, or None where the state must stay.
    pool: int  # Its pool.
    pages: dict[str, NDArray[np.int64]]  # By path: page ids.
    # Entries it may write; None for every row of the pages, padding included.
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
