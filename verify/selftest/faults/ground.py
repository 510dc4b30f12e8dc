"""A sound run that faults are planted on, and the ways to run a part of it again.

Faults change as little as they can: one step of one path, the tensors of one stage, some bytes of a
page. Everything behind the change is computed again from it by the sound code, as a kernel with
that one fault would, so that the fault is the only thing to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock, entry_blocks
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows, store_bf16, store_main_fp8
from needlepoint.optimized.emulation.pages import allocate, page_rows, write_rows
from needlepoint.optimized.emulation.query import STORES, store_queries
from needlepoint.optimized.emulation.scoring import FusedScorer, fused_scores
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import (
    INDEX,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    ScoreReader,
    StageKey,
)

ScoreKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``kernel(queries, weights, keys, out)``, as :func:`optimized.scoring.fused_scores`."""
Selector = Callable[[Tensor, Tensor, int], Tensor]
"""``select(scores, visible, k)``, as :func:`optimized.select.select_topk`."""


@dataclass(frozen=True)
class Steps:
    """The steps of one path; a fault or a control replaces some."""

    # As the methods of :class:`~needlepoint.optimized.emulation.compressor.Compressor`.
    pool: Callable[[Compressor, EntryBlock], F32] = Compressor.pool
    norm: Callable[[Compressor, F32], F32] = Compressor.norm
    rope: Callable[[Compressor, F32, EntryBlock], F32] = Compressor.rope
    rotate: Callable[[Compressor, F32], F32] = Compressor.rotate
    # ``[d, n]`` to stored bytes; None for the store of the path's format.
    store: Callable[[F32], StoredRows] | None = None
    page_size: int | None = None  # Rows of a page; None for the usual number.
    page_seed: int = 0  # Added to the seed of the page permutation.


SOUND = Steps()


