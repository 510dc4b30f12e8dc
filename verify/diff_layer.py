"""One layer of two recordings: what was given, what was observed, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    QUERY,
    LayerInputs,
    Observed,
    QueryRows,
    StageKey,
)
from needlepoint.reference.formats import BF16, FLOAT64, FP4_OFFICIAL, FP8_PLAIN, Format
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.attention_side import attention_errors
from needlepoint.verify.bounds import ScoreBound
from needlepoint.verify.byte_compare import equal_rows, equal_stored, unowned_change
from needlepoint.verify.compare import compare_masked_scores
from needlepoint.verify.contracts import ContractBlock
from needlepoint.verify.cost import CostTally, key_error
from needlepoint.verify.enclosure import exact as enclose
from needlepoint.verify.key_side import StageErrors
from needlepoint.verify.layer_results import layer_result
from needlepoint.verify.layer_run import LayerOutcome
from needlepoint.verify.limits import Limits
from needlepoint.verify.observed_judge import Judgement, judge_observed
from needlepoint.verify.query_side import pick_rows, query_rows, usable_scores
from needlepoint.verify.recordings import RecordingError
from needlepoint.verify.result import DIFFER, LayerResult
from needlepoint.verify.row_errors import RowErrors
from needlepoint.verify.rows import Rows
from needlepoint.verify.selection import PickErrors, judge_picks
from needlepoint.verify.stage_blocks import query_blocks
from needlepoint.verify.stage_results import zero_errors
from needlepoint.verify.stages import (
    INPUT,
    PROJECTED,
    QUERIES,
    SCORES,
    STORED,
    TOPK,
    WEIGHTS,
)
from needlepoint.verify.stored_rows import (
    decoded_queries,
    read_stored,
    replayable,
    unfolded_weights,
)

_FORMATS: dict[str, Format] = {
    "bf16": BF16,
    "fp8": FP8_PLAIN,
    "fp4": FP4_OFFICIAL,
    "float64": FLOAT64,
}


@dataclass(frozen=True)
class LayerPair:
    """One layer of both recordings; ``own`` is what is judged."""

    given: LayerInputs
    meant: Observed
    own_given: LayerInputs
    own: Observed

    @property
    def stages(self) -> frozenset[StageKey]:
        """Stages that both sides brought."""
        found = {(MAIN, INPUT), (MAIN, PROJECTED), *self.own.dense}
        if self.given.query is not None:
            found |= {(INDEX, PROJECTED), (QUERY, PROJECTED)}
        found |= {(path, STORED) for path in self.own.stored}
        found |= {(QUERY, QUERIES), (QUERY, WEIGHTS)} if self.own.query is not None else set()
        found |= {(INDEX, SCORES)} if self.own.scores is not None else set()
        found |= {(INDEX, TOPK)} if self.own.topk is not None else set()
        return frozenset(found)


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
    _require_same_constants(pair)
    given_errors = _given_errors(pair)
    upstream = any(bool(e.local.failed(1.0).any()) for e in given_errors.values())
    found = (
        _equal_stages(pair) if exact else judge_observed(pair.given, pair.own, arithmetic, limits)
    )
    outcome = LayerOutcome(
        layer=pair.given.layer,
        ratio=pair.given.ratio,
        errors=given_errors | dict(found.errors),
        picks=found.picks,
        costs={against: _cost(pair)},
        attention=_attention(pair),
        entry_bytes=sum(p.pool.shape[1] / p.page_size for p in pair.own.stored.values()),
        peak_transient_bytes=pair.own.peak_transient_bytes,
        path_taken=pair.own.path_taken,
    )
    result = layer_result(outcome, pair.stages, pair.given, limits, against, wanted=wanted)
    return outcome, _with_notes(result, pair) if exact else result, upstream


def _require_same_constants(pair: LayerPair) -> None:
    one, other = pair.given, pair.own_given
    constants: dict[str, tuple[object, object]] = {
        name: (getattr(one, name), getattr(other, name))
        for name in ("ratio", "lengths", "norm_eps", "topk", "weight_scale")
    }
    tensors = {"rope_table": (one.rope_table, other.rope_table)}
    for path, mine, theirs in ((INDEX, one.index, other.index), (MAIN, one.main, other.main)):
        if mine is not None and theirs is not None:
            tensors[f"{path}.ape"] = (mine.ape, theirs.ape)
            tensors[f"{path}.norm_weight"] = (mine.norm_weight, theirs.norm_weight)
    different = [name for name, (x, y) in constants.items() if x != y]
    different += [name for name, (x, y) in tensors.items() if not torch.equal(x, y)]
    if different:
        raise RecordingError(
            f"layer {one.layer}: {', '.join(different)} differ between the recordings; expected "
            "two recordings of one model and one input"
        )


def _given_errors(pair: LayerPair) -> dict[StageKey, StageErrors]:
    one, other = pair.given, pair.own_given
    rows: dict[StageKey, RowErrors] = {(MAIN, INPUT): equal_rows(other.hidden, one.hidden)}
    for path, meant, own in ((INDEX, one.index, other.index), (MAIN, one.main, other.main)):
        if meant is not None and own is not None:
            rows[path, PROJECTED] = equal_rows(
                torch.cat((own.kv, own.score), dim=1), torch.cat((meant.kv, meant.score), dim=1)
            )
    if one.query is not None and other.query is not None:
        meant_q = torch.cat((one.query.q.flatten(1), one.query.weights), dim=1)
        own_q = torch.cat((other.query.q.flatten(1), other.query.weights), dim=1)
        rows[QUERY, PROJECTED] = equal_rows(own_q, meant_q)
    return {key: StageErrors(key, row, row) for key, row in rows.items()}


def _equal_stages(pair: LayerPair) -> Judgement:
    rows: dict[StageKey, RowErrors] = {
        key: equal_rows(own, pair.meant.dense[key])
        for key, own in pair.own.dense.items()
        if len(own)
    }
    for path, own in pair.own.stored.items():
        if sum(own.entries):
            width = _width(pair, path)
            rows[path, STORED] = equal_stored(own, pair.meant.stored[path], width)
    if pair.own.query is not None and pair.meant.query is not None:
        rows[QUERY, QUERIES] = _equal_queries(pair.own.query, pair.meant.query)
        rows[QUERY, WEIGHTS] = equal_rows(pair.own.query.weights, pair.meant.query.weights)
    errors = {key: StageErrors(key, row, row) for key, row in rows.items()}
    scores, picks = _selection(pair)
    return Judgement(errors | scores, picks)


def _equal_queries(own: QueryRows, meant: QueryRows) -> RowErrors:
    row = equal_rows(own.codes, meant.codes)
    if own.scales is None or meant.scales is None:
        return row
    scales = equal_rows(own.scales.flatten(1), meant.scales.flatten(1))
    return row.join(scales, first_dim=0)


def _selection(pair: LayerPair) -> tuple[dict[StageKey, StageErrors], PickErrors | None]:
    """Compare scores within the bounds of both sides, and picks by meaning."""
    meant, own, given = pair.meant, pair.own, pair.given
    if meant.scores is None or own.scores is None or meant.query is None:
        return {}, None
    keys = replayable(read_stored(meant.stored[INDEX], 128).values)
    spans = [Rows(given.lengths, given.ratio).span(r) for r in range(len(given.lengths))]
    bounds = [ScoreBound.of_keys(enclose(keys[span])) for span in spans]
    score_rows: list[RowErrors] = []
    picks: list[PickErrors] = []
    for block in query_blocks(given.lengths, given.ratio, meant.query.codes[0].numel()):
        if block.entries == 0:
            score_rows.append(zero_errors(block.stop - block.start))
            bound = torch.empty(block.stop - block.start, 0)
            reference = found = bound
        else:
            part = query_rows(meant.query, block.rows)
            bound = 2 * bounds[block.request].of_queries(
                enclose(replayable(decoded_queries(part, _FORMATS[part.format]))),
                enclose(replayable(unfolded_weights(part))),
            )
            reference = meant.scores(block.request, block.start, block.stop)
            found = own.scores(block.request, block.start, block.stop)
            score_rows.append(compare_masked_scores(found, reference, bound, block.visible))
        if own.topk is not None and meant.topk is not None:
            picks.append(
                judge_picks(
                    own.topk[block.rows],
                    meant.topk[block.rows],
                    usable_scores(found, block),
                    usable_scores(reference, block),
                    bound[:, : block.columns],
                    block.visible,
                    given.topk,
                )
            )
    errors = {(INDEX, SCORES): RowErrors.concatenate(score_rows)}
    if picks:
        errors[INDEX, TOPK] = RowErrors.concatenate([pick_rows(p) for p in picks])
    judged = {key: StageErrors(key, row, row) for key, row in errors.items()}
    return judged, PickErrors.concatenate(picks) if picks else None


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
    """Mark stored stages whose unowned bytes changed: a row that nobody owns is nobody's error."""
    notes: Mapping[str, str | None] = {
        path: unowned_change(own, pair.meant.stored[path], _width(pair, path))
        for path, own in pair.own.stored.items()
    }
    stages = tuple(
        stage.model_copy(update={"verdict": DIFFER, "detail": notes[stage.path]})
        if stage.stage == STORED and stage.kind == "compared" and notes.get(stage.path)
        else stage
        for stage in result.stages
    )
    return result.model_copy(update={"stages": stages})


def _width(pair: LayerPair, path: str) -> int:
    return 128 if path == INDEX else pair.given.main.norm_weight.numel()
