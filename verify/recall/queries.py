"""The queries of needles in one request: what both sides are given, and the reference of them.

Recall asks for the queries of needles alone, so only they are projected and scored; of the other
tokens only the index path is. A candidate that can compute some queries is asked for those
(``run_rows``); any other runs the whole layer, whose projections then serve every candidate. The
reference is the judge's own: nothing here computes a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    CompressorInputs,
    LayerInputs,
    Observed,
    QueryInputs,
)
from needlepoint.optimized.protocol.optional import ComputesRows
from needlepoint.reference.compressor import CompressorState
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.linear import project
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic, Precision
from needlepoint.reference.projections import project_keys, project_queries
from needlepoint.reference.rope import rope_rows
from needlepoint.reference.stages import KeyProjections, QueryProjections
from needlepoint.reference.topk import visible_entries
from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.inputs.layer_inputs import GivenLayer, given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import CandidateFailed, blamed, observe
from needlepoint.verify.judge.contracts import compute_type
from needlepoint.verify.judge.sides.attention_side import AttentionInputs
from needlepoint.verify.judge.sides.profile_side import KeyReferences
from needlepoint.verify.judge.sides.query_reference import RotatedQueries
from needlepoint.verify.judge.sides.query_side import query_rows
from needlepoint.verify.recall.model import NeedlePrompt

CHUNK = 1024
"""Tokens projected at once: transients do not grow with the prompt."""


class LayerReference:
    """The reference of one layer for all of its prompts: its weights are drawn once.

    ``given`` rounds projections to what both sides are given; ``contract`` makes the scores that
    hits are paired with; ``attention`` is the contract in the type that attention is evaluated in.

    Raises
    ------
    ValueError
        If the layer has no indexer, or a weight another shape than the config asks for.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: LayerWeights, contract: Arithmetic
    ) -> None:
        ratio = config.ratio(layer)
        if ratio != 4 or weights.index is None:
            raise ValueError(
                f"layer {layer} has ratio {ratio}; recall needs layers of ratio 4, with a "
                "compressor and an indexer"
            )

        def under(arithmetic: Arithmetic, compute: torch.dtype = torch.float32) -> ReferenceLayer:
            return ReferenceLayer(config, layer, weights, arithmetic, compute=compute)

        self.config, self.layer, self.weights = config, layer, weights
        self.given = under(BF16_CONTRACT)
        self.contract = under(contract, compute_type(contract))
        self.attention = under(contract)


