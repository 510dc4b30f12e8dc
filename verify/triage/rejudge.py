"""``needlepoint rejudge``: new limits over a saved result, nothing rerun.

A row's error is kept in units of the a-priori radius, so another limit is another comparison of the
same numbers. What limits do not decide stays as it was: rows missing from the comparison, invalid
picks, swaps that no score justifies, bytes that no entry owns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from needlepoint.verify.base.stages import COMPARED, TOPK
from needlepoint.verify.judge.results.gates import Gate, apply_gates
from needlepoint.verify.judge.results.verdicts import (
    candidate_verdict,
    count_stages,
    first_divergence,
)
from needlepoint.verify.numerics.directions import Z_LIMIT, bias_note, limit_fault, passing_limit
from needlepoint.verify.numerics.limits import Limit, Limits
from needlepoint.verify.numerics.spread import not_finite, spread
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    CandidateResult,
    ErrorStats,
    LayerResult,
    Result,
    StageResult,
    Swaps,
    TopkResult,
    Verdict,
    worst_verdict,
)

_FP32_MAX = float(np.finfo(np.float32).max)
Errors = NDArray[np.float64]
Rows = Mapping[str, ArrayLike]


def rejudge(result: Result, rows: Rows, limits: Limits) -> Result:
    """Judge a saved result by other limits.

    Parameters
    ----------
    result
        As read from the file of ``--json``.
    rows
        The row errors beside it.
    limits
        New limits of every stage.

    Returns
    -------
    Result
        Under the new limits, its gates applied again.

    Raises
    ------
    ValueError
        If the row errors of a compared stage are missing or of another number.
    """
    candidates = tuple(_candidate(candidate, rows, limits) for candidate in result.candidates)
    counts = count_stages(candidates)
    verdict: Verdict = worst_verdict(candidate.verdict for candidate in candidates)
    if counts.compared == 0 or counts.compared < counts.expected:
        verdict = CANNOT_JUDGE
    gates = dict.fromkeys(Gate(g.path, g.operator, g.limit) for g in result.gates)
    judged = result.model_copy(
        update={"candidates": candidates, "counts": counts, "verdict": verdict, "gates": ()}
    )
    return apply_gates(judged, tuple(gates))


def _candidate(candidate: CandidateResult, rows: Rows, limits: Limits) -> CandidateResult:
    layers = tuple(
        _layer(layer, f"{candidate.name}/layer{layer.layer}", rows, limits)
        for layer in candidate.layers
    )
    return candidate.model_copy(
        update={
            "layers": layers,
            "verdict": candidate_verdict(layers),
            "first_divergence": first_divergence(layers),
        }
    )


def _layer(layer: LayerResult, prefix: str, rows: Rows, limits: Limits) -> LayerResult:
    stages = tuple(
        _stage(stage, f"{prefix}/{stage.path}/{stage.stage}", rows, limits[stage.stage])
        if stage.kind == COMPARED and stage.rows_compared
        else stage
        for stage in layer.stages
    )
    topk = layer.topk
    if topk is not None:
        gaps = rows.get(f"{prefix}/index/{TOPK}/swaps")
        topk = _topk(topk, gaps, limits[TOPK].value, prefix)
    return layer.model_copy(update={"stages": stages, "topk": topk})


def _stage(stage: StageResult, name: str, rows: Rows, limit: Limit) -> StageResult:
    local, accumulated = (
        _errors(rows, f"{name}/{which}", stage.rows_compared) for which in ("local", "accumulated")
    )
    old = 1.0 if stage.limit is None else stage.limit.value
    _require_own(f"{name}/local", stage.local, local, old)
    _require_own(f"{name}/accumulated", stage.accumulated, accumulated, old)
    narrowest, widest = (
        (None, None) if stage.limit is None else (stage.limit.narrowest, stage.limit.widest)
    )
    bound = Z_LIMIT * max(1.0, limit.value)
    bias = tuple(
        test.model_copy(update={"limit": bound, "exceeded": abs(test.z) > bound})
        for test in stage.bias
    )
    verdict, detail = _verdict(stage, local, limit.value)
    fault = limit_fault(limit.value, narrowest, widest)
    if stage.rows_compared != stage.rows_expected or fault is not None:
        verdict, detail = CANNOT_JUDGE, fault or detail
    elif leaning := bias_note(bias):
        verdict, detail = DIFFER, leaning
    scale = old / limit.value
    worst = stage.worst
    if scale != 1:
        worst = tuple(
            row.model_copy(update={"error": None if row.error is None else row.error * scale})
            for row in stage.worst
        )
    both = np.concatenate((local, accumulated))
    largest = float(np.where(np.isnan(both), np.inf, both).max())
    shown = None
    if stage.limit is not None:
        passing = passing_limit(largest, bias, narrowest, widest)
        shown = stage.limit.model_copy(update={"value": limit.value, "passing": passing})
    return stage.model_copy(
        update={
            "verdict": verdict,
            "detail": detail,
            "limit": shown,
            "local": _stats(stage.local, local, limit.value),
            "accumulated": _stats(stage.accumulated, accumulated, limit.value),
            "worst": worst,
            "bias": bias,
        }
    )


def _verdict(stage: StageResult, local: Errors, limit: float) -> tuple[Verdict, str | None]:
    """Return the verdict by size; a difference that no size or direction explains stays."""
    by_size = stage.local is not None and stage.local.rows_failed > 0
    by_limit = by_size or any(test.exceeded for test in stage.bias)
    if stage.verdict == DIFFER and not by_limit:
        return DIFFER, stage.detail
    stale = stage.detail is not None and stage.detail in (
        bias_note(stage.bias),
        _old_fault(stage),
    )
    return (
        MATCH if bool((local <= limit).all()) else DIFFER,
        None if stale else stage.detail,
    )


def _old_fault(stage: StageResult) -> str | None:
    if stage.limit is None:
        return None
    return limit_fault(stage.limit.value, stage.limit.narrowest, stage.limit.widest)


def _stats(stats: ErrorStats | None, errors: Errors, limit: float) -> ErrorStats | None:
    if stats is None:
        return None
    return stats.model_copy(
        update={
            "error": spread(errors / limit),
            "rows_failed": int((~(errors <= limit)).sum()),
            "rows_not_finite": not_finite(errors),
        }
    )


def _topk(topk: TopkResult, gaps: ArrayLike | None, limit: float, prefix: str) -> TopkResult:
    """Return the selection with its justified swaps parted anew."""
    swaps = topk.swaps
    expected = swaps.explained + swaps.upstream
    found = np.asarray([] if gaps is None else gaps)
    known = len(found)
    if known != expected:
        raise ValueError(
            f"row errors {prefix}/index/{TOPK}/swaps: {known} swaps, the result has {expected}; "
            "expected the row file that was written with this result"
        )
    explained = int((found <= limit).sum())
    moved = Swaps(
        tie=swaps.tie,
        explained=explained,
        selector=swaps.selector,
        unknown=swaps.unknown,
        upstream=expected - explained,
    )
    return topk.model_copy(update={"swaps": moved})


def _require_own(name: str, told: ErrorStats | None, errors: Errors, limit: float) -> None:
    """Refuse row errors of another run, which fit by name and number.

    Raises
    ------
    ValueError
        If the largest error is not the one of the result.
    """
    if told is None:
        return
    found = float(np.where(np.isnan(errors), np.inf, errors).max())
    # Rows are kept in fp32, statistics in float64; null is an error without a number.
    expected = np.inf if told.error.max is None else told.error.max * limit
    expected = expected if expected <= _FP32_MAX else np.inf
    if not np.isclose(found, expected, rtol=1e-5, atol=1e-8):
        raise ValueError(
            f"row errors {name}: the largest is {found:.6g} and in the result {expected:.6g}; "
            "expected the row file that was written with this result"
        )


def _errors(rows: Rows, name: str, count: int) -> Errors:
    found = np.asarray(rows.get(name, ()), dtype=np.float64)
    if name not in rows or found.shape != (count,):
        what = f"shape {list(found.shape)}" if name in rows else "missing"
        raise ValueError(
            f"row errors {name}: {what}, the result compared {count} rows; expected the row file "
            "that was written with this result"
        )
    return found
