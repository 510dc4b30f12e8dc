"""Scores and picks of long rows without a score matrix: every block hands on the best of a span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from needlepoint.optimized.build.arguments import ScoreTopkArguments
from needlepoint.optimized.build.score_variants import MMA, TILES, held_heads, score_topk_name
from needlepoint.optimized.cuda.runtime import launch
from needlepoint.optimized.cuda.score_plan import ScorePlan, keys_of_a_block, plan_scores
from needlepoint.optimized.cuda.scores import Keys, allocate_scores, require_scores
from needlepoint.optimized.cuda.topk import (
    Lists,
    PageTable,
    launch_topk,
    require_picks,
    require_topk,
)
from needlepoint.optimized.protocol.interface import QueryRows

_HEAD_ROWS = 64  # of a block
_NUMBERS = 4096  # scores that a block keeps
_LIST_LIMIT = 2  # spans are at least this many times k long, so that lists are much shorter


def long_plan(counts: Sequence[int], heads: int, unit: str = MMA) -> ScorePlan:
    """Return a plan for :func:`score_topk_lists`: as few rows a group as fill the unit."""
    return plan_scores(counts, heads, unit, most=_HEAD_ROWS // held_heads(heads))


def score_topk_lists(
    query: QueryRows,
    context_lens: Tensor,
    keys: Keys,
    plan: ScorePlan,
    columns: int,
    k: int,
    pages: PageTable | None = None,
    *,
    overlap: bool = True,
) -> Tensor:
    """Score and select long rows without a score matrix.

    Every block scores a span of keys, keeps the scores in shared memory and writes only the best k
    of them; the picks are selected among those. Same picks as :func:`score_topk`.

    Parameters
    ----------
    plan
        From :func:`long_plan`, on the device.

    Raises
    ------
    ValueError
        Before any launch, if an argument does not fit; the message names it.
    """
    checked = require_scores(query, context_lens, keys, plan, columns)
    require_picks(k, pages, plan.rows, columns)
    groups = _list_groups(plan)
    seen, device = checked.inputs["context_lens"], checked.device
    span = list_span(columns, plan, k, device)
    slots = min(k, span)
    spans = -(-columns // span)
    values = allocate_scores(plan.rows, spans * slots, device)
    found = torch.empty((plan.rows, values.stride(0)), dtype=torch.int32, device=device)
    found = found[:, : spans * slots]
    require_topk(values, seen, k, pages, columns)
    arguments = ScoreTopkArguments(
        **checked.inputs,
        groups=groups,
        span=span,
        list_scores=values,
        list_columns=found,
        slots=slots,
        overlap=overlap,
    )
    launch(score_topk_name(plan.heads, checked.row, plan.unit), arguments, device)
    topk_indices = torch.empty((plan.rows, k), dtype=torch.int32, device=device)
    lists = Lists(found, span, slots, columns)
    launch_topk(values, seen, topk_indices, pages, lists, overlap=overlap)
    return topk_indices


def _list_groups(plan: ScorePlan) -> Tensor:
    """Return the groups of a plan that the fused path can take."""
    most = _HEAD_ROWS // held_heads(plan.heads)
    if plan.largest > most:
        raise ValueError(
            f"plan: groups of up to {plan.largest} rows, expected at most {most}, as of long_plan"
        )
    return plan.groups[list(TILES[plan.unit])[-1]]


def list_span(columns: int, plan: ScorePlan, k: int, device: torch.device) -> int:
    """Return the keys of a block of the fused path: lists stay shorter than half the scores."""
    most = _NUMBERS // (_HEAD_ROWS // held_heads(plan.heads))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    tile = list(TILES[plan.unit])[-1]
    span = keys_of_a_block(columns, max(1, plan.groups[tile].shape[0]), tile, count, most)
    return min(most, max(span, -(-_LIST_LIMIT * k // 128) * 128))
