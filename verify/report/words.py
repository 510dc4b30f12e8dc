"""What every report says of a result in the same way: names, errors, counts, costs, selection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, Literal, Protocol

from needlepoint.verify.base.numbers import number
from needlepoint.verify.schema.base import Interval
from needlepoint.verify.schema.result import (
    DIFFER,
    CandidateResult,
    ContractCost,
    ErrorStats,
    FirstDivergence,
    GateResult,
    LayerResult,
    Result,
    StageResult,
    TopkResult,
    WorstRow,
)

CONTRACTS: Final[tuple[Literal["exact", "bf16", "official"], ...]] = ("exact", "bf16", "official")
Judged = tuple[CandidateResult, LayerResult, StageResult]


class _Staged(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def stage(self) -> str: ...


def stage_name(stage: _Staged) -> str:
    """Return a stage as ``index.stored``."""
    return f"{stage.path}.{stage.stage}"


def exact_number(value: float | None) -> str:
    """Return a number with the digits that tell neighbouring fp32 values apart."""
    return "-" if value is None else f"{value:.9g}"


def token(row: WorstRow | FirstDivergence) -> str:
    """Return a token as ``request 0 position 511 entry 127``."""
    if row.request is None:
        return "no token"
    entry = "" if row.entry is None else f" entry {row.entry}"
    return f"request {row.request} position {row.position}{entry}"


def says_something(stage: StageResult) -> bool:
    """Return whether a stage was judged or measured, not only listed."""
    return stage.verdict is not None or stage.local is not None or stage.accumulated is not None


def largest_error(stats: ErrorStats | None) -> str:
    """Return the largest row error; ``inf`` where a row has no finite one."""
    if stats is None:
        return "-"
    return "inf" if stats.rows_not_finite else number(stats.error.max)


def row_error(row: WorstRow) -> str:
    """Return the error of one row; ``inf`` where it has no finite one."""
    return "inf" if row.error is None else number(row.error)


def stages_of(result: Result) -> Iterator[Judged]:
    """Yield every stage of a result with its candidate and layer."""
    for candidate in result.candidates:
        for layer in candidate.layers:
            for stage in layer.stages:
                yield candidate, layer, stage


def differing(result: Result) -> list[Judged]:
    """Return the stages that differ."""
    return [judged for judged in stages_of(result) if judged[2].verdict == DIFFER]


def local_errors(layers: Iterable[LayerResult]) -> Iterator[tuple[float, int, str]]:
    """Yield the largest local error of every stage that has one, its layer and its name."""
    for layer in layers:
        for stage in layer.stages:
            local = stage.local
            if local is not None and (local.error.max is not None or local.rows_not_finite):
                error = math.inf if local.rows_not_finite else local.error.max or 0.0
                yield error, layer.layer, stage_name(stage)


def skipped(result: Result) -> list[str]:
    """Return the stages that were declared and not compared, each with its reason."""
    return [
        f"{ref.candidate} layer {ref.layer} {stage_name(ref)}"
        + (f" ({ref.reason})" if ref.reason else "")
        for ref in result.counts.skipped
    ]


def gate_name(gate: GateResult) -> str:
    """Return a gate as it was asked for."""
    return f"{gate.path}{gate.operator}{exact_number(gate.limit)}"


def gate_word(gate: GateResult, unknown: str = "cannot judge") -> str:
    """Return what became of a gate."""
    return {True: "exceeded", False: "kept", None: unknown}[gate.exceeded]


def swap_counts(topk: TopkResult) -> dict[str, int]:
    """Return swapped picks by class, invalid ones last."""
    return {**topk.swaps.model_dump(), "invalid": topk.invalid}


def costs(candidate: CandidateResult) -> list[tuple[str, ContractCost]]:
    """Return what a candidate costs against each contract that was measured."""
    found = ((name, getattr(candidate.format_cost, name)) for name in CONTRACTS)
    return [(name, cost) for name, cost in found if cost is not None]


def interval(ci: Interval | None, between: str = " to ") -> str:
    """Return a confidence interval."""
    return "-" if ci is None else f"{ci[0]:.3f}{between}{ci[1]:.3f}"
