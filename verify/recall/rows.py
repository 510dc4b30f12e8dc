"""Some queries of one request: what both sides are given, and what a candidate makes of it.

Recall asks for the queries of needles alone. A candidate that can compute just those is asked for
them (``run_rows``); any other runs the whole layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    Candidate,
    CompressorInputs,
    LayerInputs,
    Observed,
    QueryInputs,
)
from needlepoint.optimized.protocol.optional import ComputesRows
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.linear import project
from needlepoint.reference.norm import rms_norm
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic, Precision
from needlepoint.reference.rope import rope_frequencies, rope_rows
from needlepoint.reference.rounding import round_to
from needlepoint.reference.topk import visible_entries
from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import CandidateFailed, blamed, observe
from needlepoint.verify.judge.sides.query_side import query_rows

CHUNK = 1024
"""Tokens projected at once: transients do not grow with the prompt."""


@dataclass(frozen=True)
class GivenRows:
    """One request of one layer, and the queries to look at.

    Attributes
    ----------
    config, layer, weights
        The layer.
    hidden
        bf16 ``[length, hidden_size]``.
    positions
        int64 ``[rows]``, positions of the queries.
    inputs
        What a candidate of rows is given; the query part has one row a position.
    """

    config: ModelConfig
    layer: int
    weights: LayerWeights
    hidden: Tensor
    positions: Tensor
    inputs: LayerInputs

    @property
    def visible(self) -> Tensor:
        """Entries that each query may see, int64 ``[rows]``."""
        return visible_entries(self.positions, self.inputs.ratio)

    @property
    def entries(self) -> int:
        """Entries of the request."""
        return len(self.hidden) // self.inputs.ratio

    @property
    def block(self) -> Block:
        """The queries as one block whose rows are row numbers."""
        rows = len(self.positions)
        return Block(0, 0, rows, slice(0, rows), self.visible, self.entries)


def given_rows(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    hidden: Tensor,
    positions: Tensor,
    seed: int,
) -> GivenRows:
    """Project one request's tokens for the index path, and the queries at some positions.

    Raises
    ------
    ValueError
        If the layer has no indexer, or a state is not finite.
    """
    ratio = config.ratio(layer)
    if ratio != 4 or weights.index is None:
        raise ValueError(
            f"layer {layer} has ratio {ratio}; recall needs layers of ratio 4, with a compressor "
            "and an indexer"
        )
    index = _compressor(hidden, weights.index, BF16_CONTRACT)
    q, w = query_projections(config, weights, hidden, positions, BF16_CONTRACT)
    frequencies = rope_frequencies(config, compressed=True)
    inputs = LayerInputs(
        layer=layer,
        ratio=config.ratio(layer),
        lengths=(len(hidden),),
        index=index,
        main=index,
        query=QueryInputs(q.to(torch.float32), w.to(torch.float32)),
        rope_table=_rope_table(frequencies, len(hidden)),
        norm_eps=config.norm_eps,
        topk=config.index_topk,
        weight_scale=config.index_weight_scale,
        hidden=hidden,
        seed=seed,
    )
    return GivenRows(config, layer, weights, hidden, positions, inputs)


def candidate_rows(candidate: Candidate, given: GivenRows) -> Observed:
    """Return what a candidate computes for the queries; rows of every tensor are row numbers.

    Raises
    ------
    CandidateFailed
        If it raises, breaks the protocol or returns no picks.
    """
    if isinstance(candidate, ComputesRows):
        with blamed(candidate.info.name, given.layer):
            found = candidate.run_rows(given.inputs, given.positions)
    else:
        found = _whole_run(candidate, given)
    picks = found.topk
    if picks is None or len(picks) != len(given.positions):
        raise CandidateFailed(
            f"candidate {candidate.info.name}, layer {given.layer}: "
            f"{'no picks' if picks is None else f'picks of {len(picks)} queries'}, expected those "
            f"of {len(given.positions)}; recall needs the stage index.topk"
        )
    return found


def _compressor(
    hidden: Tensor, weights: CompressorWeights, arithmetic: Arithmetic
) -> CompressorInputs:
    rows = {}
    for name, weight in (("kv", weights.wkv), ("score", weights.wgate)):
        rows[name] = torch.empty(len(hidden), len(weight))
        for start in range(0, len(hidden), CHUNK):
            part = hidden[start : start + CHUNK]
            rows[name][start : start + CHUNK] = project(
                part, weight, arithmetic.projected, first_position=start
            )
    return CompressorInputs(
        rows["kv"], rows["score"], weights.ape.to(torch.float32), weights.norm.to(torch.float32)
    )


def _rope_table(frequencies: Tensor, length: int) -> Tensor:
    table = torch.empty(length, len(frequencies), 2)
    for start in range(0, length, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, length))
        table[positions] = rope_rows(frequencies, positions, Precision.FP32).to(torch.float32)
    return table


def query_projections(
    config: ModelConfig,
    weights: LayerWeights,
    hidden: Tensor,
    positions: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """Return index queries float64 ``[rows, heads, 128]`` and head weights ``[rows, heads]``.

    Raises
    ------
    ValueError
        If the layer has no indexer.
    """
    if weights.index_wq_b is None or weights.weights_proj is None:
        raise ValueError("a layer without an indexer has no index queries")
    asked = hidden[positions]
    down = project(asked, weights.wq_a, arithmetic.projected)
    latent = round_to(rms_norm(down, weights.q_norm, config.norm_eps), arithmetic.latent)
    q = project(latent, weights.index_wq_b, arithmetic.projected)
    return (
        q.view(-1, config.index_n_heads, config.index_head_dim),
        project(asked, weights.weights_proj, arithmetic.projected),
    )


def _whole_run(candidate: Candidate, given: GivenRows) -> Observed:
    """Run all queries of the layer and keep the asked ones."""
    config, layer, rows = given.config, given.layer, given.positions
    source = Inputs(
        "recall",
        "",
        config,
        (len(given.hidden),),
        (layer,),
        given.inputs.seed,
        {layer: given.hidden},
        lambda _: given.weights,
    )
    reference = ReferenceLayer(config, layer, given.weights, BF16_CONTRACT, compute=torch.float32)
    observed = observe(candidate, given_layer(source, layer, reference).inputs)
    return request_rows(observed, 0, rows, rows)


def request_rows(observed: Observed, request: int, positions: Tensor, tokens: Tensor) -> Observed:
    """Return some queries of one request of a whole run; rows of every tensor are row numbers.

    Parameters
    ----------
    observed
        All requests of a layer.
    request
        Which one.
    positions, tokens
        int64 ``[rows]``, positions in the request, and the same as rows of the layer's tensors.
    """
    scores = None
    if observed.scores is not None and len(positions):
        read = observed.scores
        found = torch.cat([read(request, int(p), int(p) + 1) for p in positions])

        def scores(request: int, start: int, stop: int) -> Tensor:
            return found[start:stop]

    stored = {
        path: replace(
            paged, page_table=(paged.page_table[request],), entries=(paged.entries[request],)
        )
        for path, paged in observed.stored.items()
    }
    return replace(
        observed,
        dense={},
        stored=stored,
        query=None if observed.query is None else query_rows(observed.query, tokens),
        scores=scores,
        topk=None if observed.topk is None else observed.topk[tokens],
    )
