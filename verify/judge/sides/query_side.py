"""Query side of one layer: query, weights, scores and picks, block by block of queries.

A block is small enough that its scores fit a budget, so a long prompt is judged without a
[queries, entries] matrix. The local reference of ``scores`` reads the keys, queries and weights
that the candidate itself observed; that of ``topk`` reads the candidate's own scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    LayerInputs,
    Observed,
    QueryRows,
    StageKey,
)
from needlepoint.reference.profile import Accumulator
from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.base.stages import QUERIES, SCORES, TOPK, WEIGHTS
from needlepoint.verify.judge.results.stages import zero_errors
from needlepoint.verify.judge.sides.query_reference import QueryReference, ReferenceBlock
from needlepoint.verify.layout.stored_rows import (
    StoredRows,
    decoded_queries,
    encoded_queries,
    replayable,
    unfolded_weights,
)
from needlepoint.verify.numerics.bounds import ScoreBound
from needlepoint.verify.numerics.compare import compare_dense, compare_masked_scores, spread_tally
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.error_bound import exact, rounding
from needlepoint.verify.numerics.error_model import LEAN, U
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.numerics.selection import PickErrors, Swap, judge_picks
from needlepoint.verify.numerics.tally import Tally, content_of

_LOWEST = torch.finfo(torch.float32).min


class QueryJudge:
    """Judges the query side of one candidate, block by block; rows and swaps add up in it.

    Parameters
    ----------
    inputs
        Given tensors of the layer.
    observed
        What the candidate returned.
    reference
        Reference of the query side under the candidate's profile.
    stored
        Index rows as read from the candidate's pages, or None where it stores none.
    limits
        Limits; ``topk`` scales the bound that explains a swap.
    """

    def __init__(
        self,
        inputs: LayerInputs,
        observed: Observed,
        reference: QueryReference,
        stored: StoredRows | None,
        limits: Limits,
    ) -> None:
        self._blocks: list[Mapping[StageKey, StageErrors]] = []
        self._swaps: list[PickErrors] = []
        self._inputs = inputs
        self._observed = observed
        self._reference = reference
        self._limits = limits
        # An accumulator that cuts off what it cannot hold leans by its own doing.
        rounds = reference.arithmetic.accumulator is Accumulator.FP32
        self._lean = LEAN.value * U if rounds else math.inf
        self._keys = reference.keys
        # Scores of its own, or all that they are made from: else no pick can be justified.
        self._scored = observed.scores is not None or (
            stored is not None and observed.query is not None
        )
        if stored is not None:
            own = exact(replayable(stored.values))
            counts = Rows(inputs.lengths, inputs.ratio)
            self._keys = [own.rows(counts.span(r)) for r in range(len(inputs.lengths))]
        self._bounds = [ScoreBound.of_keys(rows, reference.arithmetic) for rows in self._keys]

    @property
    def errors(self) -> dict[StageKey, StageErrors]:
        """Row errors of each compared stage over the blocks so far, in their order."""
        return {
            key: replace(
                first,
                local=RowErrors.concatenate([part[key].local for part in self._blocks]),
                accumulated=RowErrors.concatenate([part[key].accumulated for part in self._blocks]),
            )
            for key, first in (self._blocks[0] if self._blocks else {}).items()
        }

    @property
    def picks(self) -> PickErrors | None:
        """Swaps against the profile's reference; None where the candidate has no picks."""
        return PickErrors.concatenate(self._swaps) if self._swaps else None

    def judge(self, block: Block, meant: ReferenceBlock) -> Tensor | None:
        """Judge one block of queries, given the reference's of the same block.

        Returns
        -------
        Tensor or None
            int ``[queries, k]``, the candidate's picks; None where it has none.
        """
        errors: dict[StageKey, StageErrors] = {}
        profile = self._reference.arithmetic
        query, weight = meant.stored, rounding(meant.weights, profile.weights)
        if self._observed.query is not None:
            part = query_rows(self._observed.query, block.rows)
            own = encoded_queries(part, profile.index_query)
            row = compare_encoded(own, meant.query, profile.index_query)
            row.tally[:, Tally.CONTENT] = self._content(block, "q")
            lean = 3 * LEAN.value * U  # rotation, Hadamard and store
            errors[QUERY, QUERIES] = StageErrors((QUERY, QUERIES), row, row, lean=lean)
            own_weights = unfolded_weights(part)
            row = compare_dense(own_weights, meant.weights, profile.weights)
            row.tally[:, Tally.CONTENT] = self._content(block, "weights")
            errors[QUERY, WEIGHTS] = StageErrors((QUERY, WEIGHTS), row, row)
            query = exact(replayable(decoded_queries(part, profile.index_query)))
            weight = exact(replayable(own_weights))
        request = block.request
        replayed, radius = self._reference.score(
            block, query, weight, self._keys[request], self._bounds[request]
        )
        own_scores = self._own_scores(block)
        if own_scores is not None:
            errors[INDEX, SCORES] = StageErrors(
                (INDEX, SCORES),
                compare_scores(own_scores, replayed, radius, block),
                compare_scores(own_scores, meant.scores, meant.bound, block, directed=False),
                lean=self._lean,
            )
            replayed, radius = usable_scores(own_scores, block), torch.zeros(())
        if self._observed.topk is None:
            self._blocks.append(errors)
            return None
        picks = self._observed.topk[block.rows]
        justifying = replayed if self._scored else None
        best = select_topk(replayed, self._inputs.topk)
        local = self._judge_picks(block, picks, best, justifying, radius, replayed, radius)
        swaps = self._judge_picks(
            block, picks, meant.picks, justifying, radius, meant.scores, meant.bound
        )
        widths = spread_tally(meant.scores, meant.bound, block.visible)
        rows = replace(pick_rows(swaps), tally=widths)
        errors[INDEX, TOPK] = StageErrors((INDEX, TOPK), pick_rows(local), rows)
        self._blocks.append(errors)
        self._swaps.append(swaps)
        return picks

    def _judge_picks(
        self,
        block: Block,
        picks: Tensor,
        meant: Tensor,
        own: Tensor | None,
        own_radius: Tensor,
        reference: Tensor,
        bound: Tensor,
    ) -> PickErrors:
        return judge_picks(
            picks,
            meant,
            own,
            reference,
            bound.expand_as(reference),
            block.visible,
            self._inputs.topk,
            own_radius=own_radius.expand_as(reference),
            limit=self._limits[TOPK].value,
        )

    def _content(self, block: Block, name: Literal["q", "weights"]) -> Tensor:
        """Return what tells apart the given rows that a stage is made from."""
        given = self._inputs.query
        return torch.zeros(()) if given is None else content_of(getattr(given, name)[block.rows])

    def _own_scores(self, block: Block) -> Tensor | None:
        if self._observed.scores is None:
            return None
        found = self._observed.scores(block.request, block.start, block.stop)
        wanted = (block.stop - block.start, block.entries)
        if tuple(found.shape) != wanted:
            raise ValueError(
                f"layer {self._inputs.layer} scores of request {block.request}: shape "
                f"{tuple(found.shape)}, expected {wanted}"
            )
        return found