@dataclass(frozen=True)
class NeedleQueries:
    """One request of one layer, and the queries of its needles.

    What is computed here is computed once, by the first candidate that it is needed for.

    Attributes
    ----------
    prompt, reference
        The needles, one query each, and the layer.
    inputs
        What a candidate of rows is given; the query part has one row a needle.
    latent
        fp32 ``[rows, q_lora_rank]``.
    whole
        What a candidate of whole layers is given; None where no such candidate is asked.
    """

    prompt: NeedlePrompt
    reference: LayerReference
    inputs: LayerInputs
    latent: Tensor
    whole: GivenLayer | None

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the queries, int64 ``[rows]``."""
        return _positions(self.prompt)

    @cached_property
    def visible(self) -> Tensor:
        """Entries that each query may see, int64 ``[rows]``."""
        return visible_entries(self.positions, self.inputs.ratio)

    @property
    def entries(self) -> int:
        """Entries of the request."""
        return self.inputs.lengths[0] // self.inputs.ratio

    @property
    def block(self) -> Block:
        """The queries as one block whose rows are row numbers."""
        rows = len(self.positions)
        return Block(0, 0, rows, slice(0, rows), self.visible, self.entries, self.positions)

    @cached_property
    def keys(self) -> KeyReferences:
        """The judge's key references; profiles share what they agree on."""
        return KeyReferences(self.inputs)

    @cached_property
    def rotated(self) -> RotatedQueries:
        """The judge's rotated queries, shared by profiles."""
        return RotatedQueries(self.inputs)

    @cached_property
    def scores(self) -> Tensor:
        """Scores under the contract: ``[rows, entries]``, -inf where invisible."""
        keys = self._stored_rows(INDEX, self.reference.contract)
        return self.reference.contract.score(self._contract_queries[1], self.positions, keys)

    @cached_property
    def main_rows(self) -> Tensor:
        """Main rows under the contract, decoded: float64 ``[entries, head_dim]``."""
        return self._stored_rows(MAIN, self.reference.attention)

    def attention_inputs(self, row: int) -> AttentionInputs:
        """Return query and window rows of one query under the contract."""
        layer, position = self.reference.attention, int(self.positions[row])
        first = max(0, position - layer.config.window_size + 1)
        latent = self._contract_queries[0][row : row + 1]
        tokens, window = self._window
        start = int(torch.searchsorted(tokens, first))
        return AttentionInputs(
            layer.attention.queries(latent, layer.rope(position, 1), position),
            window[start : start + position + 1 - first],
        )

    @cached_property
    def _contract_queries(self) -> tuple[Tensor, QueryProjections]:
        """Latent and index queries as the contract projects them, float64."""
        layer, query = self.reference.contract, self.inputs.query
        if query is not None and _as_given(layer):
            wide = QueryProjections(query.q.double(), query.weights.double())
            return self.latent.double(), wide
        return _project_queries(layer, self.inputs.hidden, self.positions)

    @cached_property
    def _window(self) -> tuple[Tensor, Tensor]:
        """Tokens that some query's window holds, ascending, and their decoded rows."""
        layer = self.reference.attention
        near = self.positions.unsqueeze(1) - torch.arange(layer.config.window_size)
        tokens = torch.unique(near[near >= 0])
        if self.whole is not None and _as_given(layer):
            rows = self.whole.window[tokens].double()
        else:
            arithmetic = layer.arithmetic.projected
            rows = project(self.inputs.hidden[tokens], layer.weights.wkv, arithmetic)
        rope = rope_rows(layer.frequencies, tokens, layer.arithmetic.rope_table)
        return tokens, layer.key_side.window_rows(rows, layer.weights.kv_norm, rope)

    def _stored_rows(self, path: str, layer: ReferenceLayer) -> Tensor:
        """Return what a key path stores, decoded: float64 ``[entries, d]``, chunk by chunk."""
        weights = _compressor(layer, path)
        given = {INDEX: self.inputs.index}
        if self.whole is not None:
            given[MAIN] = self.whole.inputs.main
        source = given.get(path) if _as_given(layer) else None
        make = layer.key_side.index_rows if path == INDEX else layer.key_side.main_rows
        state = CompressorState(layer.ratio, len(weights.wkv), layer.arithmetic)
        out = torch.empty(self.entries, len(weights.norm), dtype=torch.float64)
        for start in range(0, self.inputs.lengths[0], CHUNK):
            part = slice(start, start + CHUNK)
            if source is None:
                keys = project_keys(self.inputs.hidden[part], weights, layer.arithmetic, start)
            else:
                keys = KeyProjections(source.kv[part].double(), source.score[part].double())
            rows = make(keys, weights, state)
            out[rows.first_entry : rows.first_entry + len(rows.pooled)] = rows.stored.values
        return out


def project_request(
    prompt: NeedlePrompt, reference: LayerReference, seed: int, *, whole: bool
) -> NeedleQueries:
    """Project one request: its tokens for the index path, and the queries of its needles.

    Parameters
    ----------
    prompt
        The request and its needles.
    reference
        The layer.
    seed
        Of page permutations.
    whole
        Whether a candidate needs the whole layer; every token is then projected for all of it.

    Raises
    ------
    ValueError
        If a state is not finite.
    """
    config, layer, given = reference.config, reference.layer, reference.given
    hidden = prompt.hidden(layer)
    if whole:
        lengths, states = (len(hidden),), {layer: hidden}
        source = Inputs(
            "recall", "", config, lengths, (layer,), seed, states, lambda _: given.weights
        )
        return request_queries(prompt, reference, given_layer(source, layer, given))
    index = _project_keys(given, hidden)
    positions = _positions(prompt)
    latent, query = _project_queries(given, hidden, positions)
    inputs = LayerInputs(
        layer=layer,
        ratio=given.ratio,
        lengths=(len(hidden),),
        index=index,
        main=index,
        query=QueryInputs(query.q.float(), query.weights.float()),
        rope_table=_rope_table(given.frequencies, len(hidden)),
        norm_eps=config.norm_eps,
        topk=config.index_topk,
        weight_scale=config.index_weight_scale,
        hidden=hidden,
        seed=seed,
    )
    return NeedleQueries(prompt, reference, inputs, latent.float(), None)


