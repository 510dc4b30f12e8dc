"""One layer of two recordings: how far what was observed is apart, and what that costs."""

from __future__ import annotations

from dataclasses import replace

from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    QueryRows,
    StageKey,
)
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.stage_blocks import query_blocks
from needlepoint.verify.base.stages import (
    COMPARED,
    QUERIES,
    SCORES,
    STORED,
    TOPK,
    WEIGHTS,
)
from needlepoint.verify.diff.byte_compare import (
    UnownedChange,
    equal_rows,
    equal_stored,
    unowned_change,
)
from needlepoint.verify.diff.pair import LayerPair, given_errors, require_same_constants
from needlepoint.verify.diff.selection import same_selection, selection_errors
from needlepoint.verify.judge.contracts import ContractBlock
from needlepoint.verify.judge.cost import CostTally, key_error
from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.judge.results.layers import layer_result
from needlepoint.verify.judge.results.stages import zero_errors
from needlepoint.verify.judge.sides.attention_side import attention_errors
from needlepoint.verify.judge.sides.outputs import judge_observed
from needlepoint.verify.layout.stored_rows import (
    read_stored,
    replayable,
)
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.schema.result import DIFFER, LayerResult, StageResult, WorstRow


def diff_layer(
    pair: LayerPair,
    arithmetic: Arithmetic,
    limits: Limits,
    exact: bool,
    against: str,
    wanted: frozenset[StageKey] | None,
) -> tuple[LayerOutcome, LayerResult, bool]:
    """Compare one layer.

    Parameters
    ----------
    pair
        Both sides.
    arithmetic
        Profile of the judged side.
    limits
        Limits.
    exact
        Whether both sides are one exact arithmetic.
    against
        What costs are against: the profile of the other side.
    wanted
        Stages to report; None for all.

    Returns
    -------
    tuple
        The outcome, its part of the result, and whether the given tensors differ already.

    Raises
    ------
    RecordingError
        If the constants of the layer differ: the recordings are not of one model.
    """
    require_same_constants(pair)
    given = given_errors(pair)
    upstream = any(bool(errors.local.failed(1.0).any()) for errors in given.values())
    judge = _equal_stages if exact else _judged_stages
    found = judge(pair, arithmetic, limits)
    outcome = replace(
        found,
        errors=given | dict(found.errors),
        costs={against: _cost(pair)},
        attention=_attention(pair),
    )
    result = layer_result(outcome, pair.stages, pair.given, limits, against, wanted=wanted)
    return outcome, _with_notes(result, pair) if exact else result, upstream


def _judged_stages(pair: LayerPair, arithmetic: Arithmetic, limits: Limits) -> LayerOutcome:
    # A dump is judged from the projections that it holds.
    given = pair.given if pair.brought is None else pair.own_given()
    return judge_observed(given, pair.own, arithmetic, limits)


def _equal_stages(pair: LayerPair, arithmetic: Arithmetic, limits: Limits) -> LayerOutcome:
    rows: dict[StageKey, RowErrors] = {
        key: equal_rows(own, pair.meant.dense[key], ".".join(key))
        for key, own in pair.own.dense.items()
        if len(own)
    }
    for path, own in pair.own.stored.items():
        if sum(own.entries):
            width = _width(pair, path)
            rows[path, STORED] = equal_stored(own, pair.meant.stored[path], width)
    if pair.own.query is not None and pair.meant.query is not None:
        rows[QUERY, QUERIES] = _equal_queries(pair.own.query, pair.meant.query)
        rows[QUERY, WEIGHTS] = equal_rows(
            pair.own.query.weights, pair.meant.query.weights, "query.weights"
        )
    scores, picks = selection_errors(pair, arithmetic, limits)
    errors = {key: StageErrors(key, row, row, "elements") for key, row in rows.items()}
    errors |= {key: StageErrors(key, row, row) for key, row in scores.items()}
    wanted = {(INDEX, SCORES), (INDEX, TOPK)} & pair.stages
    if wanted <= errors.keys():
        return LayerOutcome.of(pair.given, pair.own, errors, picks)
    # Scores or picks without what they are made from: where the sides differ, the profile's
    # reference judges.
    judged, same = _judged_stages(pair, arithmetic, limits), same_selection(pair)
    for key in wanted - errors.keys():
        row = zero_errors(sum(pair.given.lengths))
        errors[key] = StageErrors(key, row, row) if key in same else judged.errors[key]
    return replace(judged, errors=errors)


def _equal_queries(own: QueryRows, meant: QueryRows) -> RowErrors:
    row = equal_rows(own.codes, meant.codes, "query.query")
    if own.scales is None or meant.scales is None:
        return row
    scales = equal_rows(own.scales.flatten(1), meant.scales.flatten(1), "query.query scales")
    return row.join(scales, first_dim=0)


def _cost(pair: LayerPair) -> CostTally:
    """Return what the judged side costs against the other."""
    tally = CostTally()
    own, meant, given = pair.own, pair.meant, pair.given
    if INDEX in own.stored and INDEX in meant.stored:
        mine, theirs = (
            replayable(read_stored(side.stored[INDEX], 128).values) for side in (own, meant)
        )
        tally.relative = key_error(mine, True, theirs)
    if own.topk is None or meant.topk is None or meant.scores is None:
        return tally
    for block in query_blocks(given.lengths, given.ratio, 128):
        scores = meant.scores(block.request, block.start, block.stop)
        contract = ContractBlock(scores, meant.topk[block.rows])
        tally.add_picks(own.topk[block.rows], contract, block.visible, given.topk)
    return tally


def _attention(pair: LayerPair) -> RowErrors | None:
    if pair.own.attention is None or pair.meant.attention is None:
        return None
    return attention_errors(pair.own.attention, pair.meant.attention)


def _with_notes(result: LayerResult, pair: LayerPair) -> LayerResult:
    """Mark stored stages whose unowned bytes changed: they are no row's error, but a fault."""
    stages = []
    for stage in result.stages:
        change = None
        if stage.stage == STORED and stage.kind == COMPARED:
            path = stage.path
            own, meant = pair.own.stored[path], pair.meant.stored[path]
            change = unowned_change(own, meant, _width(pair, path))
        stages.append(stage if change is None else _with_change(stage, change, pair.given.ratio))
    return result.model_copy(update={"stages": tuple(stages)})


def _with_change(stage: StageResult, change: UnownedChange, ratio: int) -> StageResult:
    entry = change.entry
    row = WorstRow(
        request=change.request,
        position=None if entry is None else (entry + 1) * ratio - 1,
        entry=entry,
        dim=None,
        error=None,
        expected=change.expected,
        found=change.found,
        detail=f"byte {change.byte} of page {change.page}, which no entry owns",
    )
    # Rows that differ are named first; where none does, this byte is the place to look at.
    worst = (*stage.worst, row) if stage.verdict == DIFFER else (row, *stage.worst)
    note = f"bytes that no entry owns differ: {change.count}"
    return stage.model_copy(update={"verdict": DIFFER, "detail": note, "worst": worst})


def _width(pair: LayerPair, path: str) -> int:
    return 128 if path == INDEX else pair.given.main.norm_weight.numel()