def query_rows(query: QueryRows, rows: slice | Tensor) -> QueryRows:
    """Return the stored queries of some tokens."""
    return replace(
        query,
        codes=query.codes[rows],
        scales=None if query.scales is None else query.scales[rows],
        weights=query.weights[rows],
    )


def usable_scores(scores: Tensor, block: Block) -> Tensor:
    """Return scores that a selection can be replayed from, ``[queries, columns]``.

    Finite where visible (NaN and infinity count as the lowest score), -inf elsewhere.
    """
    wide = scores[:, : block.columns].to(torch.float64)
    wide = torch.where(torch.isfinite(wide), wide, _LOWEST)
    return wide.masked_fill(torch.arange(block.columns) >= block.visible.unsqueeze(1), -torch.inf)


def pick_rows(picks: PickErrors) -> RowErrors:
    """Return the judgement of picks as row errors.

    A row's error is the largest gap of a justified swap in units of its bound, infinite where a
    pick is invalid or no score justifies a swap. ``expected`` is the
    best entry that was lost and ``found`` the one that took its place, -1 where none was.
    """
    rows, swaps = len(picks.invalid), picks.swaps
    justified = (swaps.kind == Swap.EXPLAINED) | (swaps.kind == Swap.UPSTREAM)
    gap = torch.where(justified, swaps.gap / swaps.bound, 0.0)
    ratio = torch.zeros(rows, dtype=torch.float64)
    ratio.scatter_reduce_(0, swaps.row, gap.clamp(min=0.0), "amax")
    order = swaps.rank.sort(stable=True).indices
    place = torch.full((rows,), len(order), dtype=torch.int64)
    place.scatter_reduce_(0, swaps.row[order], torch.arange(len(order)), "amin")
    swapped = place < len(order)
    at = order[place[swapped]]
    lost = torch.full((rows,), -1, dtype=torch.int64)
    gained = lost.clone()
    lost[swapped], gained[swapped] = swaps.lost[at], swaps.gained[at]
    return zero_errors(rows).with_entries(
        torch.where(picks.unjustified(), math.inf, ratio), picks.counts.sum(1), lost, gained
    )


def compare_scores(
    own: Tensor, reference: Tensor, bound: Tensor, block: Block, *, directed: bool = True
) -> RowErrors:
    """Compare the columns that some query sees; the others must be -inf throughout.

    Parameters
    ----------
    own
        ``[queries, entries]``.
    reference, bound
        ``[queries, columns]``.
    block
        The queries.
    directed
        Whether directions are counted.
    """
    columns = block.columns
    if columns == 0:
        row = zero_errors(len(own))
    else:
        row = compare_masked_scores(
            own[:, :columns], reference, bound, block.visible, directed=directed
        )
    shown = ~torch.isneginf(own[:, columns:]).all(1)
    return row.with_ratio(torch.where(shown, math.inf, row.ratio))
