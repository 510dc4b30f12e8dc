"""Stage, top-k and layer parts of ``needlepoint.result/1``."""

from __future__ import annotations

from typing import Literal

from needlepoint.verify.schema.base import Count, Kind, Number, Path, Record, StageName, Verdict
from needlepoint.verify.schema.swap import SwapResult


class StageLimit(Record):
    """The limit a stage is judged by, fixed before the run."""

    value: Number
    unit: str
    derivation: str
    narrowest: Number | None = None
    """A smaller limit is narrower than half an ULP of every row: nothing could pass."""
    widest: Number | None = None
    """From here on the radius is as wide as the data of every row: nothing could fail."""
    passing: Number | None = None
    """Smallest limit that every row passes, both ways; null where there is none."""


class Spread(Record):
    """Maximum, mean and 99th percentile over rows; null where not finite."""

    max: Number | None
    mean: Number | None
    p99: Number | None


class ErrorStats(Record):
    """Row errors of one stage."""

    error: Spread
    """Row errors in units of the stage's limit: 1 is the limit itself."""
    relative: Spread | None = None
    """``norm(c - r) / max(norm(r), floor)``."""
    distance_max: Count | None = None
    """Largest ULP or code distance of any element."""
    distance_unit: Literal["ulp", "codes", "elements"] | None = None
    rows_failed: Count = 0
    rows_not_finite: Count = 0
    """Rows whose error is NaN or infinite, for example where the bound is zero."""


class WorstRow(Record):
    """One row among the worst of its stage."""

    request: Count | None
    """Null, with the position, for a byte that belongs to no token."""
    position: Count | None
    entry: Count | None
    """Entry of a key-side row; null for a query-side row."""
    dim: Count | None
    error: Number | None
    """In units of the stage's limit; null where not finite."""
    expected: Number | None
    found: Number | None
    detail: str | None = None
    """What the numbers cannot say, for example ``found is nan``."""


class BiasTest(Record):
    """One test of a direction: errors within the size limit that all point one way."""

    test: Literal["gain", "flips", "ties"]
    """Size of unrounded numbers, code flips of rounded ones, exact ties against the tie rule."""
    z: Number
    """Self-normalised sum over rows; positive is away from zero."""
    limit: Number
    effect: Number
    """Mean relative gain; up minus down over all flips; share of ties against the rule."""
    rows: Count
    """Distinct rows that say something."""
    rows_needed: Count
    """Rows below which the limit cannot be reached."""
    exceeded: bool


class StageBlame(Record):
    """Where a stage's accumulated error comes from, as RMS relative to the reference's rows."""

    format: Number | None
    """What the stage's own rounding point costs the reference."""
    arithmetic: Number | None
    """Error of the rows within the limit."""
    fault: Number | None
    """Error of the rows beyond the limit; 0 where there are none."""
    input: Number | None
    """Largest accumulated error among the stages this one reads; null where none was observed."""
    output: Number | None
    """Accumulated error of this stage: format aside, arithmetic and fault together."""


class StageResult(Record):
    """One stage of one layer on one path."""

    stage: StageName
    path: Path
    kind: Kind
    verdict: Verdict | None
    """Null for stages that are not judged: given, consequence, not covered."""
    rows_expected: Count
    rows_compared: Count
    limit: StageLimit | None = None
    local: ErrorStats | None = None
    accumulated: ErrorStats | None = None
    worst: tuple[WorstRow, ...] = ()
    detail: str | None = None
    bias: tuple[BiasTest, ...] = ()
    blame: StageBlame | None = None


class Swaps(Record):
    """Picks that differ from the profile's reference, by class."""

    tie: Count = 0
    explained: Count = 0
    selector: Count = 0
    unknown: Count = 0
    upstream: Count = 0
    """Justified by the candidate's own scores, but wider than the a-priori limit of scores."""


class TopkResult(Record):
    """Selection of one layer: swaps against the profile, overlap and loss against the contract."""

    k: Count
    rows: Count
    discarded_mean: Number | None
    overlap_mean: Number | None
    overlap_min: Number | None
    swaps: Swaps
    score_lost_max: Number | None
    """In units of the row's score RMS."""
    invalid: Count


class LayerResult(Record):
    """Everything judged in one layer."""

    layer: Count
    ratio: Count
    stages: tuple[StageResult, ...]
    topk: TopkResult | None = None
    swap: SwapResult | None = None