@dataclass(frozen=True)
class Ground:
    """A sound run of one layer in one format."""

    given: LayerInputs  # What candidates are given.
    key_format: str  # ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    observed: Observed  # What the sound candidate observed.
    # float32 ``[tokens, entries]`` of each request; none at ratio 128.
    scores: tuple[Tensor, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries of each request."""
        return tuple(length // self.given.ratio for length in self.given.lengths)

    @property
    def entries(self) -> int:
        """Entries of the longest request."""
        return max(self.counts)

    @property
    def longest(self) -> int:
        """Index of the longest request."""
        return self.counts.index(self.entries)

    def key_row(self, entry: int) -> int:
        """Return the key-side row of an entry of the longest request."""
        return sum(self.counts[: self.longest]) + entry

    def token_row(self, position: int) -> int:
        """Return the token-side row of a position of the longest request."""
        return sum(self.given.lengths[: self.longest]) + position


@dataclass(frozen=True)
class Keys:
    """Rows and pages of one path."""

    dense: Mapping[StageKey, Tensor]
    paged: PagedRows


@dataclass(frozen=True)
class _Scorer(FusedScorer):
    kernel: ScoreKernel = field(default=fused_scores)

    def score(self, queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        self.kernel(queries, weights, keys, out)


def make_ground(given: LayerInputs, key_format: str) -> Ground:
    """Run the sound candidate: every stage of both paths, and the query side at ratio 4."""
    bare = Ground(given, key_format, Observed(path_taken="sound"))
    paths = ("index", "main") if given.index is not None else ("main",)
    dense: dict[StageKey, Tensor] = {}
    stored: dict[str, PagedRows] = {}
    for path in paths:
        keys = compress(bare, path)
        dense |= keys.dense
        stored[path] = keys.paged
    observed = replace(bare.observed, dense=dense, stored=stored)
    if given.query is None:
        return replace(bare, observed=observed)
    query = store_queries(given.query, given, key_format)
    scores = scored(bare, query, stored[INDEX])
    whole = with_scores(replace(bare, observed=replace(observed, query=query)), scores)
    return replace(bare, observed=whole, scores=scores)


def compress(
    ground: Ground, path: str, steps: Steps = SOUND, given: LayerInputs | None = None
) -> Keys:
    """Take every entry of one path through pool, norm, rope, rotate and store.

    Parameters
    ----------
    ground
        Gives format and inputs.
    path
        ``index`` or ``main``.
    steps
        The steps, changed or sound.
    given
        Inputs to run on instead of the ground's.
    """
    inputs = given or ground.given
    part = inputs.index if path == INDEX else inputs.main
    if part is None:
        raise ValueError(f"layer {inputs.layer} of ratio {inputs.ratio} has no {path} path")
    engine = Compressor(part, inputs)
    counts = [length // inputs.ratio for length in inputs.lengths]
    size = steps.page_size or page_rows(inputs.ratio)
    paged = allocate(
        layout_of(path, ground.key_format), size, counts, inputs.seed + steps.page_seed
    )
    store = steps.store or store_of(path, ground.key_format)
    names = ("pooled", "normed", "roped", *(("rotated",) if path == INDEX else ()))
    rows = {name: np.empty((sum(counts), engine.d), np.float32) for name in names}
    for block in entry_blocks(inputs.lengths, inputs.ratio):
        pooled = steps.pool(engine, block)
        normed = steps.norm(engine, pooled)
        last = roped = steps.rope(engine, normed, block)
        found = {"pooled": pooled, "normed": normed, "roped": roped}
        if path == INDEX:
            last = found["rotated"] = steps.rotate(engine, roped)
        for name, values in found.items():
            rows[name][block.rows] = values
        write_rows(paged, block.request, block.first, store(np.ascontiguousarray(last.T)))
    return Keys({(path, name): torch.from_numpy(value) for name, value in rows.items()}, paged)


def layout_of(path: str, key_format: str) -> str:
    """Return the page layout of a path in a candidate of a format."""
    if path == INDEX:
        return f"index-{key_format}"
    return "main-bf16" if key_format == "bf16" else "main-584"


def store_of(path: str, key_format: str) -> Callable[[F32], StoredRows]:
    """Return the sound store of a path in a candidate of a format."""
    if path == INDEX:
        return STORES[key_format]
    return store_bf16 if key_format == "bf16" else store_main_fp8


def with_keys(ground: Ground, path: str, keys: Keys) -> Observed:
    """Return the run with other rows of one path; scores and picks follow from index rows."""
    observed = replace(
        ground.observed,
        dense={**ground.observed.dense, **keys.dense},
        stored={**ground.observed.stored, path: keys.paged},
    )
    return rescored(ground, observed) if path == INDEX else observed


def with_dense(ground: Ground, key: StageKey, rows: Tensor) -> Observed:
    """Return the run with another tensor at one stage, and nothing else changed."""
    return replace(ground.observed, dense={**ground.observed.dense, key: rows})


def with_pool(ground: Ground, path: str, pool: Tensor, *, follow: bool = True) -> Observed:
    """Return the run with other bytes in the pages of one path.

    ``follow`` says whether scores and picks were made from these bytes or before they changed.
    """
    paged = replace(ground.observed.stored[path], pool=pool)
    observed = replace(ground.observed, stored={**ground.observed.stored, path: paged})
    return rescored(ground, observed) if follow and path == INDEX else observed


def rescored(ground: Ground, observed: Observed) -> Observed:
    """Return a run whose scores and picks are made from the rows and queries it holds."""
    if observed.query is None:
        return observed
    scores = scored(ground, observed.query, observed.stored[INDEX])
    return with_scores(replace(ground, observed=observed), scores)


def scored(
    ground: Ground, query: QueryRows, keys: PagedRows, kernel: ScoreKernel = fused_scores
) -> tuple[Tensor, ...]:
    """Return the scores of every request, float32 ``[tokens, entries]``, masked with -inf."""
    given = ground.given
    scorer = _Scorer(query, keys, given.lengths, given.ratio, kernel)
    with np.errstate(all="ignore"):  # planted bytes may decode to anything
        return tuple(scorer.read(r, 0, length) for r, length in enumerate(given.lengths))


def with_scores(ground: Ground, scores: Sequence[Tensor], picks: Tensor | None = None) -> Observed:
    """Return the run with other scores, and the picks that they lead to unless given."""
    picks = selected(ground, scores) if picks is None else picks
    return replace(ground.observed, scores=reader_of(scores), topk=picks)


def selected(ground: Ground, scores: Sequence[Tensor], select: Selector = select_topk) -> Tensor:
    """Return the picks of every request, int32 ``[tokens, k]``."""
    given = ground.given
    return torch.cat(
        [select(table, seen(given, request), given.topk) for request, table in enumerate(scores)]
    )


def seen(given: LayerInputs, request: int) -> Tensor:
    """Return how many entries each query of a request may see, int64 ``[tokens]``."""
    return torch.arange(1, given.lengths[request] + 1) // given.ratio


def reader_of(scores: Sequence[Tensor]) -> ScoreReader:
    """Return a reader of scores that lie in memory."""
    return lambda request, start, stop: scores[request][start:stop]


def picks_of(ground: Ground) -> Tensor:
    """Return the sound picks, int32 ``[tokens, k]``, free to be changed."""
    if ground.observed.topk is None:
        raise ValueError(f"layer {ground.given.layer} of ratio {ground.given.ratio} has no picks")
    return ground.observed.topk.clone()


def query_of(ground: Ground) -> QueryRows:
    """Return the sound stored queries."""
    if ground.observed.query is None:
        raise ValueError(f"layer {ground.given.layer} of ratio {ground.given.ratio} has no query")
    return ground.observed.query


def pool_of(ground: Ground, path: str) -> Tensor:
    """Return the bytes of the sound pages of a path, free to be changed."""
    return ground.observed.stored[path].pool.clone()
