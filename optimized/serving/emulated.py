"""The emulated candidates step by step: the specification through real state rings and pages.

The arithmetic is that of whole prompts (``optimized/emulation``). What is new here is where the
tokens of a window come from: those of earlier calls from the state, the others from the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import widen
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows, store_bf16, store_main_fp8
from needlepoint.optimized.emulation.pages import write_rows
from needlepoint.optimized.emulation.pooling import pool, scaled_ape
from needlepoint.optimized.emulation.query import STORES, store_queries_at
from needlepoint.optimized.emulation.readback import DecodedKeys, read_index_keys, read_queries
from needlepoint.optimized.emulation.rows import hadamard, norm, rope
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import INDEX, QueryRows
from needlepoint.optimized.protocol.serving import (
    Cache,
    CompressorParameters,
    LayerParameters,
    Part,
    StepBatch,
    StepOutput,
    TokenRows,
)
from needlepoint.optimized.serving.cache import RingServer, first_needed
from needlepoint.optimized.serving.plan import I64, window_slots
from needlepoint.optimized.serving.ranks import merge_picks, token_shards

Score = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``score(queries, weights, keys, out)``, as ``fused_scores``."""


@dataclass(frozen=True)
class Windows:
    """The windows of some entries, gathered.

    Attributes
    ----------
    part, entry
        int64 ``[n]``: part of the call, and entry within its request.
    kv, score
        float32 ``[slots, n, d]``, slots in time order; any number where masked.
    masked
        bool ``[slots, n, 1]``: slots at a negative position.
    """

    part: I64
    entry: I64
    kv: F32
    score: F32
    masked: npt.NDArray[np.bool_]


