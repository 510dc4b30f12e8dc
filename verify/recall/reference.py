"""The reference's index scores of some queries, under a contract or a profile."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.compressor import CompressorState
from needlepoint.reference.indexer import head_weights, index_scores, rotate_query
from needlepoint.reference.keyside import KeySide, store
from needlepoint.reference.linear import project
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.rope import rope_frequencies, rope_rows
from needlepoint.reference.stages import KeyProjections
from needlepoint.verify.judge.contracts import compute_type
from needlepoint.verify.recall.rows import CHUNK, GivenRows, query_projections


def reference_scores(given: GivenRows, arithmetic: Arithmetic) -> Tensor:
    """Return what the reference scores under a contract, keys made chunk by chunk.

    Returns
    -------
    Tensor
        ``[rows, entries]``, -inf where invisible.

    Raises
    ------
    ValueError
        If the layer has no index path.
    """
    config, weights = given.config, given.weights
    frequencies = rope_frequencies(config, compressed=True)
    side = KeySide(given.inputs.ratio, config.norm_eps, frequencies, arithmetic)
    index, own = given.inputs.index, weights.index
    if index is None or own is None:
        raise ValueError(f"layer {given.layer} has no index path")
    state = CompressorState(given.inputs.ratio, own.wkv.shape[0], arithmetic)
    keys = torch.empty(given.entries, config.index_head_dim, dtype=torch.float64)
    for start in range(0, len(given.hidden), CHUNK):
        part = slice(start, start + CHUNK)
        kv, score = index.kv[part].to(torch.float64), index.score[part].to(torch.float64)
        if arithmetic.projected is not Precision.FP32:
            kv, score = (
                project(given.hidden[part], w, arithmetic.projected, first_position=start)
                for w in (own.wkv, own.wgate)
            )
        rows = side.index_rows(KeyProjections(kv, score), own, state)
        keys[rows.first_entry : rows.first_entry + len(rows.pooled)] = rows.stored.values
    q, w = query_projections(config, weights, given.hidden, given.positions, arithmetic)
    rope = rope_rows(frequencies, given.positions, arithmetic.rope_table)
    stored = store(rotate_query(q, rope, arithmetic), arithmetic.index_query).values
    heads = head_weights(w, config.index_weight_scale, arithmetic)
    return index_scores(stored, heads, keys, given.visible, arithmetic, compute_type(arithmetic))
