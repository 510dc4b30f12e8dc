"""Recall and scenario parts of ``needlepoint.result/1``; null in runs that measured neither."""

from __future__ import annotations

from pydantic import Field

from needlepoint.verify.result_base import Count, Interval, Number, Record


class RecallCell(Record):
    """Recall at one point of the grid, candidate and reference on the same rows."""

    length: Count
    """Tokens."""
    depth: Number
    k: Count
    distractors: Count
    rows: Count
    hits: Count
    ci95: Interval | None
    reference_hits: Count
    lost: Count
    """Rows that the reference hits and the candidate misses."""
    gained: Count
    exercised: bool
    """False where every finished window is picked whatever the scores say."""


class RecallResult(Record):
    """Recall of one candidate beside the reference, at the default k and density."""

    rows: Count
    hits: Count
    rate: Number | None
    ci95: Interval | None
    reference_rate: Number | None
    lost: Count
    gained: Count
    delta: Number | None
    delta_ci95: Interval | None
    mcnemar_p: Number | None
    detectable_drop: Number | None
    cells: tuple[RecallCell, ...] = ()
    causes: dict[str, Count] = Field(default_factory=dict)


class ScenarioResult(Record):
    """Request histories that were replayed."""

    histories: Count
    distinct: Count
    events: dict[str, Count]
    residues4: Count
    """Residues of lengths modulo 4 that were covered."""
    residues128: Count
    failures: Count
