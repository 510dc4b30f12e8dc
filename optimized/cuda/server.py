"""The CUDA candidates step by step: the one-launch stores on state and pages that stay.

The state is the queue of ``serving/plan.py``: a call appends the tokens that a
window still to come needs, and where the queue ends is kept on the host, one head a slot. A draft
is stored without touching the queue; the tokens that are accepted are fed once more, which writes
their rows again and appends them. Scores and picks of a call are not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.cuda.query import store_queries
from needlepoint.optimized.cuda.store import PagedPool, store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.protocol.interface import INDEX, QueryRows
from needlepoint.optimized.protocol.serving import (
    Cache,
    LayerParameters,
    Part,
    Place,
    StepBatch,
    StepOutput,
    TokenRows,
)
from needlepoint.optimized.serving.cache import RingServer
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store


@dataclass(frozen=True)
class Feed:
    """Tokens of one request for the stores.

    Attributes
    ----------
    place
        Where the request lives, and its length before.
    tokens
        By path: projections on the device.
    """

    place: Place
    tokens: Mapping[str, TokenRows]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(next(iter(self.tokens.values())).kv)


class CudaServer(RingServer):
    """One layer of a ``cuda:`` candidate.

    Parameters
    ----------
    parameters
        The layer.
    cache
        From :func:`~needlepoint.optimized.serving.cache.new_cache`, on the device.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    """

    def __init__(self, parameters: LayerParameters, cache: Cache, key_format: str) -> None:
        super().__init__(parameters, cache)
        self.key_format = key_format
        self.device = next(iter(cache.state.values())).device
        self._table = parameters.rope_table.to(self.device)
        self._weights = {}
        for path in cache.pools:
            index = parameters.index
            own = index if path == INDEX and index is not None else parameters.main
            self._weights[path] = StoreWeights.prepare(
                parameters.ratio,
                own.ape.to(self.device),
                own.norm_weight.to(self.device),
                self._table,
                parameters.norm_eps,
            )
        self._head = dict.fromkeys(range(len(next(iter(cache.state.values())))), 0)
        self._drafted: dict[int, Feed] = {}

    def step(self, batch: StepBatch) -> StepOutput:
        """Store the entries that a call completes and keep its tokens; ranks change nothing."""
        feeds = [self._feed(batch, part) for part in batch.parts]
        for part, feed in zip(batch.parts, feeds, strict=True):
            if part.draft:
                self._drafted[part.place.slot] = feed
        drafts = [part.draft for part in batch.parts]
        for pool in sorted({feed.place.pool for feed in feeds}):
            for draft in (False, True):
                own = [
                    feed
                    for feed, drafted in zip(feeds, drafts, strict=True)
                    if feed.place.pool == pool and drafted is draft
                ]
                if own:
                    self._store(own, keep=not draft)
        return StepOutput(query=self._queries(batch))

    def _feed(self, batch: StepBatch, part: Part) -> Feed:
        rows = slice(part.row, part.row + part.count)
        tokens = {
            path: TokenRows(given.kv[rows].to(self.device), given.score[rows].to(self.device))
            for path, given in batch.tokens.items()
        }
        return Feed(part.place, tokens)

    def _store(self, feeds: list[Feed], *, keep: bool) -> None:
        """Launch the store of every path over tokens of one pool."""
        head = dict(self._head)
        for path, pools in self.cache.pools.items():
            plan = plan_feeds(
                self.parameters.ratio,
                feeds,
                path,
                self.cache.page_size,
                head,
                slots=len(self._head),
                keep=keep,
            )
            kv, score = (
                torch.cat([getattr(feed.tokens[path], name) for feed in feeds])
                for name in ("kv", "score")
            )
            pool = PagedPool(
                self.cache.layouts[path], pools[feeds[0].place.pool], self.cache.page_size
            )
            state = self.cache.state[path]
            store(kv, score, self._weights[path], plan.to(self.device), pool, state)
            for feed, end in zip(feeds, plan.head.tolist(), strict=True):
                self._head[feed.place.slot] = end

    def _queries(self, batch: StepBatch) -> QueryRows | None:
        given = batch.query
        if given is None:
            return None
        positions = torch.zeros(len(given.q), dtype=torch.int32)
        for part in batch.parts:
            start = part.place.length
            positions[part.row : part.row + part.count] = torch.arange(start, start + part.count)
        return store_queries(
            given.q.to(self.device),
            given.weights.to(self.device),
            positions.to(self.device),
            self._table,
            self.parameters.weight_scale,
            self.key_format,
        )

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Feed the accepted tokens once more, into the queue this time."""
        feed = self._drafted.pop(place.slot)
        if kept:
            tokens = {
                path: TokenRows(rows.kv[:kept], rows.score[:kept])
                for path, rows in feed.tokens.items()
            }
            self._store([Feed(place, tokens)], keep=True)

    def write_state(self, path: str, place: Place, first: int, rows: TokenRows) -> None:
        """Start the queue of a slot with the tail of a prefix."""
        state, count = self.cache.state[path], len(rows.kv)
        both = torch.stack((rows.kv, rows.score), dim=1)
        state[place.slot, :count] = both.to(state)
        self._head[place.slot] = count % state.shape[1]

    def offload(self, place: Place) -> object:
        """Return state, pages and the end of the queue."""
        return super().offload(place), self._head[place.slot]

    def restore(self, saved: object, place: Place) -> None:
        """Put them back in another place."""
        if not isinstance(saved, tuple):
            raise ValueError(f"restore: {type(saved).__name__}, expected what offload returned")
        super().restore(saved[0], place)
        self._head[place.slot] = int(saved[1])

    def release(self, place: Place) -> None:
        """Forget drafts and the end of the queue."""
        self._drafted.pop(place.slot, None)
        self._head[place.slot] = 0


def plan_feeds(
    ratio: int,
    feeds: list[Feed],
    path: str,
    page_size: int,
    head: Mapping[int, int],
    *,
    slots: int,
    keep: bool,
) -> StorePlan:
    """Plan the store of a path over tokens of several requests, on the CPU.

    ``head`` is the end of the queue of each of ``slots``; ``keep``: the tokens enter it. It is a
    decode plan where no request has more than one token.
    """
    columns = max((len(feed.place.pages[path]) for feed in feeds), default=0)
    table = torch.full((slots, max(columns, 1)), -1, dtype=torch.int32)
    for feed in feeds:
        pages: Tensor = feed.place.pages[path]
        table[feed.place.slot, : len(pages)] = pages
    chunks = Chunks(
        request=np.array([feed.place.slot for feed in feeds]),
        start=np.array([feed.place.length for feed in feeds]),
        length=np.array([feed.count for feed in feeds]),
        head=np.array([head[feed.place.slot] for feed in feeds]),
    )
    decode = all(feed.count == 1 for feed in feeds)
    return plan_store(ratio, chunks, table, page_size, keep_state=keep, decode=decode)
