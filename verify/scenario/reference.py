"""The reference as a server: its own rings and rows, step by step, and its rows from scratch.

The reference must hold to the oracle before any candidate is asked to. Its rows are float64 numbers
in pages of ``rows-f64``, so they are compared to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.pages import UNWRITTEN
from needlepoint.optimized.protocol.interface import INDEX, MAIN, CandidateInfo, QueryRows, StageKey
from needlepoint.optimized.protocol.serving import (
    BF16_STATE,
    Cache,
    CacheSpec,
    LayerParameters,
    Part,
    Place,
    StepBatch,
    StepOutput,
    TokenRows,
)
from needlepoint.optimized.serving.ranks import token_shards
from needlepoint.reference.indexer import head_weights, index_scores, rotate_query
from needlepoint.reference.keyside import KeySide, store
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic, Precision
from needlepoint.reference.request import KeyState
from needlepoint.reference.rope import rope_rows
from needlepoint.reference.stages import CompressedRows, KeyProjections, QueryProjections
from needlepoint.reference.topk import select_topk, visible_entries
from needlepoint.verify.layout.decode import Bytes
from needlepoint.verify.layout.geometry import ROWS_F64
from needlepoint.verify.scenario.actions import Ints, View
from needlepoint.verify.scenario.bank import CONFIG, Bank, bank, reference_layer
from needlepoint.verify.scenario.events import MAX_TOKENS
from needlepoint.verify.scenario.expected import decoded_rows


@dataclass(frozen=True)
class _Saved:
    keys: Mapping[str, KeyState]
    pages: Mapping[str, Tensor]


class ReferenceServer:
    """One layer of the reference as a :class:`~needlepoint.optimized.protocol.serving.Server`.

    Parameters
    ----------
    ratio, seed
        Of the bank.
    spec
        Sizes of the cache; the state lies in the reference's own rings, one set a slot.
    """

    def __init__(self, ratio: int, seed: int, spec: CacheSpec) -> None:
        layer = reference_layer(ratio, seed)
        self._arithmetic = scenario_arithmetic(spec.state)
        self._side = KeySide(ratio, CONFIG.norm_eps, layer.frequencies, self._arithmetic)
        self._weights = {INDEX: layer.weights.index, MAIN: layer.weights.main}
        self._paths = tuple(path for path in (INDEX, MAIN) if self._weights[path] is not None)
        # One state a slot for the life of the server: slots are reused without clearing.
        self._keys = [self._new_state() for _ in range(spec.slots)]
        self._pending: dict[int, Mapping[str, KeyProjections]] = {}
        pools = {
            path: tuple(
                torch.full(
                    (spec.pages, spec.page_size * WIDTHS[path] * 8), UNWRITTEN, dtype=torch.uint8
                )
                for _ in range(spec.pools)
            )
            for path in self._paths
        }
        layouts = dict.fromkeys(self._paths, ROWS_F64)
        self._cache = Cache({}, pools, layouts, spec.page_size)

    def _new_state(self) -> dict[str, KeyState]:
        return {
            path: KeyState(self._side.ratio, WIDTHS[path], self._arithmetic) for path in self._paths
        }

    @property
    def cache(self) -> Cache:
        """The pages; the state is the reference's own and not shown."""
        return self._cache

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a call, request by request."""
        rows = 0 if batch.query is None else len(batch.query.q)
        topk = torch.full((rows, CONFIG.index_topk), -1, dtype=torch.int32)
        codes = torch.zeros(rows, CONFIG.index_n_heads, CONFIG.index_head_dim, dtype=torch.float64)
        weights = torch.zeros(rows, CONFIG.index_n_heads, dtype=torch.float64)
        scores = []
        for part in batch.parts:
            at = slice(part.row, part.row + part.count)
            given = {
                path: KeyProjections(own.kv[at].double(), own.score[at].double())
                for path, own in batch.tokens.items()
            }
            keys = self._keys[part.place.slot]
            if part.place.length == 0:
                for state in keys.values():
                    state.restart()
            if part.draft:
                self._pending[part.place.slot] = given
                keys = deepcopy(keys)
            self._store(part.place, given, keys)
            if batch.query is None:
                continue
            query = QueryProjections(batch.query.q[at].double(), batch.query.weights[at].double())
            codes[at], weights[at], found, topk[at] = self._select(part, query, keys, batch)
            scores.append(found)
        if batch.query is None:
            return StepOutput()
        return StepOutput(QueryRows("float64", codes, None, weights, False), tuple(scores), topk)

    def _store(
        self, place: Place, given: Mapping[str, KeyProjections], keys: Mapping[str, KeyState]
    ) -> None:
        for path in self._paths:
            rows = key_rows(self._side, path, given[path], self._weights[path], keys[path])
            if len(rows.stored.values):
                keys[path].rows.append(rows.stored.values)
                self._write(path, place, rows)

    def _write(self, path: str, place: Place, rows: CompressedRows) -> None:
        size = self._cache.page_size
        entry = torch.arange(rows.first_entry, rows.first_entry + len(rows.stored.values))
        pool = self._cache.pools[path][place.pool]
        view = pool.view(torch.float64).view(len(pool), size, WIDTHS[path])
        view[place.pages[path].long()[entry // size], entry % size] = rows.stored.values

    def _select(
        self, part: Part, query: QueryProjections, keys: Mapping[str, KeyState], batch: StepBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return stored queries, weights, scores and picks; each rank does its own tokens."""
        positions = torch.arange(part.place.length, part.place.length + part.count)
        codes, weights = reference_queries(query, positions, self._side)
        visible = visible_entries(positions, self._side.ratio)
        rows = keys[INDEX].rows.rows
        scores = torch.full((part.count, len(rows)), -torch.inf, dtype=torch.float64)
        for own in token_shards(part.count, batch.ranks, batch.layout):
            if len(own) and len(rows):
                scores[own] = index_scores(
                    codes[own], weights[own], rows, visible[own], self._arithmetic
                )
        return codes, weights, scores, select_topk(scores, CONFIG.index_topk)

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Feed the tokens that stay to the state, which drafts never entered."""
        given = self._pending.pop(place.slot)
        if kept:
            own = {p: KeyProjections(g.kv[:kept], g.score[:kept]) for p, g in given.items()}
            self._store(place, own, self._keys[place.slot])

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Start from the source's finished rows and the tail of the prefix."""
        for path in self._paths:
            state = self._keys[target.slot][path]
            state.restart()
            entries = target.length // self._side.ratio
            pool = self._cache.pools[path][target.pool]
            old, new = (
                source.pages[path].long()[: len(target.pages[path])],
                target.pages[path].long(),
            )
            own = old != new
            pool[new[own]] = pool[old[own]]
            state.rows.append(self._keys[source.slot][path].rows.rows[:entries])
            own_weights, rows = self._weights[path], tail[path]
            if own_weights is not None:
                state.tokens.next_position = target.length - len(rows.kv)
                state.tokens.append(rows.kv, rows.score, own_weights.ape)

    def offload(self, place: Place) -> object:
        """Return a copy of state and pages."""
        pages = {
            path: pools[place.pool][place.pages[path].long()]
            for path, pools in self._cache.pools.items()
        }
        return _Saved(deepcopy(self._keys[place.slot]), pages)

    def restore(self, saved: object, place: Place) -> None:
        """Put it back in another place."""
        if not isinstance(saved, _Saved):
            raise ValueError(f"restore: {type(saved).__name__}, expected what offload returned")
        self._keys[place.slot] = dict(saved.keys)
        for path, pages in saved.pages.items():
            self._cache.pools[path][place.pool][place.pages[path].long()] = pages

    def move(self, source: Place, target: Place) -> None:
        """Copy the pages to another pool."""
        for path, pools in self._cache.pools.items():
            pages = pools[source.pool][source.pages[path].long()]
            pools[target.pool][target.pages[path].long()] = pages[: len(target.pages[path])]

    def release(self, place: Place) -> None:
        """Forget drafts; nothing is cleared."""
        self._pending.pop(place.slot, None)