def request_queries(
    prompt: NeedlePrompt, reference: LayerReference, given: GivenLayer
) -> NeedleQueries:
    """Return the queries of needles in a layer of one request that is projected already."""
    positions, query = _positions(prompt), given.inputs.query
    if query is None:
        raise ValueError(f"layer {given.inputs.layer} has no index queries")
    asked = QueryInputs(query.q[positions], query.weights[positions])
    inputs = replace(given.inputs, query=asked)
    return NeedleQueries(prompt, reference, inputs, given.latent[positions], given)


def candidate_outputs(candidate: Candidate, queries: NeedleQueries) -> Observed:
    """Return what a candidate computes for the queries; rows of every tensor are row numbers.

    Raises
    ------
    CandidateFailed
        If it raises, breaks the protocol or returns no picks.
    """
    inputs, positions = queries.inputs, queries.positions
    if isinstance(candidate, ComputesRows):
        with blamed(candidate.info.name, inputs.layer):
            found = candidate.run_rows(inputs, positions)
    elif queries.whole is None:
        raise ValueError(f"candidate {candidate.info.name} runs whole layers; project one for it")
    else:
        found = request_outputs(observe(candidate, queries.whole.inputs), 0, positions, positions)
    picks = found.topk
    if picks is None or len(picks) != len(positions):
        raise CandidateFailed(
            f"candidate {candidate.info.name}, layer {inputs.layer}: "
            f"{'no picks' if picks is None else f'picks of {len(picks)} queries'}, expected those "
            f"of {len(positions)}; recall needs the stage index.topk"
        )
    return found


def request_outputs(outputs: Observed, request: int, positions: Tensor, tokens: Tensor) -> Observed:
    """Return some queries of one request of a whole run; rows of every tensor are row numbers.

    Parameters
    ----------
    outputs
        All requests of a layer.
    request
        Which one.
    positions, tokens
        int64 ``[rows]``, positions in the request, and the same as rows of the layer's tensors.
    """
    scores = None
    if outputs.scores is not None and len(positions):
        read = outputs.scores
        found = torch.cat([read(request, int(p), int(p) + 1) for p in positions])

        def scores(request: int, start: int, stop: int) -> Tensor:
            return found[start:stop]

    stored = {
        path: replace(
            paged, page_table=(paged.page_table[request],), entries=(paged.entries[request],)
        )
        for path, paged in outputs.stored.items()
    }
    return replace(
        outputs,
        dense={},
        stored=stored,
        query=None if outputs.query is None else query_rows(outputs.query, tokens),
        scores=scores,
        topk=None if outputs.topk is None else outputs.topk[tokens],
    )


def _positions(prompt: NeedlePrompt) -> Tensor:
    return torch.tensor([needle.query for needle in prompt.needles])


def _as_given(layer: ReferenceLayer) -> bool:
    """Return whether an arithmetic reads the given projections; others make their own."""
    return layer.arithmetic.projected is Precision.FP32


def _compressor(layer: ReferenceLayer, path: str) -> CompressorWeights:
    weights = layer.weights.index if path == INDEX else layer.weights.main
    if weights is None:
        raise ValueError(f"a layer of ratio {layer.ratio} without {path} compressor has no rows")
    return weights


def _project_keys(layer: ReferenceLayer, hidden: Tensor) -> CompressorInputs:
    """Project every token for the index path, fp32."""
    weights = _compressor(layer, INDEX)
    kv, score = (torch.empty(len(hidden), len(weights.wkv)) for _ in range(2))
    for start in range(0, len(hidden), CHUNK):
        part = slice(start, start + CHUNK)
        found = project_keys(hidden[part], weights, layer.arithmetic, start)
        kv[part], score[part] = found.kv, found.score
    return CompressorInputs(kv, score, weights.ape.float(), weights.norm.float())


def _project_queries(
    layer: ReferenceLayer, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, QueryProjections]:
    latent, query = project_queries(
        hidden[positions], layer.weights, layer.config, layer.arithmetic
    )
    if query is None:
        raise ValueError("a layer without an indexer has no index queries")
    return latent, query


def _rope_table(frequencies: Tensor, length: int) -> Tensor:
    table = torch.empty(length, len(frequencies), 2)
    for start in range(0, length, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, length))
        table[positions] = rope_rows(frequencies, positions, Precision.FP32).to(torch.float32)
    return table
