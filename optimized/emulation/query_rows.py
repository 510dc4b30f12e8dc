"""An emulated candidate on some queries of one request: what recall asks of it.

The key side is computed for every token, as in a whole run; of the query side only the rows asked
for. Stored rows and queries have the bytes of a whole run; scores agree within the rounding of
their sums.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from needlepoint.optimized.emulation.keyside import KeySide
from needlepoint.optimized.emulation.memory import TransientMeter, measure_law
from needlepoint.optimized.emulation.query import STORES, store_queries
from needlepoint.optimized.emulation.readback import read_index_keys, read_queries
from needlepoint.optimized.emulation.scoring import FUSED_ROWS, fused_scores, unfused_scores
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import INDEX, LayerInputs, Observed


def observe_rows(
    inputs: LayerInputs, positions: Tensor, key_format: str, *, fused: bool
) -> Observed:
    """Store the index keys of one request and score some of its queries.

    Parameters
    ----------
    inputs
        A layer of ratio 4 and one request. ``query`` holds only the rows to score; ``main`` is not
        read.
    positions
        int64 ``[rows]``, position of each of them.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    fused
        Whether scores are formed head by head or through the per-head tensor.

    Returns
    -------
    Observed
        Pages of all index keys, and query, scores and picks of the rows alone: row ``i`` of each is
        the query at ``positions[i]``, and the score reader takes row numbers.

    Raises
    ------
    ValueError
        If the layer has no index path.
    """
    if inputs.index is None or inputs.query is None:
        raise ValueError(f"layer {inputs.layer}, ratio {inputs.ratio}: expected an index path")
    side = KeySide(inputs.index, inputs, f"index-{key_format}", STORES[key_format], rotated=True)
    if fused:
        side.run_fused()
    else:
        side.run_separate()
    paged = side.paged
    del side  # its rows before the store are several times its pages
    # The query store rotates row i by row i of its table.
    table = replace(inputs, lengths=(len(positions),), rope_table=inputs.rope_table[positions])
    query = store_queries(inputs.query, table, key_format)
    keys = read_index_keys(paged, 0)
    scores = torch.empty(len(positions), len(keys.values))
    score = fused_scores if fused else unfused_scores
    score(read_queries(query, slice(None)), query.weights, keys.values, scores)
    if keys.scale is not None:
        scores.mul_(keys.scale)
    visible = (positions + 1) // inputs.ratio
    scores.masked_fill_(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
    return Observed(
        stored={INDEX: paged},
        query=query,
        scores=lambda request, start, stop: scores[start:stop],
        topk=select_topk(scores, visible, inputs.topk),
        path_taken=f"{len(positions)} queries of {inputs.lengths[0]} tokens",
    )


@cache
def scoring_transients(tokens: int, heads: int, *, fused: bool) -> tuple[int | None, int]:
    """Return the transient bytes of scoring the end of a prompt: measured, and by the law.

    The law is fitted to small sizes. Fused scoring is also measured at full size, one block of
    queries; the per-head tensor of unfused scoring may not fit and is never allocated.
    """
    keys = tokens // 4
    if not fused:
        return None, measure_law(unfused_scores).predict_prompt(tokens, heads)
    law = measure_law(fused_scores, [(64, 1, 96), (256, 1, 64), (64, 1, 512), (128, 1, 256)])
    q, w = torch.zeros(FUSED_ROWS, heads, 128), torch.zeros(FUSED_ROWS, heads)
    k, out = torch.zeros(keys, 128), torch.empty(FUSED_ROWS, keys)
    with TransientMeter() as meter:
        fused_scores(q, w, k, out)
    return meter.peak_bytes, law.predict(FUSED_ROWS, 1, keys)
