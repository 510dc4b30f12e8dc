"""From row errors to the result: one stage's statistics, verdict and worst rows."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from needlepoint.optimized.protocol.stages import stage_named
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stages import COMPARED, TOPK
from needlepoint.verify.judge.blame import stage_blame
from needlepoint.verify.judge.degenerate import limit_range
from needlepoint.verify.numerics.bias import bias_tests
from needlepoint.verify.numerics.directions import bias_note, limit_fault, passing_limit
from needlepoint.verify.numerics.limits import Limit
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.numerics.spread import finite, not_finite, spread
from needlepoint.verify.numerics.tally import no_tally
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    ErrorStats,
    Kind,
    StageLimit,
    StageResult,
    Verdict,
    WorstRow,
)

WORST_ROWS = 16
"""Rows named per stage; every row's error is in the row file."""

NO_ENTRY = -1
"""What stands for the lost and the gained entry of a row of picks without a swap."""


def compared_stage(errors: StageErrors, rows: Rows, limit: Limit) -> StageResult:
    """Return the result of a stage that was compared.

    The verdict is that of the local errors: a fault belongs to the stage where it was born. A stage
    also differs where no local error shows but the accumulated one leaves its bound, because then
    something between two observed stages was lost, and where its rows are within the limit but all
    err in one direction. A limit that cannot judge the stage gives no verdict.

    Parameters
    ----------
    errors
        Row errors of every row that was compared.
    rows
        Where the rows stand; their number is what was expected.
    limit
        Limit of the stage.
    """
    path, stage = errors.key
    usual = stage_named(stage).distance
    unit = None if usual is None else errors.distance_unit or usual
    stats = partial(_stats, limit=limit, unit=unit)
    compared = errors.local.rows
    failed = errors.local.failed(limit.value)
    verdict: Verdict = DIFFER if bool(failed.any()) else MATCH
    tests = bias_tests(errors, limit.value)
    narrowest, widest = limit_range(errors)
    detail = limit_fault(limit.value, narrowest, widest)
    if compared != rows.total or compared == 0 or detail is not None:
        verdict = CANNOT_JUDGE
    elif leaning := bias_note(tests):
        verdict, detail = DIFFER, leaning
    return StageResult.model_validate(
        {
            "stage": stage,
            "path": path,
            "kind": COMPARED,
            "verdict": verdict,
            "rows_expected": rows.total,
            "rows_compared": compared,
            "limit": StageLimit(
                value=limit.value,
                unit=limit.unit,
                derivation=limit.derivation,
                narrowest=narrowest,
                widest=widest,
                passing=passing_limit(_worst_error(errors), tests, narrowest, widest),
            ),
            "local": stats(errors.local),
            "accumulated": stats(errors.accumulated),
            "worst": _worst(errors, rows, limit) if compared == rows.total else (),
            "detail": detail,
            "bias": tests,
            "blame": stage_blame(errors, limit.value),
        }
    )


def accumulated_only(errors: StageErrors, limit: Limit) -> bool:
    """Return whether accumulated errors fail although every local one passes."""
    return not bool(errors.local.failed(limit.value).any()) and bool(
        errors.accumulated.failed(limit.value).any()
    )


def consequence_stage(key: tuple[str, str], errors: RowErrors, expected: int) -> StageResult:
    """Return the entry of a consequence: relative row errors, reported and never judged.

    Parameters
    ----------
    key
        (path, stage).
    errors
        Row errors whose ratio is the relative error.
    expected
        Rows of the stage.
    """
    path, stage = key
    return StageResult.model_validate(
        {
            "stage": stage,
            "path": path,
            "kind": "consequence",
            "verdict": None,
            "rows_expected": expected,
            "rows_compared": errors.rows,
            "accumulated": ErrorStats(
                error=spread(errors.ratio),
                relative=spread(errors.ratio),
                rows_not_finite=not_finite(errors.ratio),
            ),
            "detail": "relative error of the output; not judged",
        }
    )


def uncompared_stage(
    key: tuple[str, str], kind: Kind, expected: int, detail: str | None = None
) -> StageResult:
    """Return the entry of a stage that was given, not covered or skipped."""
    path, stage = key
    return StageResult.model_validate(
        {
            "stage": stage,
            "path": path,
            "kind": kind,
            "verdict": CANNOT_JUDGE if kind == "skipped" else None,
            "rows_expected": expected,
            "rows_compared": 0,
            "detail": detail,
        }
    )


def row_tensors(errors: StageErrors, prefix: str) -> dict[str, Tensor]:
    """Return the per-row errors of a stage by name: ratios both ways, and relative errors."""
    name = f"{prefix}/{errors.key[0]}/{errors.key[1]}"
    return {
        f"{name}/local": errors.local.ratio.to(torch.float32),
        f"{name}/accumulated": errors.accumulated.ratio.to(torch.float32),
        f"{name}/relative": errors.accumulated.relative(2.0**-126).to(torch.float32),
    }


def zero_errors(rows: int) -> RowErrors:
    """Return the errors of rows in which nothing could differ, such as scores of no entries."""
    zero = torch.zeros(rows, dtype=torch.float64)
    count = torch.zeros(rows, dtype=torch.int64)
    fault = count.to(torch.bool)
    return RowErrors(zero, zero, zero, count, count, zero, zero, fault, no_tally(rows))


def _worst_error(errors: StageErrors) -> float:
    """Return the largest row error, infinite where one is not a number."""
    both = torch.cat((errors.local.ratio, errors.accumulated.ratio))
    return float(both.nan_to_num(nan=math.inf).max()) if len(both) else 0.0


def _stats(errors: RowErrors, limit: Limit, unit: str | None) -> ErrorStats:
    units = errors.ratio / limit.value
    relative = spread(errors.relative(limit.floor))
    distance = int(errors.distance.max()) if errors.rows else 0
    return ErrorStats.model_validate(
        {
            "error": spread(units),
            "relative": None if unit is None else relative,
            "distance_max": None if unit is None else distance,
            "distance_unit": unit,
            "rows_failed": int(errors.failed(limit.value).sum()),
            "rows_not_finite": not_finite(errors.ratio),
        }
    )


def _worst(errors: StageErrors, rows: Rows, limit: Limit) -> tuple[WorstRow, ...]:
    shown = errors.accumulated if accumulated_only(errors, limit) else errors.local
    order = shown.ratio.nan_to_num(nan=math.inf).sort(descending=True, stable=True).indices
    picks = errors.key[1] == TOPK
    return tuple(_worst_row(shown, int(row), rows, limit, picks) for row in order[:WORST_ROWS])


def _worst_row(errors: RowErrors, row: int, rows: Rows, limit: Limit, picks: bool) -> WorstRow:
    token = rows.token(row)
    expected, found = float(errors.expected[row]), float(errors.found[row])
    if picks and expected == found == NO_ENTRY and not errors.ratio[row] <= limit.value:
        return WorstRow(
            request=token.request,
            position=token.position,
            entry=None,
            dim=None,
            error=None,
            expected=None,
            found=None,
            detail="picks that are invalid, and none that was swapped",
        )
    detail = "scale" if bool(errors.scale_fault[row]) else None
    if not math.isfinite(found):
        detail = f"found is {found}"
    return WorstRow(
        request=token.request,
        position=token.position,
        entry=token.entry,
        dim=int(errors.dim[row]),
        error=finite(float(errors.ratio[row]) / limit.value),
        expected=finite(expected),
        found=finite(found),
        detail=detail,
    )