@dataclass(frozen=True)
class ReferenceCandidate:
    """The reference as a stateful candidate on the tokens of one seed."""

    seed: int

    @property
    def info(self) -> CandidateInfo:
        """Identity."""
        return CandidateInfo("reference", "bf16", "cpu", "bf16", "float64", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return nothing: whole prompts are the reference's own business."""
        return frozenset()

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> ReferenceServer:
        """Open a server of one layer."""
        return ReferenceServer(parameters.ratio, self.seed, spec)


WIDTHS = {INDEX: CONFIG.index_head_dim, MAIN: CONFIG.head_dim}


def scenario_arithmetic(state: str) -> Arithmetic:
    """Return the bf16 contract with a state of fp32 or bf16."""
    precision = Precision.BF16 if state == BF16_STATE else Precision.FP32
    return replace(BF16_CONTRACT, state=precision)


class ReferenceRows:
    """The reference from scratch, one request after another; the oracle of the reference.

    Parameters
    ----------
    tokens
        The bank.
    seed
        Of the bank.
    state
        ``"fp32"`` or ``"bf16"``; with bf16 the tokens arrive in the calls of the history.
    """

    def __init__(self, tokens: Bank, seed: int, state: str) -> None:
        self.arithmetic = scenario_arithmetic(state)
        self._bank, self._rounds = tokens, state == BF16_STATE
        layer = reference_layer(tokens.ratio, seed)
        self._side = KeySide(tokens.ratio, CONFIG.norm_eps, layer.frequencies, self.arithmetic)
        self._weights = {INDEX: layer.weights.index, MAIN: layer.weights.main}
        self._made: dict[tuple[object, ...], Bytes] = {}
        if tokens.inputs.query is not None:
            given = tokens.inputs.query
            positions = torch.arange(len(given.q)) % len(tokens.inputs.rope_table)
            both = QueryProjections(given.q.double(), given.weights.double())
            self._codes, self._query_weights = reference_queries(both, positions, self._side)

    def rows(self, path: str, view: View, first: int, stop: int) -> Bytes:
        """Return the bytes of entries ``first .. stop - 1``."""
        texts, calls = view.texts, view.calls
        if not self._rounds:
            # Where calls begin is nothing to the rows, so the line may go on as it ends: requests
            # that grow, and all that say the same, are run once.
            texts = np.concatenate((texts, np.full(MAX_TOKENS - len(texts), texts[-1])))
            calls = np.zeros_like(texts)
        key = (path, texts.tobytes(), calls.tobytes())
        if key not in self._made:
            if len(self._made) > 512:
                self._made.clear()
            self._made[key] = self._run(path, texts, calls)
        return self._made[key][first:stop]

    def _run(self, path: str, texts: Ints, calls: Ints) -> Bytes:
        state = KeyState(self._bank.ratio, WIDTHS[path], self.arithmetic)
        cuts = [*np.flatnonzero(np.diff(calls, prepend=-1)).tolist(), len(texts)]
        for start, stop in pairwise(cuts):
            fed = self._bank.tokens(path, self._bank.rows(texts[start:stop], start))
            given = KeyProjections(fed.kv.double(), fed.score.double())
            rows = key_rows(self._side, path, given, self._weights[path], state)
            state.rows.append(rows.stored.values)
        found: Bytes = state.rows.rows.clone().numpy().view(np.uint8)
        return found.reshape(state.rows.count, WIDTHS[path] * 8)

    def values(self, path: str, raw: Bytes) -> Tensor:
        """Return such bytes decoded."""
        return decoded_rows(ROWS_F64, raw)

    def query(self, rows: Tensor) -> QueryRows | None:
        """Return the stored queries of rows of the bank."""
        if self._bank.inputs.query is None:
            return None
        return QueryRows("float64", self._codes[rows], None, self._query_weights[rows], False)

    def decoded_query(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and weights of rows, float64."""
        return self._codes[rows], self._query_weights[rows]


@lru_cache(maxsize=8)
def reference_expected(ratio: int, seed: int, state: str) -> ReferenceRows:
    """Return the reference's rows of a bank."""
    return ReferenceRows(bank(ratio, seed), seed, state)


def reference_queries(
    query: QueryProjections, positions: Tensor, side: KeySide
) -> tuple[Tensor, Tensor]:
    """Return stored queries and head weights at some positions, float64."""
    rope = rope_rows(side.frequencies, positions, side.arithmetic.rope_table)
    rotated = rotate_query(query.q, rope, side.arithmetic)
    codes = store(rotated, side.arithmetic.index_query).values
    return codes, head_weights(query.weights, CONFIG.index_weight_scale, side.arithmetic)


def key_rows(
    side: KeySide, path: str, given: KeyProjections, weights: object, state: KeyState
) -> CompressedRows:
    """Return the rows of a path that these tokens complete, and move them into the state."""
    make = side.index_rows if path == INDEX else side.main_rows
    return make(given, weights, state.tokens)  # type: ignore[arg-type]
