"""From one layer's outcome to its part of the result."""

from __future__ import annotations

from collections.abc import Collection

from needlepoint.optimized.protocol.interface import MAIN, LayerInputs, StageKey
from needlepoint.verify.base.rows import Rows, stage_rows
from needlepoint.verify.base.stages import (
    ATTENTION,
    COMPARED,
    CONSEQUENCE,
    GIVEN,
    NOT_COVERED,
    SKIPPED,
    TOPK,
    declared_stages,
    rows_expected,
    stage_kind,
)
from needlepoint.verify.judge.blame import with_inputs
from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.judge.results.stages import (
    compared_stage,
    consequence_stage,
    uncompared_stage,
)
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.selection import Swap
from needlepoint.verify.numerics.spread import finite
from needlepoint.verify.schema.result import LayerResult, StageResult, Swaps, TopkResult


def layer_result(
    outcome: LayerOutcome,
    declared: Collection[StageKey],
    given: LayerInputs,
    limits: Limits,
    contract: str,
    *,
    wanted: Collection[StageKey] | None = None,
) -> LayerResult:
    """Return the result of one layer of one candidate: an entry for every stage a layer has.

    Parameters
    ----------
    outcome
        Row errors, picks and costs.
    declared
        Stages that the candidate declares: what had to be compared.
    given
        The layer's given tensors.
    limits
        Limits.
    contract
        Name of the contract that overlap and score lost are against.
    wanted
        Stages the user asked for; None for all.
    """
    entries: list[StageResult] = []
    for key in declared_stages(given.ratio):
        rows = stage_rows(key, given.lengths, given.ratio)
        expected = rows_expected(key, given.lengths, given.ratio)
        kind = stage_kind(key, declared)
        if kind == GIVEN:
            entries.append(uncompared_stage(key, GIVEN, expected))
        elif kind == CONSEQUENCE:
            entries.append(_consequence(outcome, key, expected))
        elif kind == COMPARED and wanted is not None and key not in wanted:
            entries.append(uncompared_stage(key, NOT_COVERED, expected, "not asked for"))
        elif kind == COMPARED:
            entries.append(_compared(outcome, key, rows, limits))
        else:
            entries.append(uncompared_stage(key, NOT_COVERED, expected, "not declared"))
    return LayerResult(
        layer=outcome.layer,
        ratio=outcome.ratio,
        stages=with_inputs(entries, outcome.ratio),
        topk=_topk_result(outcome, given.topk, contract),
        swap=outcome.swap,
    )


def uncompressed_layer(layer: int, lengths: tuple[int, ...]) -> LayerResult:
    """Return the entry of a layer of ratio 0, which has no compressor to judge."""
    entries = (
        uncompared_stage((MAIN, "input"), GIVEN, sum(lengths)),
        uncompared_stage((MAIN, ATTENTION), NOT_COVERED, sum(lengths), "no compressed rows"),
    )
    return LayerResult(layer=layer, ratio=0, stages=entries)


def _compared(outcome: LayerOutcome, key: StageKey, rows: Rows, limits: Limits) -> StageResult:
    if key in outcome.errors:
        found = compared_stage(outcome.errors[key], rows, limits[key[1]])
        idle = key[1] == TOPK and outcome.picks is not None and not outcome.picks.discarded.any()
        note = "no query sees more entries than it picks" if idle else None
        return found if note is None else found.model_copy(update={"detail": note})
    if rows.total == 0:
        return uncompared_stage(key, NOT_COVERED, 0, "no request completes a window")
    return uncompared_stage(key, SKIPPED, rows.total, "declared, but not returned")


def _consequence(outcome: LayerOutcome, key: StageKey, expected: int) -> StageResult:
    if outcome.attention is None:
        why = "needs stored main rows" + (" and picks" if outcome.ratio == 4 else "")
        return uncompared_stage(key, NOT_COVERED, expected, why)
    return consequence_stage(key, outcome.attention, expected)


def _topk_result(outcome: LayerOutcome, k: int, contract: str) -> TopkResult | None:
    """Return the selection of a layer; None where the candidate has no picks."""
    picks = outcome.picks
    if picks is None:
        return None
    cost = outcome.costs.get(contract)
    overlap = lost = None
    if cost is not None and cost.overlap:  # nothing is tallied without the contract's scores
        overlap, lost = cost.overlap_rows, cost.lost_rows
    return TopkResult(
        k=k,
        rows=len(picks.invalid),
        discarded_mean=finite(picks.discarded.mean().item()),
        overlap_mean=None if overlap is None else finite(overlap.mean().item()),
        overlap_min=None if overlap is None else finite(overlap.min().item()),
        swaps=Swaps(
            tie=picks.count(Swap.TIE),
            explained=picks.count(Swap.EXPLAINED),
            selector=picks.count(Swap.SELECTOR),
            unknown=picks.count(Swap.UNKNOWN),
            upstream=picks.count(Swap.UPSTREAM),
        ),
        score_lost_max=None if lost is None else finite(lost.max().item()),
        invalid=int(picks.invalid.sum()),
    )
