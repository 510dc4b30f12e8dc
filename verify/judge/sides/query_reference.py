"""The profile's reference of the query side, block by block, shared by all of one profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs
from needlepoint.reference.indexer import index_scores, query_inputs
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import Block, LastBlock
from needlepoint.verify.judge.sides.key_side import KeyReference, given_table
from needlepoint.verify.numerics.bounds import ScoreBound, stored_error_bound
from needlepoint.verify.numerics.error_bound import (
    ErrorBound,
    exact,
    query_rotated,
    rounding,
    weights,
)


@dataclass(frozen=True)
class ReferenceBlock:
    """The reference of one block of queries.

    Attributes
    ----------
    query
        ``[queries, heads, 128]``, what the query store receives.
    stored
        Same shape, what a query store may hold.
    weights
        ``[queries, heads]`` head weights, before their rounding point.
    scores, bound
        ``[queries, columns]`` and their a-priori bound, all entries that a query of the block may
        see.
    picks
        int32 ``[queries, k]``.
    """

    query: ErrorBound
    stored: ErrorBound
    weights: ErrorBound
    scores: Tensor
    bound: Tensor
    picks: Tensor


class RotatedQueries:
    """Queries of one layer after RoPE and Hadamard, shared by profiles."""

    def __init__(self, inputs: LayerInputs) -> None:
        if inputs.query is None:
            raise ValueError(f"layer {inputs.layer} of ratio {inputs.ratio} has no query path")
        self._given = inputs.query
        self._scale = inputs.weight_scale
        self._table = inputs.rope_table.to(torch.float64)
        self._layout = inputs.index_rope
        self._kept: LastBlock[ErrorBound] = LastBlock()

    def query(self, block: Block, arithmetic: Arithmetic) -> ErrorBound:
        """Return what the query store receives."""
        own = arithmetic.of_query
        key = (own.query_input, own.roped, own.rotated, own.hadamard, own.rope_table)

        def rotate() -> ErrorBound:
            table = given_table(self._table[block.positions].unsqueeze(1), own)
            given = query_inputs(self._given.q[block.rows].to(torch.float64), own)
            return query_rotated(exact(given), table, own, self._layout)

        return self._kept.of(block, key, rotate)

    def weights(self, block: Block, arithmetic: Arithmetic) -> ErrorBound:
        """Return the head weights before their rounding point."""
        given = self._given.weights[block.rows].to(torch.float64)
        return weights(query_inputs(given, arithmetic), self._scale)


class QueryReference:
    """Reference of the query side under one profile.

    Parameters
    ----------
    inputs
        Given tensors of the layer.
    arithmetic
        Profile.
    keys
        The profile's reference of the index path.
    queries
        Rotated queries, shared by profiles.
    """

    def __init__(
        self,
        inputs: LayerInputs,
        arithmetic: Arithmetic,
        keys: KeyReference,
        queries: RotatedQueries,
    ) -> None:
        self.arithmetic = arithmetic
        self._scoring = unrounded_fp32(arithmetic)
        self._queries = queries
        self._k = inputs.topk
        stored = stored_error_bound(keys.to_store, arithmetic.index_key)
        counts = Rows(inputs.lengths, inputs.ratio)
        self.keys = [stored.rows(counts.span(r)) for r in range(len(inputs.lengths))]
        self._bounds = [ScoreBound.of_keys(rows, arithmetic) for rows in self.keys]

    def block(self, block: Block) -> ReferenceBlock:
        """Return the reference of one block."""
        query = self._queries.query(block, self.arithmetic)
        stored = stored_error_bound(query, self.arithmetic.index_query)
        weight = self._queries.weights(block, self.arithmetic)
        held = rounding(weight, self.arithmetic.weights)
        request = block.request
        scores, bound = self.score(block, stored, held, self.keys[request], self._bounds[request])
        return ReferenceBlock(query, stored, weight, scores, bound, select_topk(scores, self._k))

    def score(
        self,
        block: Block,
        query: ErrorBound,
        weight: ErrorBound,
        keys: ErrorBound,
        bound: ScoreBound,
    ) -> tuple[Tensor, Tensor]:
        """Return scores over the block's columns and their bound."""
        columns = block.columns
        scores = index_scores(
            query.value, weight.value, keys.value[:columns], block.visible, self._scoring
        )
        return scores, bound.of_queries(query, weight, columns)


def unrounded_fp32(arithmetic: Arithmetic) -> Arithmetic:
    """Return the score chain with its fp32 points left in float64.

    fp32 evaluation is what the a-priori bound pays for; only roundings to bf16 are meant.
    """
    points = {
        name: Precision.FLOAT64
        for name in ("dot", "weighted", "head_sum")
        if getattr(arithmetic, name) is Precision.FP32
    }
    return replace(arithmetic, **points)  # type: ignore[arg-type]
