"""Scores and picks of two recordings of one arithmetic: within the bounds of both sides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, StageKey
from needlepoint.reference.formats import BF16, FLOAT64, FP4_OFFICIAL, FP8_PLAIN, Format
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import Block, query_blocks
from needlepoint.verify.base.stages import SCORES, TOPK
from needlepoint.verify.diff.byte_compare import same_bytes
from needlepoint.verify.diff.pair import LayerPair
from needlepoint.verify.judge.sides.query_side import (
    compare_scores,
    pick_rows,
    query_rows,
    usable_scores,
)
from needlepoint.verify.layout.stored_rows import (
    decoded_queries,
    read_stored,
    replayable,
    unfolded_weights,
)
from needlepoint.verify.numerics.bounds import ScoreBound
from needlepoint.verify.numerics.error_bound import exact as enclose
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors
from needlepoint.verify.numerics.selection import PickErrors, judge_picks

_FORMATS: dict[str, Format] = {
    "bf16": BF16,
    "fp8": FP8_PLAIN,
    "fp4": FP4_OFFICIAL,
    "float64": FLOAT64,
}


def selection_errors(
    pair: LayerPair, arithmetic: Arithmetic, limits: Limits
) -> tuple[dict[StageKey, RowErrors], PickErrors | None]:
    """Compare scores within the bounds of both sides, and picks by meaning.

    Parameters
    ----------
    pair
        Both sides.
    arithmetic
        What both compute.
    limits
        Limits; ``topk`` scales the bound that explains a swap.

    Returns
    -------
    tuple
        Row errors of the stages that could be compared, and the swaps of the picks. Nothing where
        a side lacks the scores, or the stored keys and queries that their bound is made of.
    """
    meant, own, given = pair.meant, pair.own, pair.given
    if meant.scores is None or own.scores is None or meant.query is None:
        return {}, None
    if INDEX not in meant.stored:
        return {}, None
    keys = replayable(read_stored(meant.stored[INDEX], 128).values)
    spans = [Rows(given.lengths, given.ratio).span(r) for r in range(len(given.lengths))]
    bounds = [ScoreBound.of_keys(enclose(keys[span]), arithmetic) for span in spans]
    score_rows: list[RowErrors] = []
    picks: list[PickErrors] = []
    for block in query_blocks(given.lengths, given.ratio, meant.query.codes[0].numel()):
        part = query_rows(meant.query, block.rows)
        bound = 2 * bounds[block.request].of_queries(
            enclose(replayable(decoded_queries(part, _FORMATS[part.format]))),
            enclose(replayable(unfolded_weights(part))),
            block.columns,
        )
        expected = meant.scores(block.request, block.start, block.stop)
        found = own.scores(block.request, block.start, block.stop)
        reference = usable_scores(expected, block)
        score_rows.append(_score_errors(found, expected, reference, bound, block))
        if own.topk is not None and meant.topk is not None:
            mine, theirs = own.topk[block.rows], meant.topk[block.rows]
            if torch.equal(mine, theirs):
                # The same picks are no difference, whatever they are.
                mine = theirs = select_topk(reference, given.topk)
            picks.append(
                judge_picks(
                    mine,
                    theirs,
                    usable_scores(found, block),
                    reference,
                    bound,
                    block.visible,
                    given.topk,
                    limit=limits[TOPK].value,
                )
            )
    errors = {(INDEX, SCORES): RowErrors.concatenate(score_rows)}
    if not picks:
        return errors, None
    errors[INDEX, TOPK] = RowErrors.concatenate([pick_rows(p) for p in picks])
    return errors, PickErrors.concatenate(picks)


def same_selection(pair: LayerPair) -> frozenset[StageKey]:
    """Return which of scores and picks have the same bytes on both sides, whatever they are."""
    own, meant, lengths = pair.own, pair.meant, pair.given.lengths
    found: set[StageKey] = set()
    if own.topk is not None and meant.topk is not None and torch.equal(own.topk, meant.topk):
        found.add((INDEX, TOPK))
    if own.scores is not None and meant.scores is not None:
        blocks = query_blocks(lengths, pair.given.ratio, 1)
        spans = [(block.request, block.start, block.stop) for block in blocks]
        if all(bool(same_bytes(own.scores(*s), meant.scores(*s)).all()) for s in spans):
            found.add((INDEX, SCORES))
    return frozenset(found)


def _score_errors(
    found: Tensor, expected: Tensor, reference: Tensor, bound: Tensor, block: Block
) -> RowErrors:
    """Compare scores; a row with the same bytes is equal even where neither side is usable."""
    columns = block.columns
    usable = (expected[:, :columns] == reference).all(1)
    usable &= torch.isneginf(expected[:, columns:]).all(1)
    row = compare_scores(found, reference, bound, block)
    ratio = torch.where(usable, row.ratio, math.inf)
    return row.with_ratio(torch.where(same_bytes(found, expected), 0.0, ratio))