class EmulatedServer(RingServer):
    """One layer of an emulated candidate.

    Parameters
    ----------
    parameters, cache
        As :class:`~needlepoint.optimized.serving.cache.RingServer`.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    score
        Fused or unfused scores.
    """

    def __init__(
        self, parameters: LayerParameters, cache: Cache, key_format: str, score: Score
    ) -> None:
        super().__init__(parameters, cache)
        self.key_format = key_format
        self.score = score
        self._ape = np.concatenate([self._slot_ape(path) for path in cache.pools], axis=1)[:, None]

    def step(self, batch: StepBatch) -> StepOutput:
        """Store the entries that a call completes, keep its tokens, and score its queries."""
        entries = self.completed(batch)
        for part, entry in self._by_rank(entries, batch):
            if len(entry):
                self._store(batch, part, entry)
        for path, given in batch.tokens.items():
            for own in batch.parts:
                rows = slice(own.row, own.row + own.count)
                fresh = TokenRows(given.kv[rows], given.score[rows])
                self.write_state(path, own.place, own.place.length, fresh)
        return self._query_side(batch)

    def visible(self, part: Part) -> Tensor:
        """Return the entries that each token of a part may see, int64 ``[count]``."""
        first = part.place.length + 1
        return torch.arange(first, first + part.count) // self.parameters.ratio

    def positions(self, part: Part) -> Tensor:
        """Return the positions of the tokens of a part, int64 ``[count]``."""
        return torch.arange(part.place.length, part.place.length + part.count)

    def _compressor_parameters(self, path: str) -> CompressorParameters:
        index = self.parameters.index
        return index if path == INDEX and index is not None else self.parameters.main

    def _slot_ape(self, path: str) -> F32:
        """Return the prescaled position embedding of each slot, float32 ``[slots, d]``."""
        return self._columns(scaled_ape(widen(self._compressor_parameters(path).ape)))

    def _store(self, batch: StepBatch, part: I64, entry: I64) -> None:
        """Pool windows of all paths at once, then take each path to its pages."""
        found = [self.windows(path, batch, part, entry) for path in self.cache.pools]
        kv, score = (
            np.concatenate([getattr(windows, name) for windows in found], axis=2)
            for name in ("kv", "score")
        )
        pooled = pool(kv, score, self._ape, found[0].masked)
        start = 0
        for path, windows in zip(self.cache.pools, found, strict=True):
            stop = start + windows.kv.shape[2]
            self._finish(path, batch, windows, pooled[:, start:stop])
            start = stop

    def completed(self, batch: StepBatch) -> tuple[I64, I64]:
        """Return part and entry of every window that the call completes, int64 ``[n]`` each."""
        ratio = self.parameters.ratio
        start = np.array([part.place.length for part in batch.parts])
        stop = start + [part.count for part in batch.parts]
        count = stop // ratio - start // ratio
        owner = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, start[owner] // ratio + step

    def windows(self, path: str, batch: StepBatch, part: I64, entry: I64) -> Windows:
        """Gather windows: tokens of earlier calls from the state, the others from the call."""
        ratio, given = self.parameters.ratio, batch.tokens[path]
        slots = window_slots(ratio)
        start = np.array([own.place.length for own in batch.parts])
        oldest = np.array([first_needed(int(length), ratio) for length in start])
        kept = {
            number: self.read_state(path, batch.parts[number].place, first, int(start[number]))
            for number, first in enumerate(oldest.tolist())
            if number in part
        }
        sizes = np.array([len(kept.get(number, ())) for number in range(len(start))])
        offset = np.cumsum(sizes) - sizes
        row = np.array([own.row for own in batch.parts]) + sizes.sum()
        position = (entry + 1) * ratio - slots + np.arange(slots)[:, None]
        early, owner = position < start[part], np.broadcast_to(part, position.shape)
        at = position + np.where(early, (offset - oldest)[owner], (row - start)[owner])
        masked = position < 0
        at = np.where(masked, 0, at)
        kv = widen(torch.cat([*(rows[:, 0] for rows in kept.values()), given.kv]))[at]
        score = widen(torch.cat([*(rows[:, 1] for rows in kept.values()), given.score]))[at]
        return Windows(part, entry, self._columns(kv), self._columns(score), masked[..., None])

    def _columns(self, tokens: F32) -> F32:
        """Return the columns that each slot reads, slots ``[8, ..]`` or places ``[4, ..]`` first.

        At ratio 4 the older four slots read the first half, the others the second.
        """
        if self.parameters.ratio != 4:
            return tokens
        width = tokens.shape[-1] // 2
        return np.concatenate((tokens[:4, ..., :width], tokens[-4:, ..., width:]))

    def _by_rank(self, entries: tuple[I64, I64], batch: StepBatch) -> Iterator[tuple[I64, I64]]:
        """Yield the windows of each rank: those whose last token it has."""
        part, entry = entries
        if batch.ranks == 1:
            yield entries
            return
        ranks = np.zeros(len(part), np.int64)
        for number, own in enumerate(batch.parts):
            last = (entry[part == number] + 1) * self.parameters.ratio - 1 - own.place.length
            rank_of = np.zeros(own.count, np.int64)
            for rank, tokens in enumerate(token_shards(own.count, batch.ranks, batch.layout)):
                rank_of[tokens] = rank
            ranks[part == number] = rank_of[last]
        for rank in range(batch.ranks):
            yield part[ranks == rank], entry[ranks == rank]

    def _finish(self, path: str, batch: StepBatch, windows: Windows, pooled: F32) -> None:
        """Take pooled rows through norm, RoPE, Hadamard and store into their pages."""
        given = self._compressor_parameters(path)
        weight, eps = widen(given.norm_weight), np.float32(self.parameters.norm_eps)
        table = widen(self.parameters.rope_table)[windows.entry * self.parameters.ratio]
        cos, sin = (np.ascontiguousarray(table[..., i].T) for i in (0, 1))
        row = rope(norm(np.ascontiguousarray(pooled.T), weight, eps), cos, sin)
        if path == INDEX:
            stored = STORES[self.key_format](hadamard(row))
        else:
            stored = store_bf16(row) if self.key_format == "bf16" else store_main_fp8(row)
        for run in _runs(windows):
            place = batch.parts[windows.part[run.start]].place
            first = int(windows.entry[run.start])
            rows = StoredRows(stored.values[run], stored.scales[run])
            write_rows(self.paged(path, place, first + len(rows.values)), 0, first, rows)

    def _query_side(self, batch: StepBatch) -> StepOutput:
        if batch.query is None:
            return StepOutput()
        own = self.parameters
        positions = torch.zeros(len(batch.query.q), dtype=torch.int64)
        for part in batch.parts:
            positions[part.row : part.row + part.count] = self.positions(part)
        query = store_queries_at(
            batch.query, positions.numpy(), own.rope_table, own.weight_scale, self.key_format
        )
        scores = []
        topk = torch.full((len(positions), own.topk), -1, dtype=torch.int32)
        for part in batch.parts:
            entries = (part.place.length + part.count) // own.ratio
            keys = read_index_keys(self.paged(INDEX, part.place, entries), 0)
            found, picks = self._score(part, batch, query, keys)
            scores.append(found)
            topk[part.row : part.row + part.count] = picks
        return StepOutput(query, tuple(scores), topk)

    def _score(
        self, part: Part, batch: StepBatch, query: QueryRows, keys: DecodedKeys
    ) -> tuple[Tensor, Tensor]:
        """Return masked scores and picks of a part; each rank scores its tokens on its entries."""
        rows = slice(part.row, part.row + part.count)
        queries, weights = read_queries(query, rows), query.weights[rows]
        visible = self.visible(part)
        k, entries = self.parameters.topk, len(keys.values)
        if batch.ranks == 1:
            found = self.masked_scores(queries, weights, keys, visible, torch.arange(entries))
            return found, select_topk(found, visible, k)
        scores = torch.full((part.count, entries), -torch.inf)
        topk = torch.full((part.count, k), -1, dtype=torch.int32)
        for tokens in token_shards(part.count, batch.ranks, batch.layout):
            for rank in range(batch.ranks):
                columns = torch.arange(entries)[rank :: batch.ranks]
                local = DecodedKeys(
                    keys.values[columns], None if keys.scale is None else keys.scale[columns]
                )
                found = self.masked_scores(
                    queries[tokens], weights[tokens], local, visible[tokens], columns
                )
                scores[tokens[:, None], columns] = found
            topk[tokens] = merge_picks(scores[tokens], visible[tokens], k, batch.ranks)
        return scores, topk

    def masked_scores(
        self, queries: Tensor, weights: Tensor, keys: DecodedKeys, visible: Tensor, entry: Tensor
    ) -> Tensor:
        """Return scores of some entries, -inf where a token does not see them."""
        out = torch.empty(len(queries), len(keys.values))
        if not out.numel():
            return out
        self.score(queries, weights, keys.values, out)
        if keys.scale is not None:
            out.mul_(keys.scale)
        return out.masked_fill_(entry >= visible[:, None], -torch.inf)


def _runs(windows: Windows) -> list[slice]:
    """Return the runs of consecutive entries of one part."""
    part, entry = windows.part, windows.entry
    breaks = (part[1:] != part[:-1]) | (entry[1:] != entry[:-1] + 1)
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(entry)]
    return [slice(a, b) for a, b in pairwise(cuts)]
