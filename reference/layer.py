"""One attention layer over the tokens of a request: every stage from the hidden states on.

A whole prompt, one decoded token and a chunk of any size are the same call. Rows up to ``query``
and ``weights`` have the same bytes however a request is cut into calls; ``scores`` and
``attention`` are sums of library products and agree within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.attention import all_visible
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.reference.indexer import head_weights, index_scores, rotate_query, score_blocks
from needlepoint.reference.keyside import KeySide, store
from needlepoint.reference.main_attention import MainAttention
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.projections import project_inputs
from needlepoint.reference.request import KeyState, RequestState
from needlepoint.reference.rope import rope_frequencies, rope_rows
from needlepoint.reference.stages import (
    ChunkStages,
    CompressedRows,
    IndexStages,
    Projected,
    QueryProjections,
    QueryRows,
)
from needlepoint.reference.token_keys import token_keys
from needlepoint.reference.topk import select_topk, visible_entries
from needlepoint.reference.weights import LayerWeights, check_layer_weights

BUDGET_BYTES = 256 << 20


class ReferenceLayer:
    """The reference of one layer in one arithmetic.

    Parameters
    ----------
    config
        Model shapes.
    layer
        Layer number; fixes the compression ratio.
    weights
        The layer's tensors.
    arithmetic
        Contract or profile.
    compute
        Type of score and attention products: ``torch.float64``, or ``torch.float32`` for runs too
        long for it.
    budget_bytes
        Bound on transient score, selection and attention tensors.

    Raises
    ------
    ValueError
        If there is no such layer or a weight does not have the shape that the config asks for.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: LayerWeights,
        arithmetic: Arithmetic,
        *,
        compute: torch.dtype = torch.float64,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        check_layer_weights(weights, config, layer)
        self.config = config
        self.ratio = config.ratio(layer)
        self.weights = weights
        self.arithmetic = arithmetic
        self.compute = compute
        self.budget_bytes = budget_bytes
        self.frequencies = rope_frequencies(config, compressed=self.ratio > 0)
        self.key_side = KeySide(self.ratio, config.norm_eps, self.frequencies, arithmetic)
        self.attention = MainAttention(
            config, weights, self.key_side, arithmetic, compute, budget_bytes
        )

    def new_request(self) -> RequestState:
        """Return the state of a request that has no tokens yet."""
        return RequestState(self.config, self.ratio, self.arithmetic)

    def project_inputs(self, hidden: Tensor, first_position: int = 0) -> Projected:
        """Project consecutive tokens of one request; see :func:`projections.project_inputs`."""
        return project_inputs(hidden, self.weights, self.config, self.arithmetic, first_position)

    def rope(self, first_position: int, count: int) -> Tensor:
        """Return cos and sin at consecutive positions, float64 ``[count, pairs, 2]``."""
        positions = torch.arange(first_position, first_position + count)
        return rope_rows(self.frequencies, positions, self.arithmetic.rope_table)

    def forward(
        self,
        hidden: Tensor,
        state: RequestState,
        *,
        keep_scores: bool = False,
        attend: bool = True,
    ) -> ChunkStages:
        """Compute every stage of the next tokens of a request.

        Parameters
        ----------
        hidden
            ``[n, hidden_size]`` of any float dtype, normalised input of the attention block.
        state
            The request so far; advanced by ``n`` tokens.
        keep_scores
            Whether to return all scores; they grow with tokens times entries.
        attend
            Whether to compute the attention output; ratio 1 has none.

        Raises
        ------
        ValueError
            If there are no tokens, the width is wrong or a value is NaN or infinite. The state is
            unchanged then.
        """
        projected = self.project_inputs(hidden, state.next_position)
        return self.forward_projected(projected, state, keep_scores=keep_scores, attend=attend)

    def forward_projected(
        self,
        projected: Projected,
        state: RequestState,
        *,
        keep_scores: bool = False,
        attend: bool = True,
    ) -> ChunkStages:
        """Compute the stages after the projections: :meth:`forward` without its first step.

        Raises
        ------
        ValueError
            If the tokens do not continue the request.
        """
        start, count = state.next_position, len(projected.latent)
        if projected.first_position != start:
            raise ValueError(
                f"tokens start at position {projected.first_position}, expected {start}: feed the "
                "tokens of a request in order"
            )
        rope = self.rope(start, count)
        visible = visible_entries(torch.arange(start, start + count), self.ratio)
        selected = self.select(projected, rope, state.index, keep_scores=keep_scores)
        main = self._main_rows(projected, state.main)
        attention = None
        if self.ratio != PER_TOKEN:  # whose main attention is another one, and not modelled
            window = self.attention.window(projected, rope, state.window)
            if attend:
                rows = window[:0] if state.main is None else state.main.rows.rows
                picks = all_visible(visible, len(rows)) if selected.topk is None else selected.topk
                attention = self.attention.attend(projected, rope, window, rows, picks)
        state.next_position = start + count
        return ChunkStages(
            projected,
            selected.index,
            main,
            selected.query,
            selected.scores,
            selected.topk,
            attention,
        )

    def select(
        self,
        projected: Projected,
        rope: Tensor,
        state: KeyState | None,
        *,
        keep_scores: bool = False,
    ) -> IndexStages:
        """Compute the index path of the next tokens: keys, queries, scores and picks.

        Parameters
        ----------
        projected
            Projections of ``n`` consecutive tokens.
        rope
            float64 ``[n, pairs, 2]`` of :meth:`rope` at the tokens' positions.
        state
            Index keys of the request so far, advanced by ``n`` tokens; None without an indexer.
        keep_scores
            Whether to return all scores.
        """
        index = self._index_rows(projected, rope, state)
        if projected.query is None or state is None:
            return IndexStages(index, None, None, None)
        start = projected.first_position
        visible = visible_entries(torch.arange(start, start + len(rope)), self.ratio)
        query = self._query_rows(projected.query, rope)
        scores, topk = self._select(query, state.rows.rows, visible, keep_scores)
        return IndexStages(index, query, scores, topk)

    def score(self, query: QueryProjections, positions: Tensor, keys: Tensor) -> Tensor:
        """Return the scores of some queries of a request over all of its index keys.

        Parameters
        ----------
        query
            Projections of ``n`` tokens in any order.
        positions
            int64 ``[n]``, their positions.
        keys
            float64 ``[entries, index_head_dim]``, decoded.

        Returns
        -------
        Tensor
            ``compute`` ``[n, entries]``, ``-inf`` where invisible.
        """
        rope = rope_rows(self.frequencies, positions, self.arithmetic.rope_table)
        rows = self._query_rows(query, rope)
        return index_scores(
            rows.stored.values,
            rows.weights,
            keys,
            visible_entries(positions, self.ratio),
            self.arithmetic,
            self.compute,
        )

    def _index_rows(
        self, projected: Projected, rope: Tensor, state: KeyState | None
    ) -> CompressedRows | None:
        given, weights = projected.index, self.weights.index
        if given is None or weights is None or state is None:
            return None
        if self.ratio == PER_TOKEN:
            eps, layout = self.config.index_norm_eps, self.config.index_rope
            first = projected.first_position
            rows = token_keys(given.kv, weights, eps, rope, layout, self.arithmetic, first)
        else:
            rows = self.key_side.index_rows(given, weights, state.tokens)
        state.rows.append(rows.stored.values)
        return rows

    def _main_rows(self, projected: Projected, state: KeyState | None) -> CompressedRows | None:
        given, weights = projected.main, self.weights.main
        if given is None or weights is None or state is None:
            return None
        rows = self.key_side.main_rows(given, weights, state.tokens)
        state.rows.append(rows.stored.values)
        return rows

    def _query_rows(self, given: QueryProjections, rope: Tensor) -> QueryRows:
        rotated = rotate_query(given.q, rope, self.arithmetic, self.config.index_rope)
        stored = store(rotated, self.arithmetic.index_query)
        scale = self.config.index_weight_scale
        return QueryRows(rotated, stored, head_weights(given.weights, scale, self.arithmetic))

    def _select(
        self, query: QueryRows, keys: Tensor, visible: Tensor, keep_scores: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Score and pick in blocks of queries; scores of a block are dropped unless kept."""
        kept, picks = [], []
        for block in score_blocks(len(visible), len(keys), self.budget_bytes):
            scores = index_scores(
                query.stored.values[block],
                query.weights[block],
                keys,
                visible[block],
                self.arithmetic,
                self.compute,
            )
            picks.append(select_topk(scores, self.config.index_topk))
            if keep_scores:
                kept.append(scores)
        return (torch.cat(kept) if keep_scores else None), torch.cat(picks)
